"""A whole application: three stages, joined by transactions."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.acceptance.scenario import Message, Scene, scenario

ORDERS = 30


@scenario(seconds=60)
async def orders_pass_three_stages_exactly_once(scene: Scene) -> None:
    async with scene.queue("received") as received, scene.queue("priced") as priced, scene.queue("shipped") as shipped:
        done: list[dict[str, Any]] = []
        complete = asyncio.Event()

        async def price(message: Message) -> None:
            order = message["data"]
            priced_order = {**order, "price": order["n"] * 10}
            customer = scene.queen.transaction().queue(priced).partition(message["partition"])
            await customer.push([{"data": priced_order}]).ack(message).commit()

        async def ship(messages: list[Message]) -> None:
            transaction = scene.queen.transaction()
            for message in messages:
                pushing = transaction.queue(shipped).partition(message["partition"])
                transaction = pushing.push([{"data": {**message["data"], "shipped": True}}])
            await transaction.ack(messages, "completed", {"consumer_group": "shippers"}).commit()

        async def note(message: Message) -> None:
            done.append(message["data"])
            if len(done) == ORDERS:
                complete.set()

        async def consume(queue: str, handle: Any, **how: Any) -> None:
            builder = scene.queen.queue(queue).timeout_millis(500).concurrency(2)
            for option, value in how.items():
                builder = getattr(builder, option)(value)
            await builder.consume(handle, signal=complete)

        stages = asyncio.gather(
            consume(received, price, auto_ack=False),
            consume(priced, ship, group="shippers", batch=5, partitions=3, auto_ack=False),
            consume(shipped, note),
        )
        for n in range(ORDERS):
            order = {"customer": f"c{n % 3}", "n": n}
            await scene.queen.queue(received).partition(order["customer"]).push([{"data": order}])
        await stages

        for customer in range(3):
            expected = [
                {"customer": f"c{customer}", "n": n, "price": n * 10, "shipped": True}
                for n in range(customer, ORDERS, 3)
            ]
            assert [order for order in done if order["customer"] == f"c{customer}"] == expected, done
        for queue, group in ((received, None), (priced, "shippers"), (shipped, None)):
            builder = scene.queen.queue(queue).wait(False)
            assert await (builder.group(group) if group else builder).pop() == []

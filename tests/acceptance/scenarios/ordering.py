"""A partition's messages come in the order they were pushed, however they are consumed."""

from __future__ import annotations

import asyncio

from tests.acceptance.scenario import Message, Scene, payloads, scenario


@scenario()
async def a_hundred_messages_come_in_order_one_by_one(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push_singly(scene, queue, 100)
        got: list[int] = []

        async def handle(message: Message) -> None:
            got.append(message["data"]["n"])

        await scene.queen.queue(queue).batch(1).limit(100).consume(handle)
        assert got == list(range(100)), got


@scenario()
async def a_hundred_messages_come_in_order_in_one_batch(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push_singly(scene, queue, 100)
        batches: list[list[int]] = []

        async def handle(messages: list[Message]) -> None:
            batches.append([message["data"]["n"] for message in messages])

        await scene.queen.queue(queue).batch(100).limit(100).consume(handle)
        assert batches == [list(range(100))], batches


@scenario()
async def ten_workers_on_one_partition_keep_the_order(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push_singly(scene, queue, 100)
        got: list[int] = []
        complete = asyncio.Event()

        async def handle(message: Message) -> None:
            got.append(message["data"]["n"])
            # Room for another worker to overtake, if it were let in.
            await asyncio.sleep(0.002)
            if len(got) == 100:
                complete.set()

        consumer = scene.queen.queue(queue).concurrency(10).batch(1).timeout_millis(500)
        await consumer.consume(handle, signal=complete)
        assert got == list(range(100)), got


@scenario()
async def ten_workers_of_a_group_keep_the_order_in_batches(scene: Scene) -> None:
    async with scene.queue() as queue:
        for start in range(0, 1000, 100):
            await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(start, start + 100)])
        got: list[int] = []
        complete = asyncio.Event()

        async def handle(messages: list[Message]) -> None:
            got.extend(message["data"]["n"] for message in messages)
            await asyncio.sleep(0.005)
            if len(got) == 1000:
                complete.set()

        consumer = scene.queen.queue(queue).group("workers").concurrency(10).batch(37).timeout_millis(500)
        await consumer.consume(handle, signal=complete)
        assert got == list(range(1000)), len(got)


@scenario(alone=True, seconds=60)
async def ten_thousand_messages_come_in_order_in_batches_of_a_thousand(scene: Scene) -> None:
    async with scene.queue() as queue:
        for start in range(0, 10_000, 1000):
            await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(start, start + 1000)])
        batches: list[list[int]] = []

        async def handle(messages: list[Message]) -> None:
            batches.append([message["data"]["n"] for message in messages])

        await scene.queen.queue(queue).batch(1000).limit(10_000).consume(handle)
        assert [len(batch) for batch in batches] == [1000] * 10, [len(batch) for batch in batches]
        assert [n for batch in batches for n in batch] == list(range(10_000))


@scenario()
async def redelivery_keeps_the_order(scene: Scene) -> None:
    async with scene.queue(lease_time=1) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(5)])
        first = await scene.queen.queue(queue).batch(3).wait(False).pop()
        await scene.queen.ack(first[0], True)
        again = await scene.queen.queue(queue).batch(10).timeout_millis(5000).pop()
        assert payloads(again) == [{"n": n} for n in range(1, 5)], again


async def _push_singly(scene: Scene, queue: str, count: int) -> None:
    for n in range(count):
        await scene.queen.queue(queue).push([{"data": {"n": n}}])

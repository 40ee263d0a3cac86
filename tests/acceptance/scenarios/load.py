"""Many messages, many consumers."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from tests.acceptance.scenario import Message, Scene, scenario

MESSAGES = 2_000
PARTITIONS = 20
CONSUMERS = 12


@scenario(alone=True, seconds=90)
async def thousands_of_messages_reach_a_dozen_consumers_once_and_in_order(scene: Scene) -> None:
    async with scene.queue() as queue:
        seen: defaultdict[str, list[int]] = defaultdict(list)
        complete = asyncio.Event()

        async def produce(partition: int) -> None:
            each = MESSAGES // PARTITIONS
            for start in range(0, each, 50):
                items = [{"data": {"n": n}} for n in range(start, start + 50)]
                await scene.queen.queue(queue).partition(f"p{partition}").push(items)

        async def handle(messages: list[Message]) -> None:
            for message in messages:
                seen[message["partition"]].append(message["data"]["n"])
            if sum(map(len, seen.values())) >= MESSAGES:
                complete.set()

        async def consume() -> None:
            consumer = scene.queen.queue(queue).group("crowd").concurrency(CONSUMERS).batch(200).timeout_millis(500)
            await consumer.consume(handle, signal=complete)

        await asyncio.gather(consume(), *(produce(partition) for partition in range(PARTITIONS)))
        assert len(seen) == PARTITIONS, sorted(seen)
        for partition, numbers in seen.items():
            assert numbers == list(range(MESSAGES // PARTITIONS)), (partition, len(numbers))


@scenario(alone=True, seconds=60)
async def a_dozen_consumers_share_a_backlog_of_single_messages(scene: Scene) -> None:
    async with scene.queue() as queue:
        for partition in range(30):
            await scene.queen.queue(queue).partition(f"p{partition}").push([{"data": {"n": n}} for n in range(10)])
        seen: defaultdict[str, list[int]] = defaultdict(list)
        complete = asyncio.Event()

        async def handle(message: Message) -> None:
            seen[message["partition"]].append(message["data"]["n"])
            if sum(map(len, seen.values())) >= 300:
                complete.set()

        consumer = scene.queen.queue(queue).concurrency(CONSUMERS).batch(1).timeout_millis(500)
        await consumer.consume(handle, signal=complete)
        assert len(seen) == 30, sorted(seen)
        assert all(numbers == list(range(10)) for numbers in seen.values()), seen

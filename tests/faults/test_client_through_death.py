"""The client's consumers and buffers while workers of the server are killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest

from queen import Message, Queen, QueenConnectionError, TopicItem
from tests.faults.conftest import Victim
from tests.support.ageing import until

MESSAGES = 1500


@pytest.mark.soak
async def test_everything_buffered_is_handled_although_workers_are_killed(victim: Victim) -> None:
    handled: Counter[int] = Counter()
    order: dict[str, list[int]] = {}
    enough = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        for message in messages:
            number = message["data"]
            if not handled[number]:
                order.setdefault(message["partition"], []).append(number)
            handled[number] += 1
        if len(handled) == MESSAGES:
            enough.set()

    async def kill() -> None:
        """One worker after the other, each when another third has been handled."""
        for goal in (MESSAGES // 3, 2 * MESSAGES // 3):
            await until(partial(reached, goal))
            victim.workers()[0].kill()

    def reached(goal: int) -> bool:
        return len(handled) > goal

    async with Queen(victim.url, retry_delay_millis=50) as queen:
        await queen.queue("q").config({"leaseTime": 2}).create()
        consuming = asyncio.ensure_future(queen.queue("q").batch(10).concurrency(3).consume(handle, signal=enough))
        killing = asyncio.create_task(kill())
        for number in range(MESSAGES):
            buffer = queen.queue("q").partition(f"p{number % 5}").buffer({"message_count": 20, "time_millis": 50})
            await buffer.push({"data": number})
            if number % 100 == 0:
                await asyncio.sleep(0.05)
        await flush(queen)
        await asyncio.wait_for(consuming, 100)
        await killing

    assert set(handled) == set(range(MESSAGES))
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def flush(queen: Queen) -> None:
    """Again, when no worker was there to take it: what could not be sent has stayed in the buffer."""
    async with asyncio.timeout(100):
        while True:
            try:
                return await queen.flush_all_buffers()
            except QueenConnectionError:
                await asyncio.sleep(0.1)


@pytest.mark.soak
async def test_every_item_of_a_topic_is_handled_although_workers_are_killed(victim: Victim) -> None:
    count = 300
    handled: Counter[int] = Counter()
    enough = asyncio.Event()

    async def handle(items: list[TopicItem]) -> None:
        handled.update(item["data"] for item in items)
        if len(handled) == count + 1:
            enough.set()

    def some_are_handled() -> bool:
        return len(handled) > count // 4

    async with Queen(victim.url, retry_delay_millis=50, retry_attempts=20) as queen:
        for first in range(0, count, 20):
            await queen.topic("ns", "jobs").enqueue(list(range(first, first + 20)))
        sentence = queen.topic("ns", "jobs").batch(10).concurrency(2).lease(2)
        consuming = asyncio.ensure_future(sentence.consume(handle, signal=enough))
        await until(some_are_handled)
        victim.workers()[0].kill()
        # Whatever the worker did with it, there is one of it.
        await queen.topic("ns", "jobs").idempotency_key("last").enqueue(count)
        await asyncio.wait_for(consuming, 100)
        counts = await queen.topic("ns", "jobs").counts()

    assert set(handled) == set(range(count + 1))
    assert counts is not None
    assert counts["dead"] == 0

"""Messages that go by themselves, after their time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.acceptance.scenario import Scene, Stopwatch, payloads, scenario


@scenario(seconds=40)
async def messages_older_than_the_retention_are_gone(scene: Scene) -> None:
    async with scene.queue(retention_enabled=True, retention_seconds=10) as queue:
        await _check_gone_after_ten_seconds(scene, queue)


@scenario(seconds=40)
async def messages_older_than_the_maximum_wait_are_gone(scene: Scene) -> None:
    async with scene.queue(max_wait_time_seconds=10) as queue:
        await _check_gone_after_ten_seconds(scene, queue)


@scenario(seconds=40)
async def consumed_messages_go_before_those_that_wait(scene: Scene) -> None:
    async with scene.queue(retention_enabled=True, completed_retention_seconds=3) as queue:
        await scene.queen.queue(queue).push([{"transactionId": "first", "data": {"n": 1}}])
        await scene.queen.queue(queue).push([{"transactionId": "second", "data": {"n": 2}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        await scene.queen.ack(message, True)

        async def is_gone() -> bool:
            return not await _exists(scene, message["partitionId"], "first")

        await _until(is_gone, seconds=60)
        assert payloads(await scene.queen.queue(queue).group("late").batch(10).wait(False).pop()) == [{"n": 2}]


@scenario(seconds=40)
async def messages_without_retention_stay(scene: Scene) -> None:
    async with scene.queue(retention_seconds=1, completed_retention_seconds=1) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        await asyncio.sleep(6)
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]


@scenario(seconds=40)
async def messages_older_than_their_time_to_live_are_not_delivered(scene: Scene) -> None:
    async with scene.queue(ttl=2) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        assert payloads(await scene.queen.queue(queue).group("early").wait(False).pop()) == [{"n": 1}]
        await asyncio.sleep(6)
        assert await scene.queen.queue(queue).group("late").wait(False).pop() == []


async def _check_gone_after_ten_seconds(scene: Scene, queue: str) -> None:
    watch = Stopwatch()
    [pushed] = await scene.queen.queue(queue).push([{"transactionId": "old", "data": {"n": 1}}])

    async def is_gone() -> bool:
        return not await _exists(scene, pushed["partition_id"], "old")

    await _until(is_gone, seconds=60)
    assert watch.seconds > 9.5, watch.seconds
    assert await scene.queen.queue(queue).group("late").wait(False).pop() == []
    # The queue works on.
    await scene.queen.queue(queue).push([{"data": {"n": 2}}])
    assert payloads(await scene.queen.queue(queue).group("late").wait(False).pop()) == [{"n": 2}]


async def _exists(scene: Scene, partition_id: str, transaction_id: str) -> bool:
    try:
        await scene.queen.admin.get_message(partition_id, transaction_id)
    except Exception as error:
        assert str(error) == "Message not found", error
        return False
    return True


async def _until(holds: Callable[[], Awaitable[bool]], seconds: float) -> None:
    watch = Stopwatch()
    while not await holds():
        assert watch.seconds < seconds, f"not so after {seconds} s"
        await asyncio.sleep(0.25)

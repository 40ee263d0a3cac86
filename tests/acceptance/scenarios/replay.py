"""Consuming again: seek, and groups that are deleted."""

from __future__ import annotations

import asyncio

from tests.acceptance.scenario import Scene, payloads, scenario

EVERYTHING = [{"n": n} for n in range(10)]


@scenario()
async def a_group_that_seeks_back_consumes_everything_again(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _consume_everything(scene, queue, "g")
        answer = await scene.queen.admin.seek_consumer_group("g", queue, {"timestamp": "2020-01-01T00:00:00.000Z"})
        assert answer["success"] is True and answer["partitionsUpdated"] == 1, answer
        await _consume_everything(scene, queue, "g", push=False)


@scenario()
async def a_group_seeks_to_a_moment_in_between(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        [first] = await scene.queen.queue(queue).group("g").wait(False).pop()
        await scene.queen.ack(first, True, {"group": "g"})
        await scene.queen.queue(queue).push([{"data": {"n": 2}}])
        [second] = await scene.queen.queue(queue).group("g").wait(False).pop()
        await scene.queen.ack(second, True, {"group": "g"})
        await scene.queen.admin.seek_consumer_group("g", queue, {"timestamp": first["createdAt"]})
        assert payloads(await scene.queen.queue(queue).group("g").batch(10).wait(False).pop()) == [{"n": 2}]


@scenario()
async def a_group_that_seeks_to_the_end_skips_what_is_there(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": each} for each in EVERYTHING])
        [first] = await scene.queen.queue(queue).group("g").wait(False).pop()
        answer = await scene.queen.admin.seek_consumer_group("g", queue, {"toEnd": True})
        assert answer["success"] is True and answer["seekToEnd"] is True, answer
        assert await scene.queen.queue(queue).group("g").wait(False).pop() == []
        late = await scene.queen.ack(first, True, {"group": "g"})
        assert late["success"] is False, late
        await scene.queen.queue(queue).push([{"data": {"after": True}}])
        assert payloads(await scene.queen.queue(queue).group("g").wait(False).pop()) == [{"after": True}]


@scenario()
async def a_deleted_group_consumes_everything_again(scene: Scene) -> None:
    async with scene.queue() as queue:
        group = scene.queue_name("group")
        await _consume_everything(scene, queue, group)
        answer = await scene.queen.delete_consumer_group(group)
        assert answer["success"] is True and answer["deletedPartitions"] == 1, answer
        await _consume_everything(scene, queue, group, push=False)


@scenario()
async def a_group_deleted_for_one_queue_keeps_its_place_in_another(scene: Scene) -> None:
    async with scene.queue("a") as first, scene.queue("b") as second:
        group = scene.queue_name("group")
        await _consume_everything(scene, first, group)
        await _consume_everything(scene, second, group)
        answer = await scene.queen.admin.delete_consumer_group_for_queue(group, first)
        assert answer["success"] is True and answer["queueName"] == first, answer
        await _consume_everything(scene, first, group, push=False)
        assert await scene.queen.queue(second).group(group).wait(False).pop() == []


@scenario()
async def a_deleted_group_that_keeps_its_subscription_begins_there_again(scene: Scene) -> None:
    async with scene.queue() as queue:
        group = scene.queue_name("group")
        await scene.queen.queue(queue).push([{"data": {"old": True}}])
        builder = scene.queen.queue(queue).group(group).subscription_mode("new").batch(10)
        assert await builder.wait(False).pop() == []
        await _consume_everything(scene, queue, group)
        answer = await scene.queen.delete_consumer_group(group, delete_metadata=False)
        assert answer["success"] is True and answer["metadataDeleted"] is False, answer
        await _consume_everything(scene, queue, group, push=False)


@scenario()
async def seeking_in_one_queue_does_not_hide_messages_of_another(scene: Scene) -> None:
    async def use(number: int) -> None:
        queue = scene.queue_name(str(number))
        for n in range(10):
            await scene.queen.queue(queue).push([{"data": {"n": n}}])
            messages = await scene.queen.queue(queue).group("shared").wait(False).pop()
            assert payloads(messages) == [{"n": n}], (queue, n, messages)
            await scene.queen.ack(messages, True, {"group": "shared"})
            await scene.queen.admin.seek_consumer_group("shared", queue, {"toEnd": True})

    await asyncio.gather(*(use(number) for number in range(6)))


async def _consume_everything(scene: Scene, queue: str, group: str, push: bool = True) -> None:
    if push:
        await scene.queen.queue(queue).push([{"data": each} for each in EVERYTHING])
    messages = await scene.queen.queue(queue).group(group).batch(100).wait(False).pop()
    assert payloads(messages) == EVERYTHING, messages
    answer = await scene.queen.ack(messages, True, {"group": group})
    assert all(result["success"] for result in answer["results"]), answer
    assert await scene.queen.queue(queue).group(group).wait(False).pop() == []

"""Consume: handlers, batches, groups, retries."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.acceptance.scenario import Message, Scene, Stopwatch, payloads, scenario


@scenario()
async def a_handler_gets_the_message(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"message": "hello"}}])
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])

        await scene.queen.queue(queue).batch(1).limit(1).consume(handle)
        assert got == [{"message": "hello"}], got
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def a_handler_traces_its_message_under_two_names(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"transactionId": "traced", "data": {"order": 7}}])
        names = [scene.queue_name("order"), scene.queue_name("tenant")]
        traced: list[Any] = []

        async def handle(message: Message) -> None:
            traced.append(
                await message["trace"]({"traceName": names, "eventType": "processing", "data": {"text": "begun"}})
            )
            traced.append(await message["trace"]({"data": {"text": "done"}}))
            traced.append(message["partitionId"])

        await scene.queen.queue(queue).batch(1).limit(1).consume(handle)
        assert traced[0]["success"] is True and traced[0]["traceId"], traced
        assert traced[1]["success"] is True, traced
        found = await scene.queen.admin.get_traces_for_message(traced[2], "traced")
        assert [trace["data"] for trace in found["traces"]] == [{"text": "begun"}, {"text": "done"}], found
        assert [trace["event_type"] for trace in found["traces"]] == ["processing", "info"], found
        assert sorted(found["traces"][0]["trace_names"]) == sorted(names), found
        for name in names:
            by_name = await scene.queen.admin.get_traces_by_name(name)
            assert by_name["total"] == 1, by_name
            assert by_name["traces"][0]["transaction_id"] == "traced", by_name
            assert by_name["traces"][0]["message_payload"] == {"order": 7}, by_name


@scenario()
async def two_partitions_of_a_hundred_come_in_a_batch_each(scene: Scene) -> None:
    async with scene.queue() as queue:
        for partition in ("a", "b"):
            items = [{"data": {"in": partition, "n": n}} for n in range(100)]
            await scene.queen.queue(queue).partition(partition).push(items)
        batches: list[list[Any]] = []

        async def handle(messages: list[Message]) -> None:
            batches.append(payloads(messages))

        await scene.queen.queue(queue).batch(100).limit(200).consume(handle)
        expected = [[{"in": partition, "n": n} for n in range(100)] for partition in ("a", "b")]
        assert sorted(batches, key=lambda batch: str(batch[0]["in"])) == expected, [len(batch) for batch in batches]


@scenario()
async def a_named_partition_is_consumed_alone(scene: Scene) -> None:
    async with scene.queue() as queue:
        for partition in ("a", "b"):
            await scene.queen.queue(queue).partition(partition).push([{"data": {"in": partition}}])
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])

        await scene.queen.queue(queue).partition("b").limit(1).consume(handle)
        assert got == [{"in": "b"}], got


@scenario()
async def a_batch_of_three_reaches_the_handler_at_once(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])
        batches: list[list[Any]] = []

        async def handle(messages: list[Message]) -> None:
            batches.append(payloads(messages))

        await scene.queen.queue(queue).batch(3).limit(3).consume(handle)
        assert batches == [[{"n": 0}, {"n": 1}, {"n": 2}]], batches
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def each_hands_a_batch_over_one_by_one(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(10)])
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"]["n"])

        await scene.queen.queue(queue).batch(10).each().limit(10).consume(handle)
        assert got == list(range(10)), got
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def two_groups_get_every_message_each(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(10)])
        got: dict[str, list[int]] = {"one": [], "two": []}

        async def consume(group: str) -> None:
            async def handle(message: Message) -> None:
                assert message["consumerGroup"] == group, message
                got[group].append(message["data"]["n"])

            await scene.queen.queue(queue).group(group).limit(10).consume(handle)

        await asyncio.gather(consume("one"), consume("two"))
        assert got == {"one": list(range(10)), "two": list(range(10))}, got


@scenario()
async def a_handler_that_fails_twice_is_called_three_times(scene: Scene) -> None:
    async with scene.queue(retry_limit=3) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        calls: list[Any] = []
        succeeded = asyncio.Event()

        async def handle(message: Message) -> None:
            calls.append(message["data"])
            if len(calls) < 3:
                raise ValueError("not yet")
            succeeded.set()

        consuming = scene.queen.queue(queue).batch(1).timeout_millis(500).consume(handle, signal=succeeded)
        await consuming
        assert calls == [{"n": 1}] * 3, calls
        # Nothing comes later than any retry delay would have brought it, either.
        assert await scene.queen.queue(queue).timeout_millis(2000).pop() == []


@scenario()
async def a_failing_batch_is_retried_whole(scene: Scene) -> None:
    async with scene.queue(retry_limit=3, retry_delay=100) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])
        batches: list[list[Any]] = []
        succeeded = asyncio.Event()

        async def handle(messages: list[Message]) -> None:
            batches.append(payloads(messages))
            if len(batches) < 3:
                raise ValueError("not yet")
            succeeded.set()

        await scene.queen.queue(queue).batch(3).timeout_millis(500).consume(handle, signal=succeeded)
        assert batches == [[{"n": 0}, {"n": 1}, {"n": 2}]] * 3, batches
        assert await scene.queen.queue(queue).timeout_millis(500).pop() == []


@scenario()
async def a_lease_is_renewed_while_the_handler_works(scene: Scene) -> None:
    async with scene.queue(lease_time=2) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        calls: list[Any] = []
        others: list[Any] = []

        async def handle(message: Message) -> None:
            calls.append(message["data"])
            # Another consumer waits past the end of the lease as it was given, and must get nothing.
            others.extend(await scene.queen.queue(queue).timeout_millis(4000).pop())

        await scene.queen.queue(queue).renew_lease(True, 500).limit(1).consume(handle)
        assert calls == [{"n": 1}] and others == [], (calls, others)
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def callbacks_acknowledge_by_themselves(scene: Scene) -> None:
    async with scene.queue(retry_limit=0) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(2)])
        acknowledged: list[Any] = []

        async def handle(message: Message) -> None:
            if message["data"]["n"] == 1:
                raise ValueError("one is too many")

        async def succeed(message: Message, result: object) -> None:
            acknowledged.append(await scene.queen.ack(message, True))

        async def fail(message: Message, error: Exception) -> None:
            acknowledged.append(await scene.queen.ack(message, False, {"error": str(error)}))

        await scene.queen.queue(queue).limit(2).consume(handle).on_success(succeed).on_error(fail)
        assert [answer["success"] for answer in acknowledged] == [True, True], acknowledged
        assert [answer["dlq"] for answer in acknowledged] == [False, True], acknowledged


@scenario()
async def an_idle_consumer_ends(scene: Scene) -> None:
    async with scene.queue() as queue:
        watch = Stopwatch()

        async def handle(message: Message) -> None:
            raise AssertionError(message)

        await scene.queen.queue(queue).idle_millis(1000).timeout_millis(500).consume(handle)
        assert watch.seconds > 0.9, watch.seconds


@scenario()
async def a_consumer_that_does_not_wait_finds_later_messages(scene: Scene) -> None:
    async with scene.queue() as queue:
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])

        async def consume() -> None:
            await scene.queen.queue(queue).wait(False).limit(1).consume(handle)

        consuming = asyncio.create_task(consume())
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        await consuming
        assert got == [{"n": 1}], got


@scenario()
async def consuming_by_namespace_spans_queues(scene: Scene) -> None:
    namespace = scene.queue_name()
    for name in ("a", "b"):
        await scene.queen.queue(scene.queue_name(name)).namespace(namespace).create()
        await scene.queen.queue(scene.queue_name(name)).push([{"data": {"from": name}}])
    got: list[str] = []

    async def handle(message: Message) -> None:
        got.append(message["data"]["from"])

    await scene.queen.queue().namespace(namespace).group("all-queues").limit(2).consume(handle)
    assert sorted(got) == ["a", "b"], got


@scenario()
async def several_partitions_reach_a_handler_in_one_batch(scene: Scene) -> None:
    async with scene.queue() as queue:
        for n in range(8):
            await scene.queen.queue(queue).partition(f"p{n}").push([{"data": {"n": n}}])
        batches: list[list[int]] = []

        async def handle(messages: list[Message]) -> None:
            batches.append([message["data"]["n"] for message in messages])

        await scene.queen.queue(queue).batch(8).partitions(8).limit(8).consume(handle)
        assert len(batches) == 1 and sorted(batches[0]) == list(range(8)), batches

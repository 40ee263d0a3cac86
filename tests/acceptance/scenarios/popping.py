"""Pop, ack and leases."""

from __future__ import annotations

import asyncio
from datetime import datetime

from tests.acceptance.scenario import Scene, Stopwatch, payloads, scenario

FIELDS = {
    "id",
    "transactionId",
    "traceId",
    "data",
    "producerSub",
    "createdAt",
    "partitionId",
    "partition",
    "leaseId",
    "consumerGroup",
}


@scenario()
async def an_empty_queue_pops_nothing(scene: Scene) -> None:
    async with scene.queue() as queue:
        assert await scene.queen.queue(queue).batch(1).wait(False).pop() == []


@scenario()
async def an_unknown_queue_or_partition_pops_nothing(scene: Scene) -> None:
    assert await scene.queen.queue(scene.queue_name()).wait(False).pop() == []
    assert await scene.queen.queue(scene.queue_name()).partition("nowhere").wait(False).pop() == []


@scenario()
async def a_message_is_popped_with_all_its_fields(scene: Scene) -> None:
    async with scene.queue() as queue:
        [pushed] = await scene.queen.queue(queue).push([{"data": {"message": "hello"}}])
        [message] = await scene.queen.queue(queue).batch(1).wait(False).pop()
        assert set(message) >= FIELDS, message
        assert message["data"] == {"message": "hello"}, message
        assert message["id"] == pushed["message_id"], (message, pushed)
        assert message["partitionId"] == pushed["partition_id"], (message, pushed)
        assert message["partition"] == "Default", message
        assert message["consumerGroup"] == "__QUEUE_MODE__", message
        assert message["leaseId"], message
        assert message["traceId"] is None and message["producerSub"] is None, message
        assert datetime.fromisoformat(message["createdAt"].replace("Z", "+00:00")).tzinfo is not None, message


@scenario()
async def a_pop_right_after_a_push_sees_the_message(scene: Scene) -> None:
    async with scene.queue() as queue:
        reader = scene.new_client(scene.url)
        for n in range(50):
            await scene.queen.queue(queue).partition(f"p{n}").push([{"data": {"n": n}}])
            # Another connection may be another worker's; it must see the message all the same.
            messages = await reader.queue(queue).wait(False).pop()
            assert payloads(messages) == [{"n": n}], (n, messages)
            await reader.ack(messages)
        await reader.close()


@scenario()
async def a_waiting_pop_gets_a_message_pushed_two_seconds_later(scene: Scene) -> None:
    async with scene.queue() as queue:
        popping = asyncio.create_task(scene.queen.queue(queue).batch(1).timeout_millis(25_000).pop())
        await asyncio.sleep(2)
        assert not popping.done(), popping
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        assert payloads(await popping) == [{"n": 1}]


@scenario()
async def a_waiting_pop_ends_empty_at_its_timeout(scene: Scene) -> None:
    async with scene.queue() as queue:
        watch = Stopwatch()
        assert await scene.queen.queue(queue).timeout_millis(1000).pop() == []
        assert watch.seconds > 0.9, watch.seconds


@scenario()
async def an_acknowledged_message_does_not_come_again(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(2)])
        [first] = await scene.queen.queue(queue).wait(False).pop()
        answer = await scene.queen.ack(first, True)
        assert answer["success"] is True and answer["leaseReleased"] is True, answer
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]


@scenario()
async def a_message_comes_again_after_its_lease_of_two_seconds(scene: Scene) -> None:
    async with scene.queue(lease_time=2) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        [first] = await scene.queen.queue(queue).wait(False).pop()
        watch = Stopwatch()
        assert await scene.queen.queue(queue).wait(False).pop() == []
        [second] = await scene.queen.queue(queue).timeout_millis(5000).pop()
        assert watch.seconds > 1.8, watch.seconds
        assert second["id"] == first["id"] and second["leaseId"] != first["leaseId"], (first, second)


@scenario()
async def acknowledging_after_the_lease_ended_is_refused(scene: Scene) -> None:
    # Long enough for the second lease to last while a busy machine sends two requests.
    async with scene.queue(lease_time=4) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        [first] = await scene.queen.queue(queue).wait(False).pop()
        [second] = await scene.queen.queue(queue).timeout_millis(10000).pop()
        late = await scene.queen.ack(first, True)
        assert late == {"success": False, "error": "Invalid or expired lease"}, late
        assert (await scene.queen.ack(second, True))["success"] is True


@scenario()
async def acknowledging_an_unknown_message_is_refused(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        answer = await scene.queen.ack({**message, "transactionId": "nobody"}, True)
        assert answer["success"] is False and answer["error"].startswith("Message not found"), answer


@scenario()
async def a_leased_partition_is_closed_to_others_of_the_group(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(4)])
        first = await scene.queen.queue(queue).batch(2).wait(False).pop()
        assert payloads(first) == [{"n": 0}, {"n": 1}], first
        assert await scene.queen.queue(queue).batch(2).wait(False).pop() == []
        other = await scene.queen.queue(queue).group("other").batch(2).wait(False).pop()
        assert payloads(other) == [{"n": 0}, {"n": 1}], other


@scenario()
async def one_partition_can_be_named(scene: Scene) -> None:
    async with scene.queue() as queue:
        for partition in ("a", "b"):
            await scene.queen.queue(queue).partition(partition).push([{"data": {"in": partition}}])
        [message] = await scene.queen.queue(queue).partition("b").batch(10).wait(False).pop()
        assert message["data"] == {"in": "b"} and message["partition"] == "b", message


@scenario()
async def one_pop_serves_one_partition_unless_asked_for_more(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _fill_partitions(scene, queue, partitions=5, each=3)
        messages = await scene.queen.queue(queue).batch(100).wait(False).pop()
        assert len(messages) == 3, messages
        assert len({message["partitionId"] for message in messages}) == 1, messages


@scenario()
async def one_pop_serves_several_partitions_under_one_lease(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _fill_partitions(scene, queue, partitions=5, each=3)
        messages = await scene.queen.queue(queue).batch(100).partitions(4).wait(False).pop()
        assert len(messages) == 12, messages
        assert len({message["partitionId"] for message in messages}) == 4, messages
        assert len({message["leaseId"] for message in messages}) == 1, messages
        for name in {message["partition"] for message in messages}:
            inside = [message["data"]["n"] for message in messages if message["partition"] == name]
            assert inside == [0, 1, 2], messages


@scenario()
async def the_batch_is_a_cap_over_all_partitions(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _fill_partitions(scene, queue, partitions=5, each=3)
        assert len(await scene.queen.queue(queue).batch(7).partitions(5).wait(False).pop()) == 7


@scenario()
async def one_batch_acknowledges_across_partitions(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _fill_partitions(scene, queue, partitions=4, each=2)
        messages = await scene.queen.queue(queue).batch(100).partitions(10).wait(False).pop()
        answer = await scene.queen.ack(messages, True)
        assert answer["success"] is True and len(answer["results"]) == 8, answer
        assert all(result["success"] for result in answer["results"]), answer
        asked = [message["transactionId"] for message in messages]
        assert [result["transactionId"] for result in answer["results"]] == asked, answer
        assert await scene.queen.queue(queue).batch(100).partitions(10).wait(False).pop() == []


@scenario()
async def renewing_the_shared_lease_keeps_every_partition(scene: Scene) -> None:
    async with scene.queue(lease_time=2) as queue:
        await _fill_partitions(scene, queue, partitions=3, each=1)
        messages = await scene.queen.queue(queue).batch(10).partitions(3).wait(False).pop()
        renewed = await scene.queen.renew(messages)
        assert len(renewed) == 1 and renewed[0]["success"] is True and renewed[0]["newExpiresAt"], renewed
        # Past the two seconds of the lease as it was given.
        assert await scene.queen.queue(queue).batch(10).partitions(3).timeout_millis(2500).pop() == []
        answer = await scene.queen.ack(messages, True)
        assert all(result["success"] for result in answer["results"]), answer


@scenario()
async def a_lease_is_renewed_by_message_or_by_id(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        for given in (message, message["leaseId"]):
            renewed = await scene.queen.renew(given)
            assert renewed["success"] is True and renewed["newExpiresAt"], renewed


@scenario()
async def renewing_an_unknown_lease_fails(scene: Scene) -> None:
    renewed = await scene.queen.renew("00000000-0000-7000-8000-000000000000")
    assert renewed["success"] is False and "Lease" in renewed["error"], renewed


@scenario()
async def a_failure_in_the_middle_of_a_batch_is_redelivered_from_there(scene: Scene) -> None:
    async with scene.queue(retry_delay=0) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])
        messages = await scene.queen.queue(queue).batch(3).wait(False).pop()
        marked = [{**message, "_status": status} for message, status in zip(messages, (True, False, True), strict=True)]
        answer = await scene.queen.ack(marked)
        assert answer["success"] is True, answer
        again = await scene.queen.queue(queue).batch(3).timeout_millis(5000).pop()
        assert payloads(again) == [{"n": 1}, {"n": 2}], again


@scenario()
async def the_status_retry_gives_the_batch_back_at_no_cost(scene: Scene) -> None:
    async with scene.queue(retry_limit=0) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        for _ in range(3):
            [message] = await scene.queen.queue(queue).timeout_millis(5000).pop()
            answer = await scene.queen.ack(message, "retry")
            assert answer["success"] is True, answer
        assert payloads(await scene.queen.queue(queue).timeout_millis(5000).pop()) == [{"n": 1}]


@scenario()
async def a_failed_message_waits_for_the_retry_delay(scene: Scene) -> None:
    async with scene.queue(retry_delay=1500) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        watch = Stopwatch()
        await scene.queen.ack(message, False)
        assert await scene.queen.queue(queue).wait(False).pop() == []
        assert payloads(await scene.queen.queue(queue).timeout_millis(5000).pop()) == [{"n": 1}]
        assert watch.seconds > 1.3, watch.seconds


@scenario()
async def queues_of_a_namespace_are_popped_together_by_priority(scene: Scene) -> None:
    namespace = scene.queue_name()
    for name, priority in (("low", 1), ("high", 9), ("middle", 5)):
        configured = scene.queen.queue(scene.queue_name(name)).namespace(namespace).task("work")
        await configured.config({"priority": priority}).create()
        await scene.queen.queue(scene.queue_name(name)).push([{"data": {"from": name}}])
    popped = []
    for _ in range(3):
        popped += payloads(await scene.queen.queue().namespace(namespace).task("work").wait(False).pop())
    assert popped == [{"from": "high"}, {"from": "middle"}, {"from": "low"}], popped
    assert await scene.queen.queue().namespace(namespace).wait(False).pop() == []


async def _fill_partitions(scene: Scene, queue: str, partitions: int, each: int) -> None:
    for number in range(partitions):
        items = [{"data": {"n": n}} for n in range(each)]
        await scene.queen.queue(queue).partition(f"p{number}").push(items)

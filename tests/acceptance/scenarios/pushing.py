"""Push: what is answered, and what comes back."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from tests.acceptance.scenario import Scene, Stopwatch, payloads, scenario, statuses

PAYLOADS: list[Any] = [
    {"text": 'ünïcödé 🐝 \u0000 \\ "quoted"'},
    {"number": 12345678901234567890, "float": 0.1, "negative": -1e-7},
    {"nested": {"list": [1, [2, [3, {"deep": True}]]]}},
    [1, 2, 3],
    "text",
    0,
    False,
    [],
    "",
]


@scenario()
async def a_message_is_queued(scene: Scene) -> None:
    async with scene.queue() as queue:
        answer = await scene.queen.queue(queue).push([{"data": {"message": "hello"}}])
        assert statuses(answer) == ["queued"], answer
        assert answer[0]["message_id"] and answer[0]["partition_id"] and answer[0]["transaction_id"], answer
        assert answer[0]["queueName"] == queue, answer


@scenario()
async def the_same_id_in_one_partition_is_a_duplicate(scene: Scene) -> None:
    async with scene.queue() as queue:
        first = await scene.queen.queue(queue).push([{"transactionId": "once", "data": {"n": 1}}])
        second = await scene.queen.queue(queue).push([{"transactionId": "once", "data": {"n": 2}}])
        assert statuses(first + second) == ["queued", "duplicate"], (first, second)
        assert second[0]["message_id"] == first[0]["message_id"], (first, second)
        assert payloads(await scene.queen.queue(queue).batch(10).wait(False).pop()) == [{"n": 1}]


@scenario()
async def the_same_id_is_a_duplicate_after_it_was_consumed(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"transactionId": "once", "data": {"n": 1}}])
        await scene.queen.ack(await scene.queen.queue(queue).wait(False).pop())
        assert statuses(await scene.queen.queue(queue).push([{"transactionId": "once", "data": {}}])) == ["duplicate"]


@scenario()
async def the_same_id_in_two_partitions_is_two_messages(scene: Scene) -> None:
    async with scene.queue() as queue:
        for partition in ("a", "b"):
            answer = await scene.queen.queue(queue).partition(partition).push([{"transactionId": "x", "data": {}}])
            assert statuses(answer) == ["queued"], answer


@scenario()
async def the_given_transaction_id_is_echoed(scene: Scene) -> None:
    async with scene.queue() as queue:
        given = str(uuid.uuid4())
        answer = await scene.queen.queue(queue).push([{"transactionId": given, "data": {}}])
        assert answer[0]["transaction_id"] == given, answer
        [message] = await scene.queen.queue(queue).wait(False).pop()
        assert message["transactionId"] == given, message


@scenario()
async def the_given_trace_id_comes_back(scene: Scene) -> None:
    async with scene.queue() as queue:
        given = str(uuid.uuid4())
        answer = await scene.queen.queue(queue).push([{"traceId": given, "data": {}}])
        assert answer[0]["trace_id"] == given, answer
        [message] = await scene.queen.queue(queue).wait(False).pop()
        assert message["traceId"] == given, message


@scenario()
async def duplicates_inside_one_request_are_found(scene: Scene) -> None:
    async with scene.queue() as queue:
        items = [{"transactionId": name, "data": {"n": n}} for n, name in enumerate(["a", "b", "a", "a", "c"])]
        answer = await scene.queen.queue(queue).push(items)
        assert statuses(answer) == ["queued", "queued", "duplicate", "duplicate", "queued"], answer
        assert answer[2]["message_id"] == answer[3]["message_id"] == answer[0]["message_id"], answer
        popped = await scene.queen.queue(queue).batch(10).wait(False).pop()
        assert payloads(popped) == [{"n": 0}, {"n": 1}, {"n": 4}], popped


@scenario()
async def of_eight_concurrent_pushes_of_one_id_one_is_queued(scene: Scene) -> None:
    async with scene.queue() as queue:
        # A client each, so that the pushes spread over the server's workers.
        async def push() -> dict[str, Any]:
            async with scene.new_client(scene.url) as client:
                [result] = await client.queue(queue).push([{"transactionId": "contended", "data": {}}])
                return dict(result)

        results = await asyncio.gather(*(push() for _ in range(8)))
        assert sorted(statuses(results)) == ["duplicate"] * 7 + ["queued"], results
        assert len({result["message_id"] for result in results}) == 1, results
        assert len(await scene.queen.queue(queue).batch(10).wait(False).pop()) == 1


@scenario()
async def a_hundred_items_without_ids_are_a_hundred_messages(scene: Scene) -> None:
    async with scene.queue() as queue:
        answer = await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(100)])
        assert statuses(answer) == ["queued"] * 100, answer
        assert len({result["message_id"] for result in answer}) == 100, answer
        popped = await scene.queen.queue(queue).batch(100).wait(False).pop()
        assert payloads(popped) == [{"n": n} for n in range(100)]


@scenario()
async def an_empty_push_answers_an_empty_array(scene: Scene) -> None:
    async with scene.queue() as queue:
        assert await scene.queen.queue(queue).push([]) == []


@scenario()
async def results_are_in_the_order_of_the_items(scene: Scene) -> None:
    async with scene.queue() as queue:
        ids = [f"id-{n:03}" for n in range(200)]
        answer = await scene.queen.queue(queue).push([{"transactionId": one, "data": {}} for one in ids])
        assert [result["transaction_id"] for result in answer] == ids


@scenario()
async def a_null_payload_stays_null(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": None}])
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [None]


@scenario()
async def an_empty_payload_stays_empty(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {}}])
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{}]


@scenario()
async def payloads_of_every_kind_come_back_unchanged(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": payload} for payload in PAYLOADS])
        assert payloads(await scene.queen.queue(queue).batch(100).wait(False).pop()) == PAYLOADS


@scenario()
async def a_payload_of_ten_thousand_elements_comes_back(scene: Scene) -> None:
    async with scene.queue() as queue:
        payload = {"array": [{"id": n, "name": f"element {n}"} for n in range(10_000)]}
        await scene.queen.queue(queue).push([{"data": payload}])
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [payload]


@scenario()
async def a_payload_of_ten_megabytes_comes_back(scene: Scene) -> None:
    async with scene.queue() as queue:
        payload = {"text": uuid.uuid4().hex * 312_500}
        assert statuses(await scene.queen.queue(queue).push([{"data": payload}])) == ["queued"]
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [payload]


@scenario()
async def an_encrypted_queue_gives_back_what_was_pushed(scene: Scene) -> None:
    async with scene.queue(encryption_enabled=True) as queue:
        await _check_round_trip(scene, queue)


@scenario()
async def pushing_creates_the_queue(scene: Scene) -> None:
    queue = scene.queue_name()
    assert statuses(await scene.queen.queue(queue).push([{"data": {"n": 1}}])) == ["queued"]
    assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]


@scenario()
async def a_delayed_message_is_hidden_until_its_time(scene: Scene) -> None:
    async with scene.queue(delayed_processing=2) as queue:
        watch = Stopwatch()
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        popped = await scene.queen.queue(queue).wait(False).pop()
        assert popped == [] or watch.seconds > 1.9, watch.seconds
        popped = popped or await scene.queen.queue(queue).timeout_millis(10_000).pop()
        assert payloads(popped) == [{"n": 1}]
        assert watch.seconds > 1.9, watch.seconds


@scenario()
async def a_window_buffer_holds_messages_until_the_partition_is_quiet(scene: Scene) -> None:
    async with scene.queue(window_buffer=2) as queue:
        watch = Stopwatch()
        for n in range(3):
            await scene.queen.queue(queue).push([{"data": {"n": n}}])
        assert await scene.queen.queue(queue).batch(10).wait(False).pop() == []
        popped = await scene.queen.queue(queue).batch(10).timeout_millis(10_000).pop()
        assert payloads(popped) == [{"n": 0}, {"n": 1}, {"n": 2}], popped
        assert watch.seconds > 1.9, watch.seconds


@scenario()
async def a_full_queue_refuses_the_excess(scene: Scene) -> None:
    async with scene.queue(max_size=3) as queue:
        refused: list[dict[str, Any]] = []

        async def note(items: list[dict[str, Any]], error: Exception) -> None:
            refused.extend(items)

        answer = await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(5)]).on_error(note)
        assert statuses(answer) == ["queued"] * 3 + ["failed"] * 2, answer
        assert len(refused) == 2, refused
        assert "would exceed max capacity (3)" in refused[0]["error"], refused


@scenario()
async def callbacks_of_push_get_the_items_they_are_for(scene: Scene) -> None:
    async with scene.queue() as queue:
        queued: list[dict[str, Any]] = []
        duplicates: list[dict[str, Any]] = []

        async def note_queued(items: list[dict[str, Any]]) -> None:
            queued.extend(items)

        async def note_duplicates(items: list[dict[str, Any]], error: Exception) -> None:
            duplicates.extend(items)

        items: list[dict[str, Any]] = [{"transactionId": name, "data": {}} for name in ("a", "b", "a")]
        await scene.queen.queue(queue).push(items).on_success(note_queued).on_duplicate(note_duplicates)
        assert [item["transactionId"] for item in queued] == ["a", "b"], queued
        assert [item["transactionId"] for item in duplicates] == ["a"], duplicates


@scenario()
async def headers_of_the_user_are_accepted(scene: Scene) -> None:
    client = scene.new_client(url=scene.url, bearer_token="ignored", headers={"X-Request-Source": "acceptance"})
    answer = await client.queue(scene.queue_name()).push([{"data": {}}])
    await client.close()
    assert statuses(answer) == ["queued"], answer


async def _check_round_trip(scene: Scene, queue: str) -> None:
    secret = {"card": "4111 1111 1111 1111", "nested": {"cvv": [1, 2, 3]}}
    assert statuses(await scene.queen.queue(queue).push([{"data": secret}, {"data": None}])) == ["queued"] * 2
    messages = await scene.queen.queue(queue).batch(2).wait(False).pop()
    assert payloads(messages) == [secret, None], messages
    seen = await scene.queen.admin.get_message(messages[0]["partitionId"], messages[0]["transactionId"])
    assert seen["payload"] == secret, seen

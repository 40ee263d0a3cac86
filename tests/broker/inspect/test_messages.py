"""Looking at one message, deleting it, redriving it, giving up on it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from queen.http.server.message import Access
from queen.wire.ids import partition_uuid
from tests.conftest import StartServer
from tests.support.api import Answer, Api

KEY = "00" * 32
BAD_PARTITIONS = [
    "nonsense",
    "00000000-0000-4000-8000-000000000000",
    partition_uuid(999_999),
    "51756565-0007-8000-8000-000000000001",
]


def path_of(message: dict[str, Any], action: str = "") -> str:
    return f"/api/v1/messages/{message['partitionId']}/{message['transactionId']}{action}"


async def listed(api: Api, **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", "/api/v1/messages", **query)
    assert answer.status == 200, answer
    messages: list[dict[str, Any]] = answer.body["messages"]
    return messages


async def one(api: Api, queue: str = "orders") -> dict[str, Any]:
    (message,) = await listed(api, queue=queue)
    return message


async def test_a_message_is_shown_in_detail(api: Api) -> None:
    await api.configure("orders", leaseTime=60, retryLimit=5, retryDelay=7, priority=9, ttl=3600)
    payload = '{"n":1,"big":12345678901234567890123,"text":"ä"}'
    trace_id = "0190b8a0-0000-7000-8000-000000000000"
    body = f'{{"items":[{{"queue":"orders","payload":{payload},"transactionId":"a b/c","traceId":"{trace_id}"}}]}}'
    (pushed,) = (await api.call("POST", "/api/v1/push", data=body.encode())).body
    await api.pop("orders")
    await api.ack(await api.pop("orders", consumerGroup="g1"), group="g1")
    await api.pop("orders", consumerGroup="g2")
    message = (await api.call("GET", f"/api/v1/messages/{pushed['partition_id']}/a%20b%2Fc")).body
    assert message["payload"] == json.loads(payload)
    assert message["transactionId"] == "a b/c" and message["id"] == pushed["message_id"]
    assert (message["status"], message["isEncrypted"], message["traceId"]) == ("processing", False, trace_id)
    assert message["queueConfig"] == {"leaseTime": 60, "retryLimit": 5, "retryDelay": 7, "ttl": 3600, "priority": 9}
    assert message["mode"] == {"hasQueueMode": True, "busGroupsCount": 2, "type": "hybrid", "consumedByGroups": 1}
    groups = {group["name"]: group for group in message["consumerGroups"]}
    assert [groups[name]["consumed"] for name in ("__QUEUE_MODE__", "g1", "g2")] == [False, True, False]
    assert groups["g1"]["leaseExpiresAt"] is None and groups["g2"]["leaseExpiresAt"] is not None
    assert (message["errorMessage"], message["retryCount"]) == (None, None)


async def test_the_detail_of_a_dead_letter_says_why(api: Api) -> None:
    await api.push("orders", {"n": 1}, ids=["a"])
    await api.ack(await api.pop("orders"), "dlq", error="no stock")
    message = (await api.call("GET", path_of(await one(api)))).body
    assert (message["status"], message["errorMessage"], message["retryCount"]) == ("dead_letter", "no stock", 0)


@pytest.mark.parametrize("partition", BAD_PARTITIONS)
async def test_unknown_messages_are_not_found(api: Api, partition: str) -> None:
    await api.push("orders", 1, ids=["a"])
    for method, action in (("GET", ""), ("POST", "/retry"), ("POST", "/dlq")):
        answer = await api.call(method, f"/api/v1/messages/{partition}/a{action}")
        assert answer.status == 404 and answer.body["error"] == "Message not found", (method, action)
    known = (await one(api))["partitionId"]
    for method, action in (("GET", ""), ("POST", "/retry"), ("POST", "/dlq")):
        for transaction in ("b", "%00", "ä"):
            answer = await api.call(method, f"/api/v1/messages/{known}/{transaction}{action}")
            assert answer.status == 404 and answer.body["error"] == "Message not found", (method, action)


@pytest.mark.parametrize("partition", BAD_PARTITIONS)
async def test_deleting_an_unknown_message_says_so(api: Api, partition: str) -> None:
    answer = await api.call("DELETE", f"/api/v1/messages/{partition}/a")
    assert answer.status == 200
    assert answer.body["success"] is False and answer.body["message"] == "Message not found"


async def test_a_deleted_message_is_neither_delivered_nor_shown(api: Api) -> None:
    await api.push("orders", 1, 2, 3, ids=["a", "b", "c"])
    messages = {message["transactionId"]: message for message in await listed(api, queue="orders")}
    answer = await api.call("DELETE", path_of(messages["b"]))
    assert answer.status == 200
    assert answer.body["success"] is True and answer.body["message"] == "Message deleted successfully"
    assert answer.body["transactionId"] == "b" and answer.body["partitionId"] == messages["b"]["partitionId"]
    listing = await api.call("GET", "/api/v1/messages", queue="orders")
    assert [message["transactionId"] for message in listing.body["messages"]] == ["c", "a"]
    assert listing.body["total"] == 2
    assert (await api.call("GET", path_of(messages["b"]))).status == 404
    again = await api.call("DELETE", path_of(messages["b"]))
    assert again.status == 200 and again.body["success"] is False and again.body["message"] == "Message not found"
    assert [message["data"] for message in await api.pop("orders", batch=10)] == [1, 3]


async def test_a_batch_that_ends_with_deleted_messages_is_finished_by_acking_the_rest(api: Api) -> None:
    await api.push("orders", 1, 2, 3, ids=["a", "b", "c"])
    for message in await listed(api, queue="orders"):
        if message["transactionId"] != "a":
            await api.call("DELETE", path_of(message))
    (result,) = await api.ack(await api.pop("orders", batch=3))
    assert result["success"] is True and result["leaseReleased"] is True
    await api.push("orders", 4)
    assert [message["data"] for message in await api.pop("orders", batch=3, wait=True, timeout=60_000)] == [4]


async def test_what_was_pushed_last_is_deleted_and_the_rest_of_the_batch_is_acked_one_by_one(api: Api) -> None:
    for ids in (["a", "b"], ["c", "d", "e"]):
        await api.push("orders", *ids, ids=ids)
    for message in await listed(api, queue="orders"):
        if message["transactionId"] in "bcde":
            await api.call("DELETE", path_of(message))
    for group, status in (("g1", "completed"), ("g2", "failed")):
        messages = await api.pop("orders", batch=10, consumerGroup=group)
        assert [message["data"] for message in messages] == ["a"]
        (result,) = await api.ack(messages, status, group=group)
        assert result["success"] is True and result["leaseReleased"] is True


async def test_a_batch_whose_messages_were_all_deleted_does_not_block_the_partition(api: Api) -> None:
    await api.push("orders", *range(5))
    for message in await listed(api, queue="orders"):
        assert (await api.call("DELETE", path_of(message))).status == 200
    assert await listed(api, queue="orders") == []
    queries: list[dict[str, Any]] = [{"batch": 5}, {"batch": 2}, {"batch": 5, "autoAck": True}]
    for query in queries:
        group = f"g{query}"
        assert await api.pop("orders", consumerGroup=group, **query) == []
    await api.push("orders", "next")
    for query in queries:
        group = f"g{query}"
        messages = await api.pop("orders", consumerGroup=group, wait=True, timeout=60_000, **query)
        assert [message["data"] for message in messages] == ["next"]


async def test_deleting_all_of_one_partition_does_not_hold_it_in_a_pop_of_several(api: Api) -> None:
    await api.push("orders", 1, partition="x")
    (gone,) = await listed(api, queue="orders")
    await api.push("orders", 2, partition="y")
    await api.call("DELETE", path_of(gone))
    messages = await api.pop("orders", batch=10, partitions=2)
    assert [message["data"] for message in messages] == [2]
    await api.push("orders", 3, partition="x")
    later = await api.pop("orders", "x", batch=10, wait=True, timeout=60_000)
    assert [message["data"] for message in later] == [3]


async def test_a_deleted_transaction_id_can_be_pushed_again(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    await api.call("DELETE", path_of(await one(api)))
    (result,) = await api.push("orders", 2, ids=["a"])
    assert result["status"] == "queued"
    assert (await api.call("GET", path_of(await one(api)))).body["payload"] == 2
    assert [message["data"] for message in await api.pop("orders", batch=10)] == [2]


async def test_a_leased_message_can_be_deleted_and_acked_afterwards(api: Api) -> None:
    await api.push("orders", 1, 2)
    messages = await api.pop("orders", batch=2)
    await api.call("DELETE", path_of(messages[1]))
    results = await api.ack(messages)
    assert [result["success"] for result in results] == [True, True]
    assert results[0]["leaseReleased"] is True


async def test_deleting_takes_dead_letters_and_traces_along(
    api: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    trace = {key: message[key] for key in ("transactionId", "partitionId")} | {"data": 1, "traceNames": ["t"]}
    assert (await api.call("POST", "/api/v1/traces", trace)).status == 201
    await api.ack([message], "dlq")
    await api.call("DELETE", path_of(message))
    for table in ("dead_letters", "traces", "trace_names"):
        assert await connection.fetchval(f"SELECT count(*) FROM queen.{table}") == 0


async def test_many_deletes_at_once_in_one_segment_all_count(api: Api) -> None:
    await api.push("orders", *range(40))
    messages = await listed(api, queue="orders")
    answers = await asyncio.gather(*(api.call("DELETE", path_of(message)) for message in messages[::2] * 2))
    assert sorted(answer.body["success"] for answer in answers) == [False] * 20 + [True] * 20
    left = {message["transactionId"] for message in messages[1::2]}
    assert {message["transactionId"] for message in await api.pop("orders", batch=100)} == left


async def test_another_worker_sees_the_deletion(start_server: StartServer) -> None:
    first = await start_server(0, num_workers=2)
    second = await start_server(1, num_workers=2)
    await first.push("orders", 1, 2, 3, ids=["a", "b", "c"])
    # Both have the segment in memory now.
    assert len(await second.pop("orders", batch=3, consumerGroup="warm")) == 3
    assert len(await first.pop("orders", batch=3, consumerGroup="warm too")) == 3
    messages = {message["transactionId"]: message for message in await listed(second, queue="orders")}
    assert (await second.call("DELETE", path_of(messages["b"]))).status == 200
    assert [message["data"] for message in await first.pop("orders", batch=3, consumerGroup="g1")] == [1, 3]
    assert [message["data"] for message in await second.pop("orders", batch=3, consumerGroup="g2")] == [1, 3]


async def test_an_encrypted_message_is_shown_deleted_and_retried(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    api = await start_server(queen_encryption_key=(KEY,))
    await api.configure("secrets", encryptionEnabled=True)
    await api.push("secrets", {"pin": "pin-1234"}, {"pin": "pin-5678"}, ids=["a", "b"])
    messages = {message["transactionId"]: message for message in await listed(api, queue="secrets")}
    detail = (await api.call("GET", path_of(messages["a"]))).body
    assert detail["payload"] == {"pin": "pin-1234"} and detail["isEncrypted"] is True
    assert (await api.call("DELETE", path_of(messages["a"]))).status == 200
    assert (await api.call("POST", path_of(messages["b"], "/retry"))).status == 200
    bodies = await connection.fetch("SELECT body FROM queen.segments")
    assert len(bodies) == 2
    assert all(row["body"][0] & 0x80 and b"pin-" not in row["body"] for row in bodies)
    assert [message["data"] for message in await api.pop("secrets", batch=10)] == [{"pin": "pin-5678"}] * 2


async def test_without_its_key_a_message_is_listed_as_unreadable(start_server: StartServer) -> None:
    able = await start_server(queen_encryption_key=(KEY,))
    await able.configure("secrets", encryptionEnabled=True)
    await able.push("secrets", 1, ids=["a"])
    message = await one(able, "secrets")
    unable = await start_server()
    (shown,) = await listed(unable, queue="secrets")
    assert shown["transactionId"] is None and "QUEEN_ENCRYPTION_KEY" in shown["unreadable"]
    for method in ("GET", "DELETE"):
        answer = await unable.call(method, path_of(message))
        assert answer.status == 409 and "QUEEN_ENCRYPTION_KEY" in answer.body["error"]


async def test_a_retried_message_comes_again_at_the_tail(api: Api) -> None:
    await api.push("orders", {"n": 1}, ids=["a"])
    await api.ack(await api.pop("orders"))
    await api.push("orders", {"n": 2}, ids=["b"])
    message = next(m for m in await listed(api, queue="orders") if m["transactionId"] == "a")
    answer = await api.call("POST", path_of(message, "/retry"))
    assert answer.status == 200 and answer.body["success"] is True and answer.body["retried"] is True
    assert (answer.body["transactionId"], answer.body["newTransactionId"]) == ("a", "a:retry-1")
    again = await api.pop("orders", batch=10)
    assert [(m["transactionId"], m["data"]) for m in again] == [("b", {"n": 2}), ("a:retry-1", {"n": 1})]
    assert again[1]["id"] == answer.body["newMessageId"]
    second = await api.call("POST", path_of(message, "/retry"))
    assert second.body["newTransactionId"] == "a:retry-2"
    third = await api.call("POST", path_of(again[1], "/retry"))
    assert third.body["newTransactionId"] == "a:retry-3"


async def test_outside_the_dedup_window_a_retried_message_keeps_its_id(api: Api) -> None:
    await api.configure("orders", dedupWindowSeconds=0)
    await api.push("orders", 1, ids=["a"])
    answer = await api.call("POST", path_of(await one(api), "/retry"))
    assert answer.body["newTransactionId"] == "a"
    assert [message["transactionId"] for message in await api.pop("orders", batch=10)] == ["a", "a"]


async def test_a_long_transaction_id_is_cut_to_make_room_for_the_retry(api: Api) -> None:
    await api.push("orders", 1, ids=["x" * 255])
    answer = await api.call("POST", path_of(await one(api), "/retry"))
    assert answer.body["newTransactionId"] == "x" * 247 + ":retry-1"


async def test_retrying_a_dead_letter_removes_it(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    for group in ("g1", "g2"):
        await api.ack(await api.pop("orders", consumerGroup=group), "dlq", group=group)
    answer = await api.call("POST", path_of(await one(api), "/retry"))
    assert answer.body["deadLettersRemoved"] == 2
    assert (await api.call("GET", "/api/v1/dlq")).body["total"] == 0
    for group in ("g1", "g2"):
        (message,) = await api.pop("orders", consumerGroup=group, batch=10)
        assert message["transactionId"] == "a:retry-1"


async def test_a_dead_letter_is_retried_once_by_many_at_the_same_time(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    await api.ack([message], "dlq")
    answers: list[Answer] = await asyncio.gather(*(api.call("POST", path_of(message, "/retry")) for _ in range(8)))
    assert {answer.status for answer in answers} == {200}
    # Whoever came after the dead letter was gone asked for one more copy of a consumed message.
    first = [answer for answer in answers if answer.body["deadLettersRemoved"]]
    assert len(first) == 1
    copies = sum(answer.body["retried"] for answer in answers)
    assert len(await api.pop("orders", batch=100)) == copies


async def test_a_dead_letter_outlives_its_message(api: Api, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    await api.push("orders", {"n": 1}, {"n": 2}, ids=["a", "b"])
    messages = await api.pop("orders", batch=2)
    await api.ack(messages, "dlq", error="broken")
    await connection.execute("UPDATE queen.partitions SET floor_offset = next_offset")
    assert await listed(api, queue="orders") == await listed(api, queue="orders", status="dead_letter") == []
    detail = (await api.call("GET", path_of(messages[0]))).body
    assert (detail["payload"], detail["status"], detail["errorMessage"]) == ({"n": 1}, "dead_letter", "broken")
    assert (await api.call("POST", path_of(messages[0], "/retry"))).body["retried"] is True
    (again,) = await api.pop("orders", batch=10)
    assert again["data"] == {"n": 1}
    assert (await api.call("DELETE", path_of(messages[1]))).status == 200
    assert (await api.call("GET", "/api/v1/dlq")).body["total"] == 0


async def test_of_two_messages_with_one_id_the_dead_letter_is_deleted_and_retried_first(api: Api) -> None:
    await api.configure("orders", dedupWindowSeconds=0)
    for n in (1, 2):
        await api.push("orders", n, ids=["a"])
        await api.ack(await api.pop("orders"), "dlq")
    await api.push("orders", 3, ids=["a"])
    (message,) = await listed(api, queue="orders", status="pending")
    detail = (await api.call("GET", path_of(message))).body
    assert (detail["payload"], detail["status"]) == (3, "pending")
    retried = await api.call("POST", path_of(message, "/retry"))
    assert retried.body["deadLettersRemoved"] == 2
    assert [m["data"] for m in await api.pop("orders", batch=10, consumerGroup="g")] == [1, 2, 3, 1, 2]
    await api.call("POST", path_of(message, "/dlq"), {"error": "the newest is meant"})
    (letter,) = (await api.call("GET", "/api/v1/dlq")).body["messages"]
    assert letter["data"] == 2
    await api.call("DELETE", path_of(message))
    assert (await api.call("GET", "/api/v1/dlq")).body["total"] == 0
    assert [m["data"] for m in await api.pop("orders", batch=10)] == [3, 1]


async def test_who_may_call_what(api: Api) -> None:
    assert api.worker is not None
    one = "/api/v1/messages/{partition}/{transaction}"
    levels = {(route.method, route.pattern): route.access for route in api.worker.http.router.routes}
    for method, pattern, access in (
        ("GET", "/api/v1/messages", Access.READ_ONLY),
        ("GET", one, Access.READ_ONLY),
        ("DELETE", one, Access.READ_WRITE),
        ("POST", f"{one}/retry", Access.READ_WRITE),
        ("POST", f"{one}/dlq", Access.READ_WRITE),
        ("GET", "/api/v1/dlq", Access.READ_ONLY),
        ("POST", "/api/v1/dlq/retry", Access.READ_WRITE),
        ("DELETE", "/api/v1/dlq", Access.ADMIN),
        ("POST", "/api/v1/traces", Access.READ_WRITE),
        ("GET", "/api/v1/traces/names", Access.READ_ONLY),
        ("GET", "/api/v1/traces/by-name/{name}", Access.READ_ONLY),
        ("GET", "/api/v1/traces/{partition}/{transaction}", Access.READ_ONLY),
    ):
        assert levels[method, pattern] is access, (method, pattern)


async def test_a_full_queue_refuses_a_retry(api: Api) -> None:
    await api.configure("orders", maxSize=1)
    await api.push("orders", 1)
    answer = await api.call("POST", path_of(await one(api), "/retry"))
    assert answer.status == 409 and "max capacity" in answer.body["error"]


async def test_an_operator_moves_a_message_to_the_dead_letters(api: Api) -> None:
    await api.push("orders", {"n": 1}, ids=["a"])
    message = await one(api)
    answer = await api.call("POST", path_of(message, "/dlq"))
    assert answer.status == 200 and answer.body["consumerGroup"] == "__QUEUE_MODE__"
    assert answer.body["messageId"] == message["id"]
    assert (await one(api))["status"] == "dead_letter"
    await api.call("POST", path_of(message, "/dlq"), {"consumerGroup": "g1", "error": "looks odd"})
    await api.call("POST", path_of(message, "/dlq"), consumerGroup="g2")
    letters = (await api.call("GET", "/api/v1/dlq")).body["messages"]
    assert {letter["consumerGroup"]: letter["errorMessage"] for letter in letters} == {
        "__QUEUE_MODE__": "Moved to DLQ by operator",
        "g1": "looks odd",
        "g2": "Moved to DLQ by operator",
    }
    for bad in (b"[]", b"{"):
        assert (await api.call("POST", path_of(message, "/dlq"), data=bad)).status == 400
    assert (await api.call("POST", path_of(message, "/dlq"), consumerGroup="a\x00b")).status == 400

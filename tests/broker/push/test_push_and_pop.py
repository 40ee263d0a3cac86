"""Messages go in and come out: once, in order, as they were."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.raw_http import exchange, push_body, raw_payloads


async def test_a_pushed_message_is_popped_as_it_was(api: Api) -> None:
    (result,) = await api.push("orders", {"n": 1}, ids=["t-1"])
    assert result["status"] == "queued"
    (message,) = await api.pop("orders")
    assert message["data"] == {"n": 1}
    assert message["transactionId"] == "t-1"
    assert message["id"] == result["message_id"]


async def test_a_failed_message_in_the_middle_of_a_batch_is_redelivered_first(api: Api) -> None:
    await api.push("jobs", 1, 2, 3)
    messages = await api.pop("jobs", batch=3)
    results = await api.ack(messages, ["completed", "failed", "completed"])
    assert [result["success"] for result in results] == [True, True, False]
    again = await api.pop("jobs", batch=3, wait=True, timeout=60_000)
    assert [message["data"] for message in again] == [2, 3]


async def test_the_answer_of_a_push_says_what_became_of_each_item(api: Api) -> None:
    trace = str(uuid.uuid4())
    items = [
        {"queue": "a", "payload": 1, "transactionId": "t-1", "traceId": trace},
        {"queue": "b", "partition": "p", "payload": 2, "transactionId": "t-2"},
        {"queue": "a", "payload": 3, "transactionId": "t-1"},
    ]
    answer = await api.call("POST", "/api/v1/push", {"items": items})
    assert answer.status == 201
    first, second, third = answer.body
    assert first.keys() == {
        "index",
        "transaction_id",
        "status",
        "message_id",
        "partition_id",
        "trace_id",
        "queueName",
    }
    assert (first["index"], first["transaction_id"], first["status"]) == (0, "t-1", "queued")
    assert (first["trace_id"], first["queueName"]) == (trace, "a")
    assert (second["index"], second["status"], second["queueName"], second["trace_id"]) == (1, "queued", "b", None)
    assert third == {
        "index": 2,
        "transaction_id": "t-1",
        "status": "duplicate",
        "message_id": first["message_id"],
        "queueName": "a",
    }


async def test_the_answer_of_a_pop_has_the_shape_that_clients_read(api: Api) -> None:
    (pushed,) = await api.push("orders", {"n": 1}, ids=["t-1"])
    answer = await api.call("GET", "/api/v1/pop/queue/orders", consumerGroup="billing")
    assert answer.status == 200
    (message,) = answer.body.pop("messages")
    lease = answer.body["leaseId"]
    assert answer.body == {
        "success": True,
        "queue": "orders",
        "partition": "Default",
        "partitionId": pushed["partition_id"],
        "leaseId": lease,
        "consumerGroup": "billing",
        "partitionsClaimed": 1,
    }
    assert uuid.UUID(lease).version == 7
    created = message.pop("createdAt")
    assert len(created) == 27
    assert created.endswith("Z")
    assert message == {
        "id": pushed["message_id"],
        "transactionId": "t-1",
        "traceId": None,
        "data": {"n": 1},
        "producerSub": None,
        "partitionId": pushed["partition_id"],
        "partition": "Default",
        "leaseId": lease,
        "consumerGroup": "billing",
    }


async def test_a_trace_id_comes_back_with_its_message(api: Api) -> None:
    trace = str(uuid.uuid4())
    items: list[dict[str, Any]] = [{"queue": "q", "payload": 1, "traceId": trace}, {"queue": "q", "payload": 2}]
    await api.call("POST", "/api/v1/push", {"items": items})
    assert [message["traceId"] for message in await api.pop("q", batch=2)] == [trace, None]


async def test_items_without_a_transaction_id_get_one_each(api: Api) -> None:
    results = await api.push("q", *range(100))
    messages = await api.pop("q", batch=100)
    ids = [message["transactionId"] for message in messages]
    assert ids == [result["transaction_id"] for result in results]
    assert len(set(ids)) == 100


async def test_an_empty_push_is_answered_with_an_empty_list(api: Api) -> None:
    answer = await api.call("POST", "/api/v1/push", {"items": []})
    assert (answer.status, answer.body) == (201, [])


async def test_messages_come_in_the_order_of_their_pushes_over_many_requests(api: Api) -> None:
    for start in range(0, 300, 10):
        await api.push("q", *range(start, start + 10))
    seen: list[int] = []
    for size in (1, 7, 100, 200):
        messages = await api.pop("q", batch=size)
        seen += [message["data"] for message in messages]
        await api.ack(messages)
    assert seen == list(range(300))


async def test_pushes_sent_at_once_keep_the_order_inside_each_request(api: Api) -> None:
    await asyncio.gather(*(api.push("q", *[[request, item] for item in range(20)]) for request in range(50)))
    seen = [message["data"] for message in await api.pop("q", batch=1000)]
    assert len(seen) == 1000
    for request in range(50):
        assert [item for number, item in seen if number == request] == list(range(20))


async def test_a_large_push_fills_several_segments_without_a_gap(
    api: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    await api.push("q", *range(3000))
    rows = await connection.fetch("SELECT base_offset, count FROM queen.segments ORDER BY base_offset")
    assert len(rows) > 1
    end = 0
    for row in rows:
        assert row["base_offset"] == end
        end += row["count"]
    assert end == 3000
    assert [message["data"] for message in await api.pop("q", batch=3000)] == list(range(3000))


async def test_partitions_of_one_queue_are_separate(api: Api) -> None:
    await api.push("q", 1, 2, partition="a")
    await api.push("q", 3, partition="b")
    assert [message["data"] for message in await api.pop("q", "b", batch=10)] == [3]
    assert [message["data"] for message in await api.pop("q", "a", batch=10)] == [1, 2]
    assert await api.pop("q", "a", batch=10) == []


async def test_groups_consume_independently(api: Api) -> None:
    await api.push("q", 1, 2)
    for group in ("one", "two"):
        assert [message["data"] for message in await api.pop("q", batch=5, consumerGroup=group)] == [1, 2]
    assert [message["data"] for message in await api.pop("q", batch=5)] == [1, 2]


async def test_a_wildcard_pop_takes_several_partitions_up_to_the_batch_in_all(api: Api) -> None:
    for partition in ("a", "b", "c"):
        await api.push("q", 1, 2, 3, partition=partition)
    answer = await api.call("GET", "/api/v1/pop/queue/q", batch=7, partitions=3)
    assert len(answer.body["messages"]) == 7
    assert answer.body["partitionsClaimed"] == 3
    assert len({message["leaseId"] for message in answer.body["messages"]}) == 1
    assert all(result["success"] for result in await api.ack(answer.body["messages"]))
    rest = await api.pop("q", batch=100, partitions=10)
    assert [message["data"] for message in rest] == [2, 3]


async def test_a_wildcard_pop_serves_the_partition_that_has_waited_longest(api: Api) -> None:
    for partition in ("c", "a", "b"):
        await api.push("q", 1, 2, partition=partition)
    served = []
    for _ in range(6):
        (message,) = await api.pop("q", autoAck=True)
        served.append(message["partition"])
    assert served == ["c", "a", "b", "c", "a", "b"]


async def test_auto_ack_consumes_at_delivery(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    answer = await api.call("GET", "/api/v1/pop/queue/q", batch=2, autoAck=True)
    assert answer.body["leaseId"] == ""
    assert [message["leaseId"] for message in answer.body["messages"]] == ["", ""]
    assert [message["data"] for message in await api.pop("q", batch=2, autoAck=True)] == [3]
    assert await api.pop("q") == []


async def test_a_queue_made_by_a_push_takes_namespace_and_task_from_its_name(api: Api) -> None:
    await api.push("billing.ingest.eu", 1)
    await api.push("plain", 2)
    for namespace, expected in (("billing", [1]), ("plain", [2]), ("nobody", [])):
        answer = await api.call("GET", "/api/v1/pop", autoAck=True, namespace=namespace)
        assert [message["data"] for message in (answer.body or {"messages": []})["messages"]] == expected
    await api.push("billing.ingest.eu", 3)
    answer = await api.call("GET", "/api/v1/pop", task="ingest")
    assert answer.body["queue"] == "billing.ingest.eu"


async def test_an_empty_queue_answers_204_without_a_body(api: Api) -> None:
    for path in ("/api/v1/pop/queue/none", "/api/v1/pop/queue/none/partition/p", "/api/v1/pop?namespace=none"):
        status, body = await exchange(api.url, "GET", path)
        assert (status, body) == (204, b"")


NAMES = ["a b", "ü/ö", "%41", "..", "a?b#c", "😀", "x" * 255, "é" * 255, "a'b\"c\\", "{queue}", "Default"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
async def test_anything_printable_names_a_queue_a_partition_and_a_group(api: Api, name: str) -> None:
    await api.push(name, 1, partition=name, ids=[name])
    path, group = f"/api/v1/pop/queue/{quote(name, safe='')}", quote(name[:254], safe="")
    for number, target in enumerate((path, f"{path}/partition/{quote(name, safe='')}")):
        status, body = await exchange(api.url, "GET", f"{target}?consumerGroup={group}{number}")
        assert status == 200
        assert raw_payloads(body) == [b"1"]


PAYLOADS = [
    b"null",
    b"{}",
    b"[]",
    b"true",
    b"0",
    b"-0.0",
    b"1.0",
    b"1e400",
    b"1E+2",
    b"3.141592653589793238462643383279",
    b"123456789012345678901234567890",
    b'""',
    b'"\\u0000"',
    b'"\\u00e9\\/\\ud83d\\ude00\\n"',
    '"é\U0001f600\u2028 "'.encode(),
    b'{"a":1,"a":2}',
    b'{"b" : 1 ,\n\t"a":[ 1,2 ]}',
    b'{"data":{"messages":[{"data":1}]}}',
    b'{"encrypted":"x","iv":"y","authTag":"z"}',
    b"[" * 500 + b"]" * 500,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'"' + b"x" * (1 << 20) + b'"',
    b"[" + b",".join(b"%d" % number for number in range(10_000)) + b"]",
]


@pytest.mark.parametrize("warm", [True, False], ids=["from memory", "from PostgreSQL"])
async def test_every_payload_comes_back_byte_for_byte(start_server: StartServer, warm: bool) -> None:
    api = await start_server(segment_cache_mb=24 if warm else 0)
    for payload in PAYLOADS:
        status, _ = await exchange(api.url, "POST", "/api/v1/push", push_body("q", payload))
        assert status == 201
    status, body = await exchange(api.url, "GET", f"/api/v1/pop/queue/q?batch={len(PAYLOADS)}")
    assert status == 200
    assert raw_payloads(body) == PAYLOADS


async def test_every_payload_pushed_in_a_transaction_comes_back_byte_for_byte(api: Api) -> None:
    for number, payload in enumerate(PAYLOADS[:-2]):
        operation = b'{"operations":[{"type":"push",' + push_body(f"q{number}", payload)[1:] + b"]}"
        status, body = await exchange(api.url, "POST", "/api/v1/transaction", operation)
        assert (status, b'"success":true' in body) == (200, True), body
        status, body = await exchange(api.url, "GET", f"/api/v1/pop/queue/q{number}")
        assert raw_payloads(body) == [payload]


async def test_a_payload_of_ten_megabytes_comes_back_byte_for_byte(api: Api) -> None:
    payload = b'"' + b"0123456789abcdef" * (10 * (1 << 20) // 16) + b'"'
    status, _ = await exchange(api.url, "POST", "/api/v1/push", push_body("q", payload))
    assert status == 201
    status, body = await exchange(api.url, "GET", "/api/v1/pop/queue/q")
    assert raw_payloads(body) == [payload]


async def test_a_missing_payload_is_null_and_in_a_transaction_an_empty_object(api: Api) -> None:
    await api.call("POST", "/api/v1/push", {"items": [{"queue": "a"}]})
    await api.call("POST", "/api/v1/transaction", {"operations": [{"type": "push", "items": [{"queue": "b"}]}]})
    assert [message["data"] for message in await api.pop("a")] == [None]
    assert [message["data"] for message in await api.pop("b")] == [{}]


async def test_transaction_ids_may_hold_anything(api: Api) -> None:
    ids = ["a\x00b", "\n", '"\\', "é😀", " ", "x" * 255, "null"]
    await api.push("q", *ids, ids=ids)
    messages = await api.pop("q", batch=len(ids))
    assert [message["transactionId"] for message in messages] == ids
    results = await api.ack(messages)
    assert [(result["transactionId"], result["success"]) for result in results] == [(id, True) for id in ids]
    assert await api.pop("q") == []


async def test_messages_survive_a_restart_of_the_server(start_server: StartServer) -> None:
    first = await start_server()
    await first.push("q", 1, 2, 3, ids=["a", "b", "c"])
    messages = await first.pop("q", batch=1)
    await first.ack(messages)
    assert first.worker is not None
    second = await start_server()
    assert [message["data"] for message in await second.pop("q", batch=5)] == [2, 3]
    (result,) = await second.push("q", 1, ids=["a"])
    assert result["status"] == "duplicate"

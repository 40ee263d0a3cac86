"""Traces: what consumers say about messages, by message and by name."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from queen.wire.ids import partition_uuid
from tests.conftest import StartServer
from tests.support.api import Answer, Api

KEY = "00" * 32


async def trace(api: Api, message: dict[str, Any], **fields: Any) -> Answer:
    named = {"transactionId": message["transactionId"], "partitionId": message["partitionId"]}
    return await api.call("POST", "/api/v1/traces", {**named, "data": {"text": "hi"}, **fields})


async def traces_of(api: Api, message: dict[str, Any], **query: Any) -> Any:
    path = f"/api/v1/traces/{message['partitionId']}/{message['transactionId']}"
    answer = await api.call("GET", path, **query)
    assert answer.status == 200, answer
    return answer.body


async def by_name(api: Api, name: str, **query: Any) -> Any:
    answer = await api.call("GET", f"/api/v1/traces/by-name/{name}", **query)
    assert answer.status == 200, answer
    return answer.body


async def test_traces_of_a_message_come_back_oldest_first(api: Api) -> None:
    await api.push("orders", {"n": 1}, ids=["a"])
    (message,) = await api.pop("orders", consumerGroup="g1")
    first = await trace(api, message, consumerGroup="g1", eventType="step", traceNames=["b", "a", "b"])
    assert first.status == 201 and first.body["success"] is True
    await trace(api, message, consumerGroup=None, eventType=None, traceNames=None, data=[1, "zwei", None])
    body = await traces_of(api, message)
    for one in body["traces"]:
        assert len(one.pop("created_at")) == 24
    assert body["traces"] == [
        {
            "id": first.body["traceId"],
            "event_type": "step",
            "data": {"text": "hi"},
            "consumer_group": "g1",
            "worker_id": "0",
            "trace_names": ["a", "b"],
        },
        {
            "id": body["traces"][1]["id"],
            "event_type": "info",
            "data": [1, "zwei", None],
            "consumer_group": "__QUEUE_MODE__",
            "worker_id": "0",
            "trace_names": [],
        },
    ]
    assert body["total"] == 2


@pytest.mark.parametrize("data", ["text", 0, None, False, [], {}, {"deep": [{"n": 1}]}])
async def test_the_data_of_a_trace_may_be_any_json(api: Api, data: Any) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    assert (await trace(api, message, data=data)).status == 201
    assert [one["data"] for one in (await traces_of(api, message))["traces"]] == [data]


async def test_a_message_is_traced_wherever_it_is(api: Api, start_server: StartServer) -> None:
    other = await start_server(worker_id=1)
    await api.push("orders", 1, 2, ids=["a", "b"])
    pending = (await api.call("GET", "/api/v1/messages", queue="orders")).body["messages"]
    for server in (api, other):
        for message in pending:
            assert (await trace(server, message)).status == 201
    leased = await api.pop("orders", batch=2)
    for server in (api, other):
        assert (await trace(server, leased[1])).status == 201
    await api.ack(leased)
    for server in (api, other):
        assert (await trace(server, leased[1])).status == 201
    assert (await traces_of(api, leased[1]))["total"] == 6
    assert (await traces_of(api, leased[0]))["total"] == 2


async def test_traces_of_a_name_run_over_all_messages(api: Api) -> None:
    await api.push("orders", {"n": 1}, ids=["a"], partition="x")
    await api.push("mails", {"n": 2}, ids=["b"])
    name = "order 7/ä"
    for queue in ("orders", "mails"):
        (message,) = await api.pop(queue)
        await trace(api, message, traceNames=name, eventType=queue)
        await trace(api, message, traceNames=["other"])
    body = await by_name(api, "order%207%2F%C3%A4")
    assert [one["event_type"] for one in body["traces"]] == ["orders", "mails"]
    first = body["traces"][0]
    assert (first["transaction_id"], first["queue_name"], first["partition_name"]) == ("a", "orders", "x")
    assert first["message_payload"] == {"n": 1} and first["data"] == {"text": "hi"}
    assert first["trace_names"] == [name]
    assert body["total"] == 2 and body["pagination"] == {"limit": 100, "offset": 0, "total": 2}
    assert (await by_name(api, "nobody"))["traces"] == (await by_name(api, "%00"))["traces"] == []


async def test_traces_are_paged(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    for n in range(7):
        await trace(api, message, data=n, traceNames=["t"])
    for read in (by_name(api, "t", limit=3, offset=3), traces_of(api, message, limit=3, offset=3)):
        body = await read
        assert [one["data"] for one in body["traces"]] == [3, 4, 5]
        assert body["total"] == 7 and body["pagination"] == {"limit": 3, "offset": 3, "total": 7}
    for read in (by_name(api, "t", offset=70), traces_of(api, message, offset=70)):
        body = await read
        assert body["traces"] == [] and body["total"] == 7
    assert len((await by_name(api, "t", limit=-1, offset=-1))["traces"]) == 1


async def test_names_are_listed_with_the_one_used_last_first(api: Api) -> None:
    assert (await api.call("GET", "/api/v1/traces/names")).body["trace_names"] == []
    await api.push("orders", 1, 2, ids=["a", "b"])
    messages = await api.pop("orders", batch=2)
    await trace(api, messages[0], traceNames=["old", "new"])
    await trace(api, messages[0], traceNames=["new"])
    await trace(api, messages[1], traceNames=["new"])
    body = (await api.call("GET", "/api/v1/traces/names")).body
    last_seen = [name.pop("last_seen") for name in body["trace_names"]]
    assert last_seen == sorted(last_seen, reverse=True)
    assert body["trace_names"] == [
        {"trace_name": "new", "trace_count": 3, "message_count": 2},
        {"trace_name": "old", "trace_count": 1, "message_count": 1},
    ]
    assert body["total"] == 2 and body["pagination"] == {"limit": 50, "offset": 0, "total": 2}
    page = (await api.call("GET", "/api/v1/traces/names", limit=1, offset=1)).body
    assert [name["trace_name"] for name in page["trace_names"]] == ["old"] and page["total"] == 2
    found = (await api.call("GET", "/api/v1/traces/names", search="OL", limit=1)).body
    assert [name["trace_name"] for name in found["trace_names"]] == ["old"] and found["total"] == 1
    assert (await api.call("GET", "/api/v1/traces/names", search="%")).body["trace_names"] == []


async def test_traces_outlive_their_message(api: Api, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    await trace(api, message, traceNames=["t"])
    await connection.execute("DELETE FROM queen.segments")
    assert (await traces_of(api, message))["total"] == 1
    (one,) = (await by_name(api, "t"))["traces"]
    assert one["message_payload"] is None and one["transaction_id"] == "a"


async def test_an_unknown_message_cannot_be_traced(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    for partition in ("nonsense", "", partition_uuid(99), "51756565-0003-8000-8000-000000000001"):
        stranger = {"transactionId": "a", "partitionId": partition or "x"}
        answer = await trace(api, stranger)
        assert answer.status == 404 and answer.body == {"success": False, "error": "Message not found"}
        assert (await traces_of(api, stranger))["traces"] == []
    stranger = {**message, "transactionId": "b"}
    assert (await trace(api, stranger)).status == 404
    assert (await traces_of(api, stranger))["traces"] == []
    assert (await trace(api, message, consumerGroup="never heard of")).status == 201


async def test_bad_traces_are_refused(api: Api, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    missing = await trace(api, {"transactionId": "", "partitionId": message["partitionId"]})
    assert missing.status == 400 and missing.body["error"] == "transactionId and partitionId are required"
    missing = await trace(api, {"transactionId": "a", "partitionId": None})
    assert missing.status == 400
    named = {"transactionId": "a", "partitionId": message["partitionId"]}
    answer = await api.call("POST", "/api/v1/traces", named)
    assert answer.status == 400 and answer.body["error"] == "data is required"
    for fields in (
        {"traceNames": 7},
        {"traceNames": [""]},
        {"traceNames": ["a", None]},
        {"traceNames": ["x" * 256]},
        {"traceNames": ["a\x00"]},
        {"traceNames": [f"n{n}" for n in range(51)]},
        {"eventType": 7},
        {"eventType": "x" * 256},
        {"consumerGroup": ["g"]},
        {"consumerGroup": "g\x00"},
    ):
        answer = await trace(api, message, **fields)
        assert answer.status == 400 and next(iter(fields)) in answer.body["error"], fields
    for data in (b"", b"{", b"[]", b'{"transactionId":"a","partitionId":"b","data":"\xff"}'):
        assert (await api.call("POST", "/api/v1/traces", data=data)).status == 400
    assert await connection.fetchval("SELECT count(*) FROM queen.traces") == 0


async def test_fifty_names_and_longest_names_are_fine(api: Api) -> None:
    await api.push("orders", 1, ids=["a"])
    (message,) = await api.pop("orders")
    names = [f"{n:02}".ljust(255, "x") for n in range(50)]
    assert (await trace(api, message, traceNames=names * 2)).status == 201
    (one,) = (await traces_of(api, message))["traces"]
    assert one["trace_names"] == names


async def test_traces_of_an_encrypted_queue_are_sealed_and_shown_in_clear(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    api = await start_server(queen_encryption_key=(KEY,))
    await api.configure("secrets", encryptionEnabled=True)
    await api.push("secrets", {"pin": "1234"}, ids=["a"])
    (message,) = await api.pop("secrets")
    await trace(api, message, data={"saw": "pin-1234"}, traceNames=["t"])
    stored = await connection.fetchval("SELECT data FROM queen.traces")
    assert stored[0] & 0x80 and b"pin-1234" not in stored
    (one,) = (await by_name(api, "t"))["traces"]
    assert one["data"] == {"saw": "pin-1234"} and one["message_payload"] == {"pin": "1234"}

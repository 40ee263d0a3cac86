"""Binary pushes, transactions and framed pops over HTTP."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.ageing import Connection
from tests.support.api import Api, payloads
from tests.support.frames import Group, binary_push, framed_push, framed_transaction, read_frames

SENT = [Group("orders", "a", [("t1", b'{"n":1}'), ("", b"2")]), Group("orders", "b", [("t1", '"ü"'.encode())])]


async def framed(api: Api, path: str, **query: str) -> dict[str, Any] | None:
    async with (
        aiohttp.ClientSession(headers=api.headers) as session,
        session.get(api.url + path, params={"frames": "true"} | query) as answer,
    ):
        assert answer.status in (200, 204), await answer.text()
        if answer.status == 204:
            return None
        assert answer.content_type == "application/x-queen-pop"
        return read_frames(await answer.read())


@pytest.mark.parametrize(
    "body", [binary_push(SENT), binary_push(SENT, compress=True), framed_push(SENT)], ids=["plain", "zstd", "frames"]
)
async def test_a_binary_push_is_answered_as_any_push(api: Api, body: bytes) -> None:
    answer = await api.call("POST", "/api/v1/push", data=body)
    assert answer.status == 201
    assert [(one["status"], one["queueName"], one["index"]) for one in answer.body] == [
        ("queued", "orders", n) for n in range(3)
    ]
    assert answer.body[0]["transaction_id"] == "t1"
    assert payloads(await api.pop("orders", "a", batch=9)) == [{"n": 1}, 2]
    assert payloads(await api.pop("orders", "b", batch=9)) == ["ü"]
    again = await api.call("POST", "/api/v1/push", data=body)
    assert [one["status"] for one in again.body][::2] == ["duplicate", "duplicate"]


def counts(queued: int, duplicate: int) -> dict[str, int]:
    return {"count": queued + duplicate, "queued": queued, "duplicate": duplicate, "error": 0}


async def test_counts_are_answered_in_place_of_results(api: Api) -> None:
    body = framed_push(SENT, counts=True)
    assert (await api.call("POST", "/api/v1/push", data=body)).body == counts(3, 0)
    assert (await api.call("POST", "/api/v1/push", data=body)).body == counts(0, 3)
    nothing = await api.call("POST", "/api/v1/push", data=binary_push([], counts=True))
    assert nothing.body == counts(0, 0)


async def test_a_damaged_body_is_a_bad_request(api: Api) -> None:
    answer = await api.call("POST", "/api/v1/push", data=framed_push(SENT)[:-3])
    assert answer.status == 400 and "Invalid binary push" in answer.body["error"]


async def test_a_framed_pop_has_what_the_other_has(api: Api) -> None:
    items = [
        {"queue": "orders", "partition": "a", "payload": {"n": n, "text": "ü" * 200}, "transactionId": f"t{n}"}
        for n in range(20)
    ]
    items[3]["traceId"] = "019ae0f0-6f2c-7000-8000-000000000001"
    await api.call("POST", "/api/v1/push", {"items": items})
    await api.push("orders", "small", partition="b")
    plain = await api.pop("orders", consumerGroup="plain", batch=100, partitions=9)
    answer = await framed(api, "/api/v1/pop/queue/orders", consumerGroup="g", batch="100", partitions="9")
    assert answer is not None and (answer["queue"], answer["consumerGroup"]) == ("orders", "g")
    keys = ("id", "transactionId", "traceId", "data", "producerSub", "partition")
    assert [[one[key] for key in keys] for one in answer["messages"]] == [[one[key] for key in keys] for one in plain]
    assert [one["offset"] for one in answer["messages"]] == [*range(20), 0]
    # Partitions are numbers there, by which messages are acknowledged too.
    results = await api.ack(answer["messages"], group="g")
    assert all(one["success"] for one in results)
    assert await framed(api, "/api/v1/pop/queue/orders", consumerGroup="g") is None


async def test_a_framed_pop_leaves_out_deleted_messages_and_counts_attempts(api: Api) -> None:
    await api.configure("orders", retryDelay=0, retryLimit=5)
    pushed = await api.push("orders", *range(5))
    for one in (pushed[1], pushed[3]):
        await api.call("DELETE", f"/api/v1/messages/{one['partition_id']}/{one['transaction_id']}")
    for attempt in (1, 2):
        answer = await framed(api, "/api/v1/pop/queue/orders", batch="9")
        assert answer is not None
        found = [(one["data"], one["offset"], one["deliveryAttempt"]) for one in answer["messages"]]
        assert found == [(n, n, attempt) for n in (0, 2, 4)]
        await api.ack(answer["messages"], status="failed")


async def test_pops_of_a_namespace_and_of_encrypted_queues_are_framed(api: Api) -> None:
    await api.configure("orders", namespace="shop")
    await api.push("orders", 1)
    answer = await framed(api, "/api/v1/pop", namespace="shop", autoAck="true")
    assert answer is not None and payloads(answer["messages"]) == [1] and answer["leaseId"] == ""


async def test_a_group_with_conflation_is_answered_in_json(api: Api) -> None:
    await api.push("orders", 1, 2)
    query: dict[str, Any] = {"consumerGroup": "g", "conflation": True, "frames": True}
    answer = await api.call("GET", "/api/v1/pop/queue/orders", **query)
    assert payloads(answer.body["messages"]) == [2] and answer.body["conflation"]
    await api.ack(await api.pop("orders", consumerGroup="plain"), group="plain")
    other = await framed(api, "/api/v1/pop/queue/orders", consumerGroup="plain", conflation="true")
    assert other is not None and other["conflationConflict"] is True


async def test_a_binary_transaction_happens_whole_or_not(api: Api, connection: Connection) -> None:
    await api.push("orders", 1, 2)
    answer = await framed(api, "/api/v1/pop/queue/orders", batch="2")
    assert answer is not None
    first, second = answer["messages"]

    def ack(message: dict[str, Any]) -> dict[str, Any]:
        return {"type": "ack"} | {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}

    head = {
        "operations": [ack(first)],
        "kv": [{"op": "putIfAbsent", "ns": "n", "key": "k", "value": 1, "forever": True}],
    }
    head["kv"][0]["required"] = True
    out = [Group("invoices", "Default", [("i1", b"1"), ("i2", b"2")])]
    body = framed_transaction(msgspec.json.encode(head), out)
    done = (await api.call("POST", "/api/v1/transaction", data=body)).body
    assert done["success"] and [one["type"] for one in done["results"]] == ["ack", "push", "push", "kv"]
    assert not (await api.call("POST", "/api/v1/transaction", data=body)).body["success"]
    counted = framed_transaction(
        msgspec.json.encode({"operations": [ack(second)]}), [Group("x", "p", [("", b"1")])], counts=True
    )
    done = (await api.call("POST", "/api/v1/transaction", data=counted)).body
    assert (done["success"], done["results"], done["pushed"], done["duplicate"], done["acked"]) == (True, [], 1, 0, 1)
    assert payloads(await api.pop("invoices", batch=9)) == [1, 2]
    assert await api.pop("orders") == []

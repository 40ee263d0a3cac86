"""The list of messages: what is on it, in which order, and its pages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg

from tests.support.api import Api


async def listed(api: Api, **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", "/api/v1/messages", **query)
    assert answer.status == 200, answer
    messages: list[dict[str, Any]] = answer.body["messages"]
    return messages


async def test_the_list_shows_messages_newest_first_without_their_payloads(api: Api) -> None:
    (first,) = await api.push("billing.ingest", {"n": 1}, ids=["a"])
    await api.push("billing.ingest", {"n": 2}, ids=["b"], partition="eu")
    answer = await api.call("GET", "/api/v1/messages", queue="billing.ingest")
    assert [message["transactionId"] for message in answer.body["messages"]] == ["b", "a"]
    oldest = answer.body["messages"][1]
    created_at = oldest.pop("createdAt")
    assert created_at.endswith("Z") and len(created_at) == 24
    assert oldest == {
        "id": first["message_id"],
        "transactionId": "a",
        "partitionId": first["partition_id"],
        "queuePath": "billing.ingest/Default",
        "queue": "billing.ingest",
        "partition": "Default",
        "namespace": "billing",
        "task": "ingest",
        "status": "pending",
        "queueStatus": "pending",
        "busStatus": {"consumedBy": 0, "totalGroups": 0},
        "traceId": None,
        "producerSub": None,
        "queuePriority": 0,
        "leaseExpiresAt": None,
    }
    assert answer.body["mode"] == {"hasQueueMode": False, "busGroupsCount": 0, "type": "none"}
    assert (answer.body["total"], answer.body["limit"], answer.body["offset"]) == (2, 200, 0)


async def test_the_list_has_as_much_of_each_payload_as_requested(api: Api) -> None:
    await api.push("orders", {"name": "Ada"}, 7)
    assert [one["preview"] for one in await listed(api, queue="orders", preview=1000)] == ["7", '{"name": "Ada"}']
    assert [one["preview"] for one in await listed(api, queue="orders", preview=12)] == ["7", '{"name": "Ad']
    assert "preview" not in (await listed(api, queue="orders"))[0]
    assert (await api.call("GET", "/api/v1/messages", preview=1001)).status == 400


async def test_the_list_is_filtered_by_queue_partition_namespace_and_task(api: Api) -> None:
    for queue, partition in (("a.x", "1"), ("a.y", "1"), ("b.x", "1"), ("b.x", "2")):
        await api.push(queue, 0, partition=partition)

    async def paths(**query: str) -> set[str]:
        return {message["queuePath"] for message in await listed(api, **query)}

    assert await paths() == {"a.x/1", "a.y/1", "b.x/1", "b.x/2"}
    assert await paths(queue="b.x") == {"b.x/1", "b.x/2"}
    assert await paths(queue="b.x", partition="2") == {"b.x/2"}
    assert await paths(partition="1") == {"a.x/1", "a.y/1", "b.x/1"}
    assert await paths(ns="a") == {"a.x/1", "a.y/1"}
    assert await paths(task="x") == {"a.x/1", "b.x/1", "b.x/2"}
    assert await paths(ns="b", task="y") == set()
    assert await paths(queue="unknown") == await paths(queue="a.x", partition="unknown") == set()


async def test_status_follows_the_cursor_of_queue_mode(api: Api) -> None:
    await api.push("orders", 1, 2, 3, 4, ids=["a", "b", "c", "d"])
    messages = await api.pop("orders", batch=1)
    await api.ack(messages)
    leased = await api.pop("orders", batch=2)
    answer = await api.call("GET", "/api/v1/messages", queue="orders")
    statuses = {message["transactionId"]: message["status"] for message in answer.body["messages"]}
    # Whatever lies past the cursor of a leased partition is in somebody's hands or waits for them.
    assert statuses == {"a": "completed", "b": "processing", "c": "processing", "d": "processing"}
    assert answer.body["messages"][0]["leaseExpiresAt"] is not None
    assert answer.body["mode"]["type"] == "queue"
    await api.ack(leased, "dlq")
    by_status = {
        status: [message["transactionId"] for message in await listed(api, queue="orders", status=status)]
        for status in ("pending", "processing", "completed", "dead_letter")
    }
    assert by_status == {"pending": ["d"], "processing": [], "completed": ["a"], "dead_letter": ["c", "b"]}


async def test_status_with_groups_alone_is_completed_when_all_have_consumed_it(api: Api) -> None:
    await api.push("orders", 1, 2, 3)
    for group, batch in (("g1", 3), ("g2", 1)):
        await api.ack(await api.pop("orders", batch=batch, consumerGroup=group), group=group)
    answer = await api.call("GET", "/api/v1/messages", queue="orders")
    assert [message["status"] for message in answer.body["messages"]] == ["pending", "pending", "completed"]
    assert [message["busStatus"]["consumedBy"] for message in answer.body["messages"]] == [1, 1, 2]
    assert answer.body["messages"][0]["busStatus"]["totalGroups"] == 2
    assert answer.body["mode"] == {"hasQueueMode": False, "busGroupsCount": 2, "type": "bus"}
    assert len(await listed(api, queue="orders", status="pending")) == 2
    await api.pop("orders")
    answer = await api.call("GET", "/api/v1/messages", queue="orders", status="processing")
    assert len(answer.body["messages"]) == answer.body["total"] == 3
    assert answer.body["mode"]["type"] == "hybrid"


async def test_pages_go_through_all_messages_without_gaps_or_repeats(api: Api) -> None:
    expected: set[str] = set()
    for turn in range(10):
        items: list[dict[str, Any]] = [
            {"queue": "many", "partition": f"p{n % 20}", "payload": n, "transactionId": f"{turn}-{n}"}
            for n in range(100)
        ]
        assert (await api.call("POST", "/api/v1/push", {"items": items})).status == 201
        expected |= {item["transactionId"] for item in items}
    seen: list[dict[str, Any]] = []
    for offset in range(0, 1001, 77):
        answer = await api.call("GET", "/api/v1/messages", queue="many", limit=77, offset=offset)
        assert answer.body["total"] == 1000
        seen += answer.body["messages"]
    assert len(seen) == 1000
    assert {message["transactionId"] for message in seen} == expected
    assert [message["createdAt"] for message in seen] == sorted((m["createdAt"] for m in seen), reverse=True)
    for partition in ("p0", "p19"):
        own = [message["id"] for message in seen if message["partition"] == partition]
        assert own == [m["id"] for m in await listed(api, queue="many", partition=partition, limit=1000)]


async def test_pages_of_one_status_leave_out_dead_letters_without_gaps(api: Api) -> None:
    for partition in ("x", "y"):
        await api.push("jobs", *range(30), partition=partition, ids=[f"{partition}{n}" for n in range(30)])
        messages = await api.pop("jobs", partition, batch=20)
        await api.ack(messages, ["dlq" if n % 3 == 0 else "completed" for n in range(20)])
    pages: list[str] = []
    for offset in range(0, 30, 4):
        answer = await api.call("GET", "/api/v1/messages", queue="jobs", status="completed", limit=4, offset=offset)
        assert answer.body["total"] == 26
        pages += [message["transactionId"] for message in answer.body["messages"]]
    wanted = [f"{partition}{n}" for partition in ("y", "x") for n in range(19, -1, -1) if n % 3]
    assert pages == wanted
    dead = await api.call("GET", "/api/v1/messages", queue="jobs", status="dead_letter", limit=5, offset=6)
    assert dead.body["total"] == 14
    assert [message["transactionId"] for message in dead.body["messages"]] == ["y0", "x18", "x15", "x12", "x9"]


async def test_times_bound_the_list(api: Api, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for n in range(12):
        await api.push("orders", n, ids=[f"m{n}"])
    # Twelve segments, one an hour: the newest now, the oldest eleven hours ago.
    now = await connection.fetchval("SELECT date_trunc('minute', now())")
    await connection.execute(
        "UPDATE queen.segments SET created_at = $1::timestamptz - (11 - base_offset) * interval '1 hour'", now
    )
    await connection.execute("UPDATE queen.partitions SET last_at = $1", now)

    async def ids(**query: Any) -> list[str]:
        return [message["transactionId"] for message in await listed(api, queue="orders", **query)]

    def ago(hours: float) -> str:
        moment: str = (now - timedelta(hours=hours)).isoformat()
        return moment

    assert await ids(**{"from": ago(3)}) == ["m11", "m10", "m9", "m8"]
    assert await ids(**{"from": ago(100)}) == [f"m{n}" for n in range(11, -1, -1)]
    assert await ids(**{"from": ago(5), "to": ago(3)}) == ["m8", "m7", "m6"]
    assert await ids(**{"from": ago(5.5), "to": ago(3.5)}) == ["m7", "m6"]
    assert await ids(**{"from": ago(5), "to": ago(7)}) == []
    assert await ids() in (["m11", "m10"], ["m11"])
    query: dict[str, Any] = {"queue": "orders", "from": ago(5), "limit": 1}
    assert (await api.call("GET", "/api/v1/messages", **query)).body["total"] == 6


async def test_bad_numbers_are_bent_into_range_and_bad_times_refused(api: Api) -> None:
    await api.push("orders", 1, 2)
    for numbers in ({"limit": -5}, {"limit": 0}, {"offset": -1, "limit": 1}):
        assert len(await listed(api, queue="orders", **numbers)) == 1
    assert len(await listed(api, queue="orders", limit=99_999_999)) == 2
    assert len(await listed(api, queue="orders", limit="abc", offset="x")) == 2
    assert await listed(api, queue="orders", offset=9_223_372_036_854_775_807) == []
    for name in ("from", "to"):
        for value in ("yesterday", "0001-01-01T00:00:00+14:00"):
            query: dict[str, Any] = {name: value}
            answer = await api.call("GET", "/api/v1/messages", **query)
            assert answer.status == 400 and name in answer.body["error"] and value in answer.body["error"]
    assert (await api.call("GET", "/api/v1/messages", to="9999-12-31T23:59:59Z", queue="orders")).body["total"] == 2
    answer = await api.call("GET", "/api/v1/messages", status="broken")
    assert answer.status == 400 and "broken" in answer.body["error"]
    assert await listed(api, queue="a\x00b") == await listed(api, queue="orders", partition="a\x00b") == []

"""Ephemeral queues: groups, leases, limits, and what outlives what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from queen.storage.statements import sql
from tests.conftest import StartServer
from tests.support.api import Answer, Api
from tests.support.database import Connection

ROOT = "/api/v1/ephemeral"


async def push(api: Api, *payloads: Any, queue: str = "inbox", **fields: Any) -> Answer:
    messages = [{"payload": payload} for payload in payloads]
    return await api.call("POST", f"{ROOT}/push", {"queue": queue, "messages": messages} | fields)


async def pop(api: Api, queue: str = "inbox", **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", f"{ROOT}/pop", queue=queue, **{"batch": 100} | query)
    assert answer.status == 200 and answer.body["queue"] == queue, answer
    messages: list[dict[str, Any]] = answer.body["messages"]
    return messages


async def ack(api: Api, messages: list[dict[str, Any]], status: str | None = None, **fields: Any) -> list[str]:
    acks = [{"id": message["id"]} | ({"status": status} if status else {}) for message in messages]
    answer = await api.call("POST", f"{ROOT}/ack", {"queue": "inbox", "acks": acks} | fields)
    assert answer.status == 200, answer
    return [result["outcome"] for result in answer.body["results"]]


async def configure(api: Api, **options: Any) -> Any:
    answer = await api.call("POST", f"{ROOT}/configure", {"queue": "inbox", "options": options})
    assert answer.status == 200, answer
    return answer.body["options"]


async def depth(api: Api, queue: str = "inbox") -> Any:
    return (await api.call("GET", f"{ROOT}/queues/{queue}/depth")).body


def values(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["payload"] for message in messages]


async def test_queues_are_searched_and_paged(api: Api) -> None:
    for queue in ("presence", "progress", "other"):
        await push(api, 1, 2, queue=queue)
    found = (await api.call("GET", f"{ROOT}/queues")).body
    assert [(one["queue"], one["length"]) for one in found["queues"]] == [
        ("other", 2),
        ("presence", 2),
        ("progress", 2),
    ]
    page = (await api.call("GET", f"{ROOT}/queues", search="PR", limit=1, offset=1)).body
    assert [one["queue"] for one in page["queues"]] == ["progress"] and page["total"] == 2
    assert (await api.call("GET", f"{ROOT}/queues", limit=5, offset=5)).body == {"queues": [], "total": 3}


async def test_messages_come_in_order_and_are_gone_when_acknowledged(api: Api) -> None:
    assert (await push(api, 1, {"text": "ü"}, None)).body == {"pushed": 3}
    assert (await push(api, 4, partition="b")).status == 201
    messages = await pop(api)
    assert values(messages) == [1, {"text": "ü"}, None, 4]
    assert [(one["partition"], one["attempts"]) for one in messages] == [("Default", 1)] * 3 + [("b", 1)]
    assert await pop(api) == []
    assert await ack(api, messages) == ["acked"] * 4
    assert await ack(api, messages) == ["unknown"] * 4
    assert (await depth(api))["length"] == 0
    assert (await push(api)).body == {"pushed": 0}


async def test_every_group_gets_every_message_and_consumers_of_one_share_them(api: Api) -> None:
    await push(api, -1)
    assert values(await pop(api, group="late", autoAck=True)) == [-1]
    await push(api, *range(4))
    first, second = await pop(api, group="a", batch=2), await pop(api, group="a", batch=9)
    assert (values(first), values(second)) == ([0, 1], [2, 3])
    assert values(await pop(api, group="b", autoAck=True)) == [0, 1, 2, 3]
    assert await ack(api, first + second, group="b") == ["unknown"] * 4
    assert await ack(api, first + second, group="a") == ["acked"] * 4
    assert (await depth(api))["length"] == 4
    assert values(await pop(api, group="late", autoAck=True)) == [0, 1, 2, 3]
    found = await depth(api)
    assert (found["length"], found["bytes"], found["declared"]) == (0, 0, False)
    assert found["groups"] == [{"group": name, "pending": 0, "leased": 0} for name in ("a", "b", "late")]


async def test_a_partition_is_popped_by_itself(api: Api) -> None:
    await push(api, 1, partition="a")
    await push(api, 2, partition="b")
    assert values(await pop(api, partition="b")) == [2]
    assert (await depth(api))["partitions"] == [{"partition": "a", "length": 1}, {"partition": "b", "length": 1}]
    assert values(await pop(api)) == [1]


async def test_what_fails_comes_again_until_its_retries_are_spent(api: Api) -> None:
    await configure(api, retryLimit=2)
    await push(api, "x")
    for attempt in (1, 2):
        (message,) = await pop(api)
        assert message["attempts"] == attempt
        assert await ack(api, [message], "retry" if attempt == 1 else "failed") == ["redelivered"]
    assert await ack(api, await pop(api), "failed", group="") == ["acked"]
    assert await pop(api) == [] and (await depth(api))["length"] == 0


async def test_a_lease_that_is_over_has_its_messages_delivered_again(api: Api, connection: Connection) -> None:
    await configure(api, leaseSeconds=1, retryLimit=1)
    await push(api, 1, 2)
    assert values(await pop(api)) == [1, 2]
    over = "UPDATE queen.ephemeral_leases SET until = now() - interval '1 s'"
    waiting = asyncio.create_task(pop(api, wait=True, timeout=20_000))
    await connection.execute(over)
    again = await waiting
    assert [(one["payload"], one["attempts"]) for one in again] == [(1, 2), (2, 2)]
    await connection.execute(over)
    assert await pop(api) == [] and (await depth(api))["length"] == 0


async def test_a_pop_that_waits_is_woken_by_a_push_and_by_a_failure(api: Api) -> None:
    waiting = asyncio.create_task(pop(api, wait=True, timeout=20_000))
    await asyncio.sleep(0)
    await push(api, 1)
    messages = await waiting
    assert values(messages) == [1]
    waiting = asyncio.create_task(pop(api, wait=True, timeout=20_000))
    await ack(api, messages, "retry")
    assert values(await waiting) == [1]
    assert await pop(api, wait=True, timeout=1) == []


async def test_a_window_buffer_has_a_pop_wait_for_more(api: Api) -> None:
    await configure(api, windowBuffer={"ms": 20_000, "count": 3})
    await push(api, 1)
    waiting = asyncio.create_task(pop(api, wait=True, timeout=30_000))
    await push(api, 2, 3)
    assert values(await waiting) == [1, 2, 3]
    await configure(api, windowBuffer={"ms": 50, "count": 3})
    await push(api, 4)
    assert values(await pop(api, wait=True, timeout=30_000)) == [4]


async def test_a_full_queue_refuses_or_drops_the_oldest(api: Api) -> None:
    await configure(api, maxLength=3)
    await push(api, 1, 2)
    refused = await push(api, 3, 4)
    assert refused.status == 429 and "'inbox' is full" in refused.body["error"] and refused.headers["Retry-After"]
    await push(api, 3)
    await configure(api, maxLength=3, policy="dropOldest")
    assert (await push(api, 4, 5)).status == 201
    assert values(await pop(api, group="a")) == [3, 4, 5]
    assert (await push(api, *range(4))).status == 429
    await configure(api, maxBytes=40, policy="dropOldest")
    assert (await push(api, "x" * 30)).status == 201
    assert values(await pop(api, group="b"))[-1] == "x" * 30 and (await depth(api))["bytes"] <= 40
    assert (await push(api, "x" * 50)).status == 429


async def test_old_messages_are_dropped(api: Api, connection: Connection) -> None:
    await configure(api, ttlSeconds=60)
    await push(api, 1, 2)
    await connection.execute("UPDATE queen.ephemeral_messages SET pushed_at = now() - interval '2 min' WHERE seq = 1")
    assert values(await pop(api)) == [2]


async def test_reset_drops_messages_and_makes_acknowledgments_stale(api: Api) -> None:
    await configure(api, maxLength=7)
    await push(api, 1, 2)
    messages = await pop(api)
    assert (await api.call("POST", f"{ROOT}/reset", {"queue": "inbox"})).body == {"queue": "inbox", "dropped": 2}
    assert (await api.call("POST", f"{ROOT}/reset", {"queue": "none"})).body["dropped"] == 0
    await push(api, 3)
    assert await ack(api, [*messages, {"id": "nonsense"}]) == ["stale", "stale", "unknown"]
    assert values(await pop(api)) == [3]
    assert (await depth(api))["options"]["maxLength"] == 7


async def test_after_a_crash_of_postgresql_queues_are_declared_and_empty(api: Api, connection: Connection) -> None:
    await configure(api, maxLength=7)
    await push(api, 1)
    messages = await pop(api)
    unlogged = "SELECT relname FROM pg_class WHERE relpersistence = 'u' AND relkind = 'r' AND relname LIKE 'ephemeral%'"
    tables = [row["relname"] for row in await connection.fetch(unlogged)]
    assert len(tables) == 5
    # What recovery does to tables that are not logged.
    for name in tables:
        await connection.execute(f"DELETE FROM queen.{name}")
    assert await ack(api, messages) == ["stale"]
    found = await depth(api)
    assert (found["declared"], found["options"]["maxLength"], found["length"]) == (True, 7, 0)


async def test_requests_for_missing_names_create_nothing(api: Api) -> None:
    assert await pop(api) == []
    assert await ack(api, [{"id": "e:1:p:1"}, {"id": "x"}]) == ["stale", "unknown"]
    assert (await api.call("GET", f"{ROOT}/queues")).body == {"queues": [], "total": 0}


async def test_queues_are_listed_and_deleted(api: Api) -> None:
    await configure(api)
    await push(api, 1, queue="other")
    listed = (await api.call("GET", f"{ROOT}/queues")).body["queues"]
    assert [(one["queue"], one["declared"], one["length"]) for one in listed] == [
        ("inbox", True, 0),
        ("other", False, 1),
    ]
    deleted = [(await api.call("DELETE", f"{ROOT}/queue/{name}")).body for name in ("inbox", "other", "other")]
    assert [(one["deleted"], one["declared"]) for one in deleted] == [(True, True), (True, False), (False, False)]
    missing = await api.call("GET", f"{ROOT}/queues/inbox/depth")
    assert missing.status == 404 and missing.body["code"] == "ephemeral_queue_not_found"
    # A queue of the same name is another thing.
    await api.push("inbox", "durable")
    assert await pop(api) == []


async def test_idle_queues_that_were_not_declared_are_forgotten(api: Api, connection: Connection) -> None:
    await configure(api)
    await push(api, 1)
    await push(api, 1, queue="other")
    # In one transaction: the server does the same from time to time, and must not be the one who finds it.
    async with connection.transaction():
        await connection.execute("UPDATE queen.ephemeral_rings SET used_at = now() - interval '2 h'")
        rows = await connection.fetch(sql("ephemeral_collect"), 3600.0, 10)
    assert [row["queue"] for row in rows] == ["other"]
    assert await connection.fetchval("SELECT count(*) FROM queen.ephemeral_messages") == 1


async def test_what_happens_is_counted(start_server: StartServer) -> None:
    api = await start_server()
    await push(api, 1, 2)
    await ack(api, await pop(api))
    text = (await api.call("GET", "/metrics/prometheus")).body
    for op, outcome in (("push", "ok"), ("pop", "ok"), ("ack", "acked")):
        assert f'queen_ephemeral_messages_total{{op="{op}",outcome="{outcome}"}} 2.0' in text


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("push", {"queue": "", "messages": []}, "queue"),
        ("push", {"queue": "q", "messages": [{"payload": 1, "transactionId": "x"}]}, "transactionId"),
        ("push", {"queue": "q", "messages": [{}]}, "payload"),
        ("push", {"queue": "q", "messages": [], "partition": ""}, "partition"),
        ("configure", {"queue": "q", "options": {"ttlSecond": 1}}, "ttlSecond"),
        ("configure", {"queue": "q", "options": {"ttlSeconds": 0}}, "ttlSeconds"),
        ("configure", {"queue": "q", "options": {"policy": "never"}}, "policy"),
        ("configure", {"queue": "q", "options": {"windowBuffer": {"ms": -1}}}, "ms"),
        ("ack", {"queue": "q", "acks": [{"id": ""}]}, "id"),
        ("ack", {"queue": "q", "acks": [{"id": "e:1:p:1", "status": "perhaps"}]}, "status"),
        ("reset", {}, "queue"),
    ],
)
async def test_bad_requests_are_refused(api: Api, path: str, body: Any, message: str) -> None:
    answer = await api.call("POST", f"{ROOT}/{path}", body)
    assert answer.status == 400 and message in answer.body["error"], answer


async def test_consumers_at_random_lose_nothing_and_double_nothing(api: Api) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}

    async def consume(group: str) -> None:
        while len(seen[group]) < 60:
            for message in await pop(api, group=group, batch=7, wait=True, timeout=200):
                if message["payload"] % 5 == 0 and message["attempts"] == 1:
                    assert await ack(api, [message], "retry", group=group) == ["redelivered"]
                else:
                    seen[group].append(message["payload"])
                    assert await ack(api, [message], group=group) == ["acked"]

    await configure(api)
    for group in seen:
        await pop(api, group=group)
    consumers = [asyncio.create_task(consume(group)) for group in ("a", "a", "b")]
    for n in range(0, 60, 6):
        await push(api, *range(n, n + 6), partition=f"p{n % 4}")
    await asyncio.gather(*consumers)
    assert sorted(seen["a"]) == sorted(seen["b"]) == list(range(60))
    assert (await depth(api))["length"] == 0


async def test_no_pop_waits_longer_than_the_server_allows(start_server: StartServer) -> None:
    api = await start_server(max_wait_ms=1)
    assert await pop(api, wait=True, timeout=3_600_000) == []

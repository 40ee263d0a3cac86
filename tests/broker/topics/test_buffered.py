"""Buffered namespaces: items are in a log on disk when they are answered, and soon in PostgreSQL."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest

from queen.spool.drainer import BreakerState
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.database import Connection
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, b64, item, named, values

BUFFERED: dict[str, Any] = {"namespace_modes": (("ns", "buffered"),)}


@pytest.fixture
async def topics(start_server: StartServer) -> TopicApi:
    return TopicApi(await start_server(**BUFFERED))


async def flushed(topics: TopicApi, count: int, **query: str) -> None:
    """Until so many items are in PostgreSQL."""

    async def stored() -> bool:
        answer = await topics.call("GET", "/counts", namespace=query.get("namespace", "ns"))
        # PostgreSQL may be away at first.
        return answer.status == 200 and count == sum(
            one["ready"] + one["delayed"] + one["leased"] for one in answer.body
        )

    await until(stored)


async def metric(topics: TopicApi, name: str) -> float:
    text = await topics.api.call("GET", "/metrics/prometheus")
    (line,) = (line for line in text.body.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return float(line.rpartition(" ")[2])


async def test_a_buffered_item_is_served_like_any_other(topics: TopicApi) -> None:
    ids = await topics.enqueue(
        item({"a": 1}, priority=5, metadata={"k": "v"}),
        {"namespace": "ns", "topic": "t", "payload": b64(b"\x00\xff"), "priority": 1},
        item("aged", priority=7, deliver_after="2026-01-01T00:00:00Z", ttl=3600),
    )
    assert len(set(ids)) == 3
    await flushed(topics, 3)
    first, second, third = await topics.dequeue()
    assert [first["id"], second["id"], third["id"]] == [ids[1], ids[0], ids[2]]
    assert first["payload"] == b64(b"\x00\xff") and second["data"] == {"a": 1} and second["metadata"] == {"k": "v"}
    assert third["deliver_after"].startswith("2026-01-01T00:00:00") and third["expires_at"] > third["created_at"]
    assert second["expires_at"] is None and second["created_at"] <= second["deliver_after"]
    assert await topics.ack(first, second, third) == [True, True, True]


async def test_a_dequeue_that_waits_is_woken_by_a_flush(topics: TopicApi) -> None:
    waiting = asyncio.create_task(topics.dequeue(wait=True, timeout=30_000))
    await asyncio.sleep(0)
    (id,) = await topics.enqueue(item("x"))
    assert [one["id"] for one in await waiting] == [id]


async def test_items_that_were_enqueued_one_after_the_other_are_served_in_that_order_over_workers(
    start_server: StartServer,
) -> None:
    pair = [TopicApi(await start_server(worker_id=id, num_workers=2, **BUFFERED)) for id in range(2)]
    sent = []
    for number in range(60):
        sent += await pair[number % 2].enqueue(item(number), item(number, priority=1))
    await flushed(pair[0], 120)
    got = await pair[1].dequeue(limit=1000)
    assert [one["id"] for one in got] == sent[::2] + sent[1::2]


async def test_a_delay_counts_from_the_enqueue(topics: TopicApi, connection: Connection) -> None:
    before = await connection.fetchval("SELECT clock_timestamp()")
    await topics.enqueue(item("later", delay=3600), item("now"))
    after = await connection.fetchval("SELECT clock_timestamp()")
    await flushed(topics, 2)
    assert values(await topics.dequeue()) == ["now"]
    due = await connection.fetchval(
        "SELECT deliver_after - interval '1 hour' FROM queen.topic_items WHERE leased_until IS NULL"
    )
    # The two clocks may disagree a little on how long it was.
    assert before - timedelta(milliseconds=50) <= due <= after + timedelta(seconds=5)


async def test_an_item_with_a_key_is_stored_once_however_many_send_it(start_server: StartServer) -> None:
    pair = [TopicApi(await start_server(worker_id=id, num_workers=2, **BUFFERED)) for id in range(2)]
    answers = await asyncio.gather(*(pair[n % 2].enqueue(item(n, idempotency_key="once"), item(n)) for n in range(50)))
    assert len({first for first, _ in answers}) == 1
    assert len({second for _, second in answers}) == 50
    await flushed(pair[0], 51)
    assert (await pair[0].enqueue(item("again", idempotency_key="once")))[0] == answers[0][0]


async def test_the_mode_of_a_namespace_is_set_at_run_time_and_every_worker_heeds_it(start_server: StartServer) -> None:
    pair = [TopicApi(await start_server(worker_id=id, num_workers=2)) for id in range(2)]
    assert await pair[0].good("GET", "/modes") == {}
    answer = await pair[0].good("PUT", "/modes", {"namespace": "ns", "mode": "buffered"})
    assert answer == {"namespace": "ns", "mode": "buffered"}
    assert await pair[1].good("GET", "/modes") == {"ns": "buffered"}
    before = await metric(pair[0], "queen_topic_buffered_items_total")
    await pair[1].enqueue(item(1), item(2))
    await pair[0].enqueue(item(3, namespace="other"))
    assert await metric(pair[0], "queen_topic_buffered_items_total") == before + 2
    await pair[1].good("PUT", "/modes", {"namespace": "ns", "mode": None})
    assert await pair[0].good("GET", "/modes") == {}
    await pair[0].enqueue(item(3))
    assert (await pair[0].counts())["ready"] == 3, "what was buffered before is there first"
    assert await metric(pair[0], "queen_topic_buffered_items_total") == before + 2


async def test_a_request_for_several_namespaces_goes_one_way_as_a_whole(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_modes=(("ns", "buffered"), ("too", "buffered"))))
    await topics.enqueue(item(1), item(2, namespace="other"))
    assert await metric(topics, "queen_topic_buffered_items_total") == 0
    await topics.enqueue(item(1), item(2, namespace="too"))
    assert await metric(topics, "queen_topic_buffered_items_total") == 2
    await flushed(topics, 2)
    await flushed(topics, 1, namespace="too")


async def test_buffered_items_are_taken_while_postgres_is_away_until_the_buffer_is_full(
    start_server: StartServer, proxy: Proxy, connection: Connection
) -> None:
    topics = TopicApi(await start_server(database_urls=(proxy.dsn,), max_buffer_length=10, **BUFFERED))
    await topics.enqueue(item("first"))
    await flushed(topics, 1)
    proxy.refusing = True
    proxy.cut()
    sent = [await topics.enqueue(item(n)) for n in range(10)]
    refused = await topics.call("POST", "/enqueue", item("over"))
    assert refused.status == 503 and refused.headers["Retry-After"] and "MAX_BUFFER_LENGTH" in refused.body["error"]
    assert (await topics.call("POST", "/enqueue", item("x", namespace="other"))).status == 503
    assert (await topics.call("POST", "/enqueue", item("x", idempotency_key="k"))).status == 503
    too_many = await topics.call("POST", "/enqueue", [item(n) for n in range(11)])
    assert too_many.status == 400 and "split" in too_many.body["error"]
    proxy.refusing = False
    await flushed(topics, 11)
    assert [one["id"] for one in await topics.dequeue(limit=100)][1:] == [id for (id,) in sent]
    assert await metric(topics, "queen_topic_backpressure_refusals_total") == 1


async def test_the_breaker_opens_while_postgres_refuses_and_closes_when_it_is_back(
    start_server: StartServer, connection: Connection
) -> None:
    topics = TopicApi(await start_server(**BUFFERED))
    assert await metric(topics, "queen_topic_breaker_state") == BreakerState.CLOSED
    await connection.execute("ALTER TABLE queen.spool_progress RENAME TO elsewhere")
    await topics.enqueue(item("x"))

    async def open_now() -> bool:
        return await metric(topics, "queen_topic_breaker_state") == BreakerState.OPEN

    await until(open_now)
    assert await metric(topics, "queen_topic_buffer_items") == 1
    await topics.enqueue(item("y"))
    await connection.execute("ALTER TABLE queen.elsewhere RENAME TO spool_progress")
    await flushed(topics, 2)
    assert await metric(topics, "queen_topic_breaker_state") == BreakerState.CLOSED
    assert values(await topics.dequeue()) == ["x", "y"]


async def test_what_postgres_refuses_is_set_aside_and_its_neighbours_are_stored(
    topics: TopicApi, connection: Connection
) -> None:
    await topics.configure()
    await connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'poison'; END $$"
    )
    await connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON queen.topic_items FOR EACH ROW"
        " WHEN (new.payload = convert_to('\"poison\"', 'UTF8')) EXECUTE FUNCTION refuse()"
    )
    await topics.enqueue(*(item("poison" if n in (3, 7) else n) for n in range(10)))
    await flushed(topics, 8)
    assert await metric(topics, "queen_topic_wal_failed") == 2
    assert await metric(topics, "queen_topic_buffer_items") == 0
    await topics.enqueue(item("after"))
    await flushed(topics, 9)
    assert values(await topics.dequeue(limit=100)) == [0, 1, 2, 4, 5, 6, 8, 9, "after"]


async def test_what_postgres_refused_is_tried_again_at_the_next_start(
    start_server: StartServer, connection: Connection
) -> None:
    async def start_anew(before: TopicApi | None) -> TopicApi:
        if before is not None and before.api.worker is not None:
            await before.api.worker.stop()
        return TopicApi(await start_server(**BUFFERED))

    topics = await start_anew(None)
    await topics.configure()
    await connection.execute("ALTER TABLE queen.topic_items ADD CONSTRAINT urgent CHECK (priority < 5)")
    await topics.enqueue(item("a", priority=5), item("b", priority=1), item("c", priority=6))
    await flushed(topics, 1)
    topics = await start_anew(topics)
    await topics.enqueue(item("d"))
    await flushed(topics, 2)
    assert await metric(topics, "queen_topic_wal_failed") == 2, "still refused, still there"
    await connection.execute("ALTER TABLE queen.topic_items DROP CONSTRAINT urgent")
    topics = await start_anew(topics)
    await flushed(topics, 4)
    assert values(await topics.dequeue()) == ["d", "b", "a", "c"]

    async def gone() -> bool:
        return await metric(topics, "queen_topic_wal_failed") == 0

    await until(gone)


async def test_purging_and_deleting_a_topic_leave_nothing_behind_that_was_enqueued_before(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(100)))
    assert (await topics.good("POST", "/purge", {"namespace": "ns", "topic": "t"}))["removed"] == 100
    await topics.enqueue(item("x"))
    assert (await topics.good("DELETE", "", namespace="ns", topic="t"))["deleted"]
    await topics.enqueue(item("anew"))
    await flushed(topics, 1)


async def test_a_topic_that_is_deleted_while_its_items_are_flushed_is_made_again(
    topics: TopicApi, connection: Connection
) -> None:
    await topics.enqueue(item(1))
    await flushed(topics, 1)
    await connection.execute("DELETE FROM queen.topics")
    await topics.enqueue(item(2))
    await flushed(topics, 1)
    assert values(await topics.dequeue()) == [2]


async def test_the_quota_of_a_buffered_namespace_holds(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 3),), **BUFFERED))
    await topics.enqueue(item(1), item(2))
    assert (await topics.call("POST", "/enqueue", [item(3), item(4)])).status == 429
    await topics.enqueue(item(3))
    await flushed(topics, 3)


async def test_a_transaction_writes_to_postgres_at_once(topics: TopicApi) -> None:
    await topics.enqueue(item("buffered"))
    await flushed(topics, 1)
    (leased,) = await topics.dequeue()
    operations = [{"type": "ackItem", **named(leased)}, {"type": "enqueue", "items": [item("next")]}]
    answer = await topics.api.call("POST", "/api/v1/transaction", {"operations": operations})
    assert answer.body["success"], answer
    assert values(await topics.dequeue()) == ["next"]


async def test_files_of_the_log_are_removed_once_stored_or_kept_as_long_as_configured(
    start_server: StartServer, connection: Connection
) -> None:
    topics = TopicApi(await start_server(**BUFFERED))
    await topics.enqueue(item(1))
    worker = topics.api.worker
    assert worker is not None
    root = worker.settings.wal_path

    async def removed() -> bool:
        progress = await connection.fetchval("SELECT count(*) FROM queen.spool_progress")
        return not list(root.rglob("*.buf*")) and progress == 0

    await until(removed)


async def test_files_of_the_log_are_kept_as_long_as_asked_for(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(wal_retention=3600, **BUFFERED))
    await topics.enqueue(item(1))
    worker = topics.api.worker
    assert worker is not None
    root = worker.settings.wal_path

    async def put_by() -> bool:
        return [path.parent.name for path in root.rglob("*.buf*")] == ["replayed"]

    await until(put_by)
    assert (await topics.counts())["ready"] == 1


async def test_a_file_of_the_log_that_is_put_back_stores_nothing_twice(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(wal_retention=3600, **BUFFERED))
    await topics.enqueue(item(1), item(2), item(3))
    worker = topics.api.worker
    assert worker is not None
    root = worker.settings.wal_path

    async def put_by() -> bool:
        return bool(list(root.glob("replayed/*.buf")))

    await until(put_by)
    (kept,) = root.glob("replayed/*.buf")
    kept.rename(root / "replayed" / "copy")
    home = root / str(uuid.uuid4())
    home.mkdir()
    (root / "replayed" / "copy").rename(home / kept.name)
    await topics.enqueue(item(4))
    await flushed(topics, 4)
    await until(put_by)
    assert values(await topics.dequeue()) == [1, 2, 3, 4]
    assert await metric(topics, "queen_topic_wal_failed") == 0


async def test_a_busy_namespace_can_be_purged_and_set_to_sync_while_others_go_on_enqueueing(topics: TopicApi) -> None:
    stop = asyncio.Event()

    async def go_on() -> None:
        while not stop.is_set():
            # Something is always buffered, and never more than a slow host can store.
            await topics.enqueue(*(item(n, topic="busy") for n in range(5)))
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(go_on())
        for _ in range(3):
            await topics.enqueue(item("gone"))
            assert (await topics.good("POST", "/purge", {"namespace": "ns", "topic": "t"}))["removed"] == 1
        await topics.good("PUT", "/modes", {"namespace": "ns", "mode": "sync"})
        stop.set()
    assert await topics.dequeue() == []

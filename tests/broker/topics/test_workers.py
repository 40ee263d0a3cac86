"""Several workers, many topics, deep topics: what one does the others know; depth and old transactions cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from queen.storage.database import Database
from tests.conftest import StartServer
from tests.support.ageing import broker_of, until
from tests.support.database import Connection
from tests.support.pausing import pause_after
from tests.support.topic_api import NAMESPACE, TopicApi, item, named, values

Pair = tuple[TopicApi, TopicApi]


@pytest.fixture
async def pair(start_server: StartServer) -> Pair:
    first = TopicApi(await start_server(worker_id=0, num_workers=2, pop_safety_poll_ms=60_000))
    return first, TopicApi(await start_server(worker_id=1, num_workers=2, pop_safety_poll_ms=60_000))


async def test_a_dequeue_that_waits_at_one_is_woken_by_the_other(pair: Pair) -> None:
    here, there = pair
    for number in range(5):
        waiting = asyncio.create_task(there.dequeue(wait=True, timeout=20_000))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(100):
            await here.enqueue(item(number))
            (got,) = await waiting
        assert got["data"] == number
        assert await here.ack(got) == [True]


async def test_a_delay_and_a_nack_at_one_wake_the_other_in_time(pair: Pair) -> None:
    here, there = pair
    await here.configure(backoff_base_ms=200)
    waiting = asyncio.create_task(there.dequeue(wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    await here.enqueue(item("x", delay=0.2))
    async with asyncio.timeout(100):
        (got,) = await waiting
    waiting = asyncio.create_task(there.dequeue(wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.nack(got)
        assert [one["retries"] for one in await waiting] == [1]


async def test_a_lease_of_one_that_lapses_wakes_the_other(pair: Pair) -> None:
    here, there = pair
    await here.enqueue(item("x"))
    (got,) = await here.dequeue(lease=0.4)
    async with asyncio.timeout(100):
        (again,) = await there.dequeue(wait=True, timeout=20_000)
    assert (again["id"], again["retries"]) == (got["id"], 1)


async def test_options_and_quotas_set_at_one_hold_at_the_other_at_once(pair: Pair) -> None:
    here, there = pair
    await there.enqueue(item("x"))
    await here.configure(at_most_once=True)
    assert len(await there.dequeue()) == 1
    assert (await here.counts())["leased"] == 0
    await here.good("PUT", "/quotas", {"namespace": NAMESPACE, "per_minute": 3})
    answer = await there.call("POST", "/enqueue", [item(n) for n in range(2)])
    assert answer.status == 200
    answer = await there.call("POST", "/enqueue", [item(n) for n in range(2)])
    assert answer.status == 429


async def test_a_quota_that_is_set_while_the_other_reads_them_holds_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    quotas = broker_of(there.api).topics.quotas
    read, go_on = pause_after(monkeypatch, quotas._database, "fetch", "topic_quotas")
    reading = asyncio.create_task(quotas.refresh())
    await read.wait()
    await here.good("PUT", "/quotas", {"namespace": NAMESPACE, "per_minute": 1})
    broker_of(there.api).notifications.drain()
    go_on.set()
    await reading
    assert (await there.call("POST", "/enqueue", [item(1), item(2)])).status == 400


async def test_a_dequeue_that_is_about_to_wait_is_woken_by_wake_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.configure()
    dequeuer = broker_of(there.api).topics.dequeuer
    read, go_on = pause_after(monkeypatch, dequeuer._link, "fetch", "topic_next_due")
    waiting = asyncio.create_task(there.dequeue(wait=True, timeout=60_000))
    await read.wait()
    be_silent(here, monkeypatch)
    await here.enqueue(item(1))
    dequeuer.wake_all()
    go_on.set()
    async with asyncio.timeout(30):
        assert values(await waiting) == [1]


async def test_a_dequeue_of_several_topics_in_a_search_is_woken_by_wake_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.configure()
    dequeuer = broker_of(there.api).topics.multi_dequeuer
    query = {"namespace": NAMESPACE, "limit": 1, "wait": True, "timeout": 60_000}
    first = asyncio.create_task(there.good("GET", "/dequeue/many", **query))
    await until(lambda: len(dequeuer.waiting))
    read, go_on = pause_after(monkeypatch, dequeuer._link, "fetch", "topic_due")
    with monkeypatch.context() as at_once:
        at_once.setattr(dequeuer, "_poll_seconds", 0.0)
        second = asyncio.create_task(there.good("GET", "/dequeue/many", **query))
        await read.wait()
    be_silent(here, monkeypatch)
    await here.enqueue(item(1), item(2))
    dequeuer.wake_all()
    go_on.set()
    async with asyncio.timeout(30):
        assert sorted(values([*await first, *await second])) == [1, 2]


def be_silent(topics: TopicApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it sends no notifications."""
    monkeypatch.setattr(broker_of(topics.api).notifications.bus, "send", lambda datagram: None)


async def test_workers_that_consume_together_are_given_each_item_once_and_urgent_ones_first(pair: Pair) -> None:
    count = 3000
    for start in range(0, count, 500):
        await pair[start // 500 % 2].enqueue(*(item(n, priority=n % 3) for n in range(start, start + 500)))
    given: list[tuple[int, int]] = []

    async def consume(topics: TopicApi) -> None:
        while got := await topics.dequeue(37):
            assert [one["priority"] for one in got] == sorted(one["priority"] for one in got)
            given.extend((one["priority"], one["data"]) for one in got)
            assert all(await topics.ack(*got))

    await asyncio.gather(*(consume(topics) for topics in pair * 4))
    assert Counter(data for _, data in given) == Counter(range(count))
    assert await pair[0].counts() == {"ready": 0, "delayed": 0, "leased": 0, "dead": 0}


async def test_a_thousand_topics_are_served_side_by_side(pair: Pair) -> None:
    names = [f"topic-{n}" for n in range(1000)]
    await pair[0].enqueue(*(item(name, topic=name) for name in names))
    served = await asyncio.gather(*(pair[n % 2].dequeue(topic=name) for n, name in enumerate(names)))
    assert [values(items) for items in served] == [[name] for name in names]
    refs = [named(items[0]) for items in served]
    assert all(one["success"] for one in await pair[1].good("POST", "/ack", refs))
    assert await pair[0].good("GET", "", namespace=NAMESPACE) == []


async def test_one_bad_request_does_not_fail_those_it_is_fused_with(pair: Pair) -> None:
    good = [pair[0].call("POST", "/enqueue", [item(n)]) for n in range(20)]
    bad = [pair[0].call("POST", "/enqueue", [item(n), item(n, priority="high")]) for n in range(20)]
    asked = [call for both in zip(good, bad, strict=True) for call in both]
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 400] * 20
    assert (await pair[0].counts())["ready"] == 20


async def test_what_was_consumed_is_not_stepped_over_again_while_an_old_transaction_runs(
    pair: Pair, connection: Connection, dsn: str
) -> None:
    topics = pair[0]
    old = connection.transaction(isolation="repeatable_read")
    await old.start()
    await connection.fetch("SELECT FROM queen.topics")
    for start in range(0, 12_000, 2000):
        await topics.enqueue(*(item(n) for n in range(start, start + 2000)))
    for _ in range(10):
        await topics.ack(*await topics.dequeue(1000))
    hot = await Database(dsn).connect()
    try:
        buffers = await _claim_buffers(hot)
    finally:
        await hot.close()
        await old.rollback()
    # Without heads it would look at each of the 10 000 that are gone: they cannot be removed while `old` runs.
    assert buffers < 5000
    assert len(await topics.dequeue(5000)) == 2000


async def _claim_buffers(hot: Connection) -> int:
    """Pages that the next dequeue would read to find its items."""
    sql = Database("").statements["topic_claim"]
    transaction = hot.transaction()
    await transaction.start()
    await hot.execute(
        f"PREPARE claim (int[], bigint[], bigint[], bigint[], float8[], text[], boolean, bigint) AS {sql}"
    )
    text = await hot.fetchval(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE claim ('{1}', '{10}', '{0}', '{0}', '{30}', '{o}', false, 999)"
    )
    await transaction.rollback()
    (scan,) = (
        node for node in _nodes(msgspec.json.decode(text)[0]["Plan"]) if node.get("Index Name") == "topic_items_ready"
    )
    assert scan["Actual Rows"] == 10
    hit, read = scan["Shared Hit Blocks"], scan["Shared Read Blocks"]
    return int(hit + read)


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for below in plan.get("Plans", ()) for node in _nodes(below))]


async def test_heads_of_priorities_that_are_not_used_any_more_go(pair: Pair, connection: Connection) -> None:
    topics = pair[0]
    await topics.enqueue(*(item(n, priority=n) for n in range(900)))
    await topics.ack(*await topics.dequeue(800))
    assert topics.api.worker is not None
    parts = topics.api.worker.broker.topics
    topic = await parts.catalog.one((NAMESPACE, "t"))
    assert topic is not None
    await parts.heads.advance(topic.id)
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_heads") == 900
    await connection.execute("UPDATE queen.topic_heads SET head = head - interval '20 minutes'")
    await parts.heads.advance(topic.id)
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_heads") == 100
    await topics.enqueue(item("back", priority=5))
    assert values(await topics.dequeue(1000)) == ["back", *range(800, 900)]


async def test_what_is_done_with_items_is_counted_over_all_workers(pair: Pair) -> None:
    here, there = pair
    await here.configure(max_retries=0)
    await here.enqueue(*(item(n) for n in range(5)), item(5, idempotency_key="k"), item(6, idempotency_key="k"))
    got = await there.dequeue(4)
    await here.ack(*got[:3])
    await there.nack(got[3])
    assert here.api.worker is not None and there.api.worker is not None
    counted = Counter(here.api.worker.recorder.report().topics) + Counter(there.api.worker.recorder.report().topics)
    assert {label.split("\n")[0]: count for label, count in counted.items()} == {
        "enqueued": 6,
        "dequeued": 4,
        "acked": 3,
        "nacked": 1,
        "dead": 1,
    }
    scraped = (await here.api.call("GET", "/metrics/prometheus")).body
    assert f'queen_topic_items_total{{namespace="{NAMESPACE}",op="enqueued",topic="t"}} 6.0' in scraped


@pytest.mark.parametrize("node", [-1, 5])
async def test_workers_make_ids_of_different_nodes(start_server: StartServer, node: int) -> None:
    servers = [TopicApi(await start_server(worker_id=id, num_workers=3, mqueue_node_id=node)) for id in range(3)]
    ids = [id for topics in servers for id in await topics.enqueue(item("x"), item("y"))]
    nodes = [id >> 12 & 1023 for id in ids]
    assert len(set(nodes)) == 3
    if node == 5:
        assert nodes == [5, 5, 6, 6, 7, 7]

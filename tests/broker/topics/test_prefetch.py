"""Ready queues: what consumers of hot topics see is what they would see without them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from queen.broker.maintenance.election import Session
from queen.broker.topics import prefetching
from queen.broker.topics.jobs import free_prefetched
from queen.broker.topics.prefetch import PrefetchBuffers
from queen.broker.topics.topics import Topics
from queen.storage.database import Database
from tests.conftest import StartServer
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.pausing import pause_after
from tests.support.topic_api import NAMESPACE, TOPIC, TopicApi, item, values

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
StartTopics = Callable[..., Awaitable[TopicApi]]


def inside(topics: TopicApi) -> Topics:
    assert topics.api.worker is not None
    return topics.api.worker.broker.topics


def buffers(topics: TopicApi) -> PrefetchBuffers:
    found = inside(topics).prefetch
    assert found is not None
    return found


async def heat(topics: TopicApi) -> None:
    """Give the topic a ready queue, as many dequeues in a second would, and fill it."""
    part = inside(topics)
    topic = await part.catalog.one((NAMESPACE, TOPIC))
    assert topic is not None

    async def opened() -> bool:
        return topic.id in buffers(topics).by_topic or await buffers(topics).open(topic)

    await until(opened)
    await buffers(topics).fill(buffers(topics).by_topic[topic.id])


def depth(topics: TopicApi) -> int:
    return sum(buffer.depth for buffer in buffers(topics).by_topic.values())


@pytest.fixture(params=["memory", "redis"])
async def start_topics(
    request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Path
) -> AsyncIterator[StartTopics]:
    """Starts servers that keep their ready queues in memory, or in the same Redis."""
    server = RedisServer(tmp_path / "redis")
    settings: dict[str, object] = {"topic_ready_queues": "on"}
    if request.param == "redis":
        await server.start()
        settings |= {"redis_addrs": server.address, "redis_timeout_ms": 5000}

    async def start(worker_id: int = 0, **more: object) -> TopicApi:
        if request.param == "memory":
            # Workers of one host have no ready queues in memory; those of several hosts, one each, do.
            more["num_workers"] = 1
        api: Api = await start_server(worker_id, **(settings | more))
        return TopicApi(api)

    yield start
    await server.kill()


@pytest.fixture
async def topics(start_topics: StartTopics) -> TopicApi:
    return await start_topics()


async def test_items_are_handed_out_in_order_and_acked(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(50)))
    await heat(topics)
    assert depth(topics) == 50
    first = await topics.dequeue(limit=20)
    assert (values(first), depth(topics)) == (list(range(20)), 30)
    assert all(one["status"] == "leased" and one["lease_owner"] and one["lease_expires_at"] for one in first)
    assert (await topics.counts()) == {"ready": 30, "delayed": 0, "leased": 20, "dead": 0}
    (same,) = await topics.good("GET", "/priorities", namespace=NAMESPACE, topic=TOPIC)
    assert same == {"priority": 0, "ready": 30, "delayed": 0, "leased": 20}
    assert await topics.ack(*first) == [True] * 20
    assert await topics.ack(*first[:1]) == [False]
    assert values(await topics.dequeue(limit=100)) == list(range(20, 50))
    assert await topics.dequeue() == []


async def test_a_later_more_urgent_item_overtakes_what_was_prefetched(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n, priority=5) for n in range(10)))
    await heat(topics)
    await topics.enqueue(item("urgent", priority=1), item("idle", priority=9))
    assert values(await topics.dequeue(limit=3)) == ["urgent", 0, 1]
    await topics.enqueue(item("most", priority=-1))
    assert values(await topics.dequeue(limit=20)) == ["most", *range(2, 10), "idle"]


async def test_more_urgent_items_than_are_missing_in_the_queue_overtake(start_topics: StartTopics) -> None:
    topics = await start_topics(topic_ready_items=10)
    await topics.enqueue(*(item(n, priority=5) for n in range(20)))
    await heat(topics)
    assert depth(topics) == 10
    await topics.enqueue(*(item(n, priority=1) for n in range(100, 115)))
    assert values(await topics.dequeue(limit=12)) == list(range(100, 112))
    assert values(await topics.dequeue(limit=50)) == [112, 113, 114, *range(20)]


async def test_what_another_server_enqueues_overtakes_too(start_topics: StartTopics) -> None:
    here, there = await start_topics(0, num_workers=2), await start_topics(1, num_workers=2)
    await here.enqueue(*(item(n, priority=5) for n in range(5)))
    await heat(here)
    await there.enqueue(item("urgent"))
    assert values(await here.dequeue(limit=2)) == ["urgent", 0]


async def test_another_worker_sees_the_same_order(start_topics: StartTopics) -> None:
    here, there = await start_topics(0, num_workers=2), await start_topics(1, num_workers=2)
    await here.enqueue(*(item(n) for n in range(20)))
    await heat(here)
    assert values(await there.dequeue(limit=5)) == list(range(5))
    assert values(await here.dequeue(limit=5)) == list(range(5, 10))
    assert values(await there.dequeue(limit=50)) == list(range(10, 20))


async def test_a_delayed_item_that_becomes_due_overtakes(topics: TopicApi, connection: Connection) -> None:
    await topics.enqueue(*(item(n, priority=5) for n in range(5)), item("due", delay=0.5))
    await heat(topics)

    async def due() -> bool:
        query = "SELECT deliver_after <= clock_timestamp() FROM queen.topic_items WHERE priority = 0"
        return bool(await connection.fetchval(query))

    await until(due)
    assert values(await topics.dequeue(limit=2)) == ["due", 0]


async def test_a_nacked_item_waits_and_comes_again_in_its_place(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(5)))
    await topics.configure(backoff_base_ms=0)
    await heat(topics)
    (first,) = await topics.dequeue(limit=1)
    (result,) = await topics.nack(first)
    assert result["success"]
    again = await topics.dequeue(limit=10)
    assert sorted(values(again)) == [0, 1, 2, 3, 4]
    assert {one["data"]: one["retries"] for one in again} == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}


async def test_a_lease_begins_when_the_item_is_handed_out_and_lapses_with_a_retry(topics: TopicApi) -> None:
    await topics.enqueue(item("a"), item("b"))
    await heat(topics)
    (first,) = await topics.dequeue(limit=1, lease=2)
    (again,) = await topics.dequeue(limit=1, wait=True, timeout=60000)
    # The other item was there all the time, so it is served while the first is leased.
    assert (again["data"], again["retries"]) == ("b", 0)
    (again,) = await topics.dequeue(limit=1, wait=True, timeout=60000)
    assert (again["data"], again["retries"]) == ("a", 1)
    assert await topics.ack(first | {"lease_owner": "x"}) == [True]


async def test_a_lease_can_be_extended(topics: TopicApi) -> None:
    await topics.enqueue(item("a"))
    await heat(topics)
    (first,) = await topics.dequeue(limit=1, lease=30)
    body = [{"id": first["id"], "namespace": NAMESPACE, "topic": TOPIC, "seconds": 3000}]
    (extended,) = await topics.good("POST", "/extend", body)
    assert extended["success"] and extended["lease_expires_at"] > first["lease_expires_at"]


async def test_an_item_that_waits_in_the_ready_queue_cannot_be_acked(topics: TopicApi) -> None:
    ids = await topics.enqueue(item("a"), item("b"))
    await heat(topics)
    assert await topics.ack({"id": ids[0], "namespace": NAMESPACE, "topic": TOPIC}) == [False]
    body = [{"id": ids[0], "namespace": NAMESPACE, "topic": TOPIC, "seconds": 3000}]
    assert [one["success"] for one in await topics.good("POST", "/extend", body)] == [False]
    assert values(await topics.dequeue()) == ["a", "b"]


async def test_peek_shows_what_waits_and_purge_removes_it(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(4)))
    await heat(topics)
    await topics.dequeue(limit=1)
    await topics.enqueue(item("urgent", priority=-1))
    peeked: list[dict[str, Any]] = await topics.good("GET", "/peek", namespace=NAMESPACE, topic=TOPIC)
    assert values(peeked) == ["urgent", 1, 2, 3]
    assert {one["status"] for one in peeked} == {"ready"}
    purged = await topics.good("POST", "/purge", {"namespace": NAMESPACE, "topic": TOPIC})
    assert purged["removed"] == 5
    assert await topics.dequeue() == []
    await topics.enqueue(item("new"))
    assert values(await topics.dequeue()) == ["new"]


async def test_a_purge_of_what_waits_leaves_the_items_that_consumers_have(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(4)))
    await heat(topics)
    (got,) = await topics.dequeue(limit=1)
    body = {"namespace": NAMESPACE, "topic": TOPIC, "leased": False}
    assert (await topics.good("POST", "/purge", body))["removed"] == 3
    assert await topics.ack({"id": got["id"], "namespace": NAMESPACE, "topic": TOPIC}) == [True]
    assert await topics.dequeue() == []


async def test_at_most_once_items_are_gone_once_handed_out(topics: TopicApi, connection: Connection) -> None:
    await topics.enqueue(*(item(n) for n in range(3)))
    await topics.configure(at_most_once=True)
    await heat(topics)
    assert values(await topics.dequeue(limit=2)) == [0, 1]
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items") == 1


async def test_an_item_past_its_time_is_not_handed_out(topics: TopicApi, connection: Connection) -> None:
    await topics.enqueue(item("old", ttl=3600), item("young"))
    # Known in advance: on a slow machine the item may be removed before it is looked for.
    expires_at = await connection.fetchval(
        "UPDATE queen.topic_items SET expires_at = clock_timestamp() + interval '1 s' WHERE expires_at IS NOT NULL"
        " RETURNING expires_at"
    )
    await heat(topics)

    async def past() -> bool:
        return bool(await connection.fetchval("SELECT clock_timestamp() >= $1", expires_at))

    await until(past)
    assert values(await topics.dequeue()) == ["young"]


async def test_large_payloads_stay_in_postgresql_until_they_are_handed_out(topics: TopicApi) -> None:
    large = "x" * 100_000
    await topics.enqueue(item(large), item("small"))
    await heat(topics)
    (buffer,) = buffers(topics).by_topic.values()
    turn = await buffers(topics)._queue.begin(buffer.topic.id, buffer.token, 10)
    assert [one.whole for one in turn.items] == [False, True]
    assert max(len(one.rendered) for one in turn.items) < 1000
    await buffers(topics)._queue.end(buffer.topic.id, buffer.token, turn.number, 0, [])
    assert values(await topics.dequeue()) == [large, "small"]


async def test_a_dequeue_of_large_items_ends_where_an_answer_does(start_topics: StartTopics) -> None:
    """What does not fit stays in the buffer, and comes next; nothing is lost, and nothing twice."""
    topics = await start_topics(max_answer_bytes=250_000)
    sent = [f"{number:03}" + "x" * 100_000 for number in range(6)]
    await topics.enqueue(*(item(text) for text in sent))
    await heat(topics)
    received: list[Any] = []
    sizes = []
    while len(received) < len(sent):
        some = values(await topics.dequeue(limit=10))
        sizes.append(len(some))
        received += some
    assert received == sent
    assert max(sizes) == 2
    # One that is larger than all of it comes alone.
    await topics.enqueue(item("y" * 400_000), item("z"))
    await heat(topics)
    assert [len(text) for text in values(await topics.dequeue(limit=10))] == [400_000]
    assert values(await topics.dequeue(limit=10)) == ["z"]


async def test_waiting_dequeues_share_what_fits_and_the_others_come_next(start_topics: StartTopics) -> None:
    topics = await start_topics(max_answer_bytes=250_000)
    await topics.enqueue(item("first"))
    await heat(topics)
    assert values(await topics.dequeue()) == ["first"]
    waiting = [asyncio.create_task(topics.dequeue(limit=1, wait=True, timeout=30_000)) for _ in range(5)]
    await until(lambda: len(inside(topics).dequeuer.waiting) == 5)
    await topics.enqueue(*(item(f"{number}" + "x" * 100_000) for number in range(5)))
    async with asyncio.timeout(100):
        found = [values(some)[0][0] for some in await asyncio.gather(*waiting)]
    assert sorted(found) == ["0", "1", "2", "3", "4"]


async def test_metadata_counts_and_stays_in_postgresql_with_its_payload(start_topics: StartTopics) -> None:
    topics = await start_topics(max_answer_bytes=250_000)
    large = {"why": "m" * 60_000}
    await topics.enqueue(*(item("x" * 50_000, metadata=large) for _ in range(4)), item("small", metadata={"a": 1}))
    await heat(topics)
    (buffer,) = buffers(topics).by_topic.values()
    turn = await buffers(topics)._queue.begin(buffer.topic.id, buffer.token, 10)
    assert max(len(one.rendered) for one in turn.items) < 1000
    await buffers(topics)._queue.end(buffer.topic.id, buffer.token, turn.number, 0, [])
    for expected in ([large, large], [large, large, {"a": 1}]):
        some = await topics.dequeue(limit=10)
        assert [len(one["metadata"]["why"]) if "why" in one["metadata"] else 1 for one in some] == [
            len(each["why"]) if each is large else 1 for each in expected
        ]


async def test_buffers_in_memory_have_a_limit_together(start_server: StartServer) -> None:
    """What does not fit is leased from PostgreSQL when it is asked for."""
    api = await start_server(topic_ready_queues="on", num_workers=1, max_answer_bytes=1_000_000)
    topics = TopicApi(api)
    await topics.enqueue(*(item(f"{number:03}" + "x" * 3_500) for number in range(1000)))
    await heat(topics)
    queue = buffers(topics)._queue
    assert 100 < depth(topics) < 1000
    assert queue.nbytes < 1_000_000
    received: list[Any] = []
    while some := values(await topics.dequeue(limit=50)):
        received += some
        assert queue.nbytes < 1_500_000
    assert [text[:3] for text in received] == [f"{number:03}" for number in range(1000)]
    (buffer,) = buffers(topics).by_topic.values()
    await buffers(topics).recall(buffer.topic, buffer.token, 0.0)
    assert queue.nbytes == 0


async def test_a_stopped_server_gives_back_what_it_has_prefetched(
    topics: TopicApi, start_server: StartServer, connection: Connection
) -> None:
    await topics.enqueue(*(item(n) for n in range(10)))
    await heat(topics)
    assert topics.api.worker is not None
    await topics.api.worker.broker.topics.stop()
    other = TopicApi(await start_server())
    again = await other.dequeue(limit=10)
    assert values(again) == list(range(10))
    assert {one["retries"] for one in again} == {0}


async def test_a_ready_queue_of_a_dead_server_is_taken_over_in_order_and_without_retries(
    topics: TopicApi, start_server: StartServer, connection: Connection
) -> None:
    await topics.enqueue(*(item(n) for n in range(10)))
    await heat(topics)
    first = await topics.dequeue(limit=2)
    assert topics.api.worker is not None
    # What a killed server leaves behind: its queue, and nobody who renews its lease.
    daemon = inside(topics)._lease_daemon
    assert daemon is not None
    await daemon.stop()
    buffers(topics).by_topic.clear()
    await connection.execute("UPDATE queen.topic_ready SET until = now() - interval '1 s'")
    other = TopicApi(await start_server(topic_ready_queues="on"))
    again: list[dict[str, Any]] = []

    async def all_again() -> bool:
        # Its maintenance may have ended the queue already, and be about to free the items.
        again.extend(await other.dequeue(limit=20))
        return len(again) >= 8

    await until(all_again)
    assert values(again) == list(range(2, 10))
    assert {one["retries"] for one in again} == {0}
    assert await other.ack(*first, *again) == [True] * 10


async def test_items_that_are_in_no_ready_queue_are_freed(topics: TopicApi, connection: Connection, dsn: str) -> None:
    await topics.enqueue(*(item(n) for n in range(3)))
    # The server does the same now and then: it may come first.
    await connection.execute("UPDATE queen.topic_items SET leased_until = 'infinity'")
    database = Database(dsn)
    session = await Session.open(database)
    await free_prefetched(session)
    await session.close()
    await database.close()
    assert values(await topics.dequeue()) == [0, 1, 2]


async def test_a_server_that_was_paused_hands_nothing_out_that_others_have(
    topics: TopicApi, start_server: StartServer, connection: Connection
) -> None:
    await topics.enqueue(*(item(n) for n in range(10)))
    await heat(topics)
    await connection.execute("UPDATE queen.topic_ready SET until = now() - interval '1 s'")
    other = TopicApi(await start_server(topic_ready_queues="on"))
    first: list[Any] = []
    while not first:
        # Nothing is found at the moment in which the first server itself closes the buffer.
        first = values(await other.dequeue(limit=4))
    assert first == [0, 1, 2, 3]
    assert values(await topics.dequeue(limit=20)) == [4, 5, 6, 7, 8, 9]


async def test_a_dequeue_that_is_about_to_wait_while_its_topic_gets_a_buffer_is_woken(
    topics: TopicApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    await topics.configure()
    # Nor is it woken when the buffer is closed.
    monkeypatch.setattr(prefetching, "_IDLE_SECONDS", math.inf)
    read, go_on = pause_after(monkeypatch, inside(topics).dequeuer._link, "fetch", "topic_next_due")
    waiting = asyncio.create_task(topics.dequeue(limit=1, wait=True, timeout=60_000))
    await read.wait()
    await topics.enqueue(item(1), item(2))
    await heat(topics)
    assert values(await topics.dequeue(limit=1)) == [1]
    go_on.set()
    async with asyncio.timeout(30):
        assert values(await waiting) == [2]


async def test_many_dequeues_in_a_second_make_a_topic_hot(topics: TopicApi) -> None:
    await topics.enqueue(*(item(n) for n in range(2000)))
    seen: list[int] = []

    async def hot() -> bool:
        batches = await asyncio.gather(*(topics.dequeue(limit=1) for _ in range(50)))
        seen.extend(one["data"] for batch in batches for one in batch)
        return buffers(topics).stats.handed_out > 0

    await until(hot)
    rest = await topics.dequeue(limit=5000)
    assert sorted(seen + values(rest)) == list(range(2000))
    assert values(rest) == sorted(values(rest))


async def test_concurrent_consumers_on_two_workers_get_everything_once_and_in_order(start_topics: StartTopics) -> None:
    servers = [await start_topics(n, num_workers=2) for n in range(2)]
    await servers[0].enqueue(*(item(n, priority=n % 3) for n in range(1500)))
    await heat(servers[0])
    seen: list[Any] = []

    async def consume(topics: TopicApi) -> None:
        last: tuple[int, str, int] | None = None
        while some := await topics.dequeue(limit=20):
            places = [(one["priority"], one["deliver_after"], one["id"]) for one in some]
            assert places == sorted(places)
            # All were there from the beginning, so what one consumer sees never goes back.
            assert last is None or last < places[0]
            last = places[-1]
            seen.extend(values(some))
            assert all(await topics.ack(*some))

    await asyncio.gather(*(consume(servers[n % 2]) for n in range(6)))
    assert sorted(seen) == list(range(1500))


async def test_a_server_without_ready_queues_frees_what_one_with_them_left_behind(
    topics: TopicApi, start_server: StartServer, connection: Connection, dsn: str
) -> None:
    await topics.enqueue(*(item(n) for n in range(5)))
    await heat(topics)
    daemon = inside(topics)._lease_daemon
    assert daemon is not None
    await daemon.stop()
    buffers(topics).by_topic.clear()
    await connection.execute("UPDATE queen.topic_ready SET until = now() - interval '1 s'")
    plain = TopicApi(await start_server())
    assert inside(plain).prefetch is None
    session = await Session.open(database := Database(dsn))
    await free_prefetched(session)
    await session.close()
    await database.close()
    assert values(await plain.dequeue()) == [0, 1, 2, 3, 4]

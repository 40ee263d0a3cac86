"""Buffered namespaces over two shards: each has a log of its own; what waits for a topic that moves goes with it."""

from __future__ import annotations

from queen.wire.shards import Name
from tests.broker.sharding.names import topic_on
from tests.broker.sharding.test_moving import move
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, item, values

BUFFERED = (("ns", "buffered"),)


async def served(topics: TopicApi, topic: str, count: int) -> list[object]:
    """What a topic holds, as soon as that is so much."""
    got: list[object] = []

    async def all_given() -> bool:
        answer = await topics.call("GET", "/dequeue", namespace="ns", topic=topic, limit=100)
        if answer.status == 200:
            got.extend(values(answer.body))
        return len(got) >= count

    await until(all_given)
    return got


async def test_every_shard_has_its_log_and_the_mode_holds_for_all(topics: TopicApi) -> None:
    assert await topics.good("PUT", "/modes", {"namespace": "ns", "mode": "buffered"}) == {
        "namespace": "ns",
        "mode": "buffered",
    }
    assert await topics.good("GET", "/modes") == {"ns": "buffered"}
    first, second = topic_on(0), topic_on(1)
    await topics.enqueue(item(1, first), item(2, second), item(3, first))
    assert await served(topics, first, 2) == [1, 3]
    assert await served(topics, second, 1) == [2]
    worker = topics.api.worker
    assert worker is not None
    assert [broker.topics.wal.state.spooled for broker in worker.brokers] == [2, 1]
    scraped = (await topics.api.call("GET", "/metrics/prometheus")).body
    assert "queen_topic_buffered_items_total 3.0" in scraped
    assert 'queen_topic_breaker_state{shard="1"} 0.0' in scraped
    assert (await topics.good("PUT", "/modes", {"namespace": "ns", "mode": None}))["mode"] == "sync"
    await topics.enqueue(item(4, second))
    assert worker.brokers[1].topics.wal.state.spooled == 1


async def test_a_dead_shard_keeps_only_its_own_items_waiting(
    start_server: StartServer, dsn: str, second_proxy: Proxy
) -> None:
    topics = TopicApi(
        await start_server(database_urls=(dsn, second_proxy.dsn), namespace_modes=BUFFERED, db_away_ms=500)
    )
    first, second = topic_on(0), topic_on(1)
    await topics.enqueue(item(0, first), item(0, second))
    assert await served(topics, first, 1) == [0]
    assert await served(topics, second, 1) == [0]
    async with second_proxy.away():
        await topics.enqueue(item(1, second))
        await topics.enqueue(item(1, first))
        assert await served(topics, first, 1) == [1]
    assert await served(topics, second, 1) == [1]


async def test_what_waits_in_the_log_for_a_topic_that_has_moved_is_stored_where_it_is_now(
    start_server: StartServer, proxy: Proxy, dsns: tuple[str, str]
) -> None:
    topics = TopicApi(await start_server(database_urls=(proxy.dsn, dsns[1]), namespace_modes=BUFFERED, db_away_ms=500))
    moving, staying = topic_on(0), topic_on(0, prefix="stays")
    await topics.enqueue(item("before", moving), item("before", staying))
    assert await served(topics, moving, 1) == ["before"]
    assert await served(topics, staying, 1) == ["before"]
    async with proxy.away():
        for number in range(3):
            await topics.enqueue(item(number, moving))
            await topics.enqueue(item(number, staying))
        assert await move(dsns, Name.topic("ns", moving), 1)
    assert await served(topics, staying, 3) == [0, 1, 2]
    assert sorted(map(str, await served(topics, moving, 3))) == ["0", "1", "2"]
    worker = topics.api.worker
    assert worker is not None
    assert worker.broker.topics.wal.failed.count()[0] == 0


async def test_with_all_shards_unavailable_a_new_topic_is_buffered_as_with_one_shard(
    start_server: StartServer, proxy: Proxy, second_proxy: Proxy
) -> None:
    topics = TopicApi(
        await start_server(database_urls=(proxy.dsn, second_proxy.dsn), namespace_modes=BUFFERED, db_away_ms=500)
    )
    worker = topics.api.worker
    assert worker is not None

    async def all_away() -> bool:
        return all(broker.database.availability.down for broker in worker.brokers)

    async with proxy.away(), second_proxy.away():
        await until(all_away)
        await topics.enqueue(item(0, topic_on(0)), item(1, topic_on(1)))
        await topics.enqueue(item(2, topic_on(1)))
    assert await served(topics, topic_on(0), 1) == [0]
    assert await served(topics, topic_on(1), 2) == [1, 2]

"""Quotas of namespaces whose topics are on two shards: each item counts once, on the home shard of the namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.sharding.names import namespace_on, topic_on
from tests.conftest import StartServer
from tests.redis.redis_server import RedisServer
from tests.support.topic_api import TopicApi, item


@pytest.fixture(params=["postgres", "redis"])
async def counting(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, object]]:
    """Settings with which quotas are counted in PostgreSQL, or in Redis."""
    if request.param == "postgres":
        yield {}
        return
    server = RedisServer(tmp_path / "redis")
    await server.start()
    yield {"redis_addrs": server.address, "redis_timeout_ms": 5000}
    await server.kill()


async def admitted(topics: TopicApi, names: list[str], most: int, namespace: str = "ns") -> int:
    """How many items are accepted, one by one over the topics, until one is refused."""
    for count in range(most):
        answer = await topics.call("POST", "/enqueue", item(count, names[count % len(names)], namespace))
        if answer.status != 200:
            assert answer.status == 429, answer
            return count
    return most


async def test_a_quota_admits_exactly_as_many_whichever_shards_the_topics_are_on(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("ns", 20),), **counting))
    assert await admitted(topics, [topic_on(0), topic_on(1)], 30) == 20


async def test_one_request_over_both_shards_counts_once(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("ns", 20),), **counting))
    both = [item(number, topic_on(number % 2)) for number in range(10)]
    await topics.enqueue(*both)
    await topics.enqueue(*both)
    assert (await topics.call("POST", "/enqueue", both[:1])).status == 429


async def test_a_request_refused_for_one_namespace_uses_up_no_quota_of_another(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    open_, full = namespace_on(0), namespace_on(1)
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=((open_, 10), (full, 1)), **counting))
    await topics.enqueue(item(0, topic_on(1, full), full))
    both = [item(number, topic_on(0, open_), open_) for number in range(5)] + [item(1, topic_on(1, full), full)]
    for _ in range(3):
        assert (await topics.call("POST", "/enqueue", both)).status == 429
    assert await admitted(topics, [topic_on(0, open_)], 20, open_) == 10


async def test_a_quota_that_is_set_holds_on_every_shard_at_once(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("ns", 2),), **counting))
    for topic in (topic_on(0), topic_on(1)):
        await topics.enqueue(item(0, topic))
        assert (await topics.call("POST", "/enqueue", [item(number, topic) for number in range(9)])).status == 400
    await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": 30})
    assert await topics.good("GET", "/quotas") == {"ns": 30}
    assert await admitted(topics, [topic_on(0)], 14) == 14
    assert await admitted(topics, [topic_on(1)], 30) == 14


async def test_the_default_quota_holds_for_namespaces_of_every_shard(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("default", 6),), **counting))
    assert await admitted(topics, [topic_on(0), topic_on(1)], 30) == 6


async def test_a_default_quota_that_is_set_holds_for_namespaces_of_every_shard(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("default", 20),), **counting))
    for limit, want in ((4, 4), (7, 7), (None, 20)):
        await topics.good("PUT", "/quotas", {"namespace": "default", "per_minute": limit})
        for shard in (0, 1):
            namespace = namespace_on(shard, f"limit{want}-")
            assert await admitted(topics, [topic_on(0), topic_on(1)], 30, namespace) == want, (shard, limit)


async def test_the_list_of_namespaces_shows_the_quota_that_counts(
    start_server: StartServer, dsns: tuple[str, str], counting: dict[str, object]
) -> None:
    api = await start_server(database_urls=dsns, namespace_quotas=(("default", 100), ("a", 50)), **counting)
    topics = TopicApi(api)
    await topics.enqueue(item(0, topic_on(0, "a"), "a"), item(1, topic_on(1, "a"), "a"))
    await topics.enqueue(item(0, topic_on(0, "b"), "b"), item(1, topic_on(1, "b"), "b"))
    await topics.good("PUT", "/quotas", {"namespace": "a", "per_minute": 3})
    await topics.good("PUT", "/quotas", {"namespace": "default", "per_minute": 5})
    listed = (await api.call("GET", "/api/v1/topics/namespaces")).body["namespaces"]
    shown = {one["namespace"]: (one["limitPerMinute"], one["usedLastMinute"]) for one in listed}
    assert (shown["a"], shown["b"]) == ((3, 2), (5, 2))

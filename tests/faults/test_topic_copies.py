"""Hosts with a common Redis: what one of them buffered and did not live to store is stored by another, once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from queen.redis.stores import RedisCopies
from tests.conftest import StartServer
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.database import Connection
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, item, values

BUFFERED = (("ns", "buffered"),)


async def stored(connection: Connection) -> set[int]:
    return {row["id"] for row in await connection.fetch("SELECT id FROM queen.topic_items")}


def copies_of(topics: TopicApi) -> RedisCopies:
    worker = topics.api.worker
    assert worker is not None and worker.broker.topics.redis is not None
    return RedisCopies(worker.broker.topics.redis, 0)


async def test_another_host_stores_what_one_cannot_and_nothing_is_stored_twice_when_it_can_again(
    start_server: StartServer, redis: RedisServer, proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    common = {"namespace_modes": BUFFERED, "redis_addrs": redis.address}
    cut_off = TopicApi(
        await start_server(queen_data_dir=tmp_path / "first", database_urls=(proxy.dsn,), db_away_ms=500, **common)
    )
    other = TopicApi(await start_server(queen_data_dir=tmp_path / "second", **common))
    sent = await cut_off.enqueue(item("before"))

    async def all_stored() -> bool:
        return await stored(connection) == set(sent)

    await until(all_stored)
    async with proxy.away():
        for number in range(10):
            sent += await cut_off.enqueue(item(number), item(number, priority=1))
        await until(all_stored)
        leased = await other.dequeue(limit=100)
        assert values(leased) == ["before", *range(10), *range(10)]
        assert all(await other.ack(*leased))
    (last,) = await cut_off.enqueue(item("after"))

    async def last_stored() -> bool:
        return await stored(connection) == {last}

    await until(last_stored)
    worker = cut_off.api.worker
    assert worker is not None

    async def empty() -> bool:
        return not worker.broker.topics.wal.state.records and not await copies_of(other).files()

    await until(empty)
    assert await stored(connection) == {last}


async def test_large_items_are_not_copied_and_what_follows_them_waits_for_its_host(
    start_server: StartServer, redis: RedisServer, proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    common = {"namespace_modes": BUFFERED, "redis_addrs": redis.address}
    cut_off = TopicApi(
        await start_server(queen_data_dir=tmp_path / "first", database_urls=(proxy.dsn,), db_away_ms=500, **common)
    )
    await start_server(queen_data_dir=tmp_path / "second", **common)
    sent = await cut_off.enqueue(item("before"))

    async def some_stored() -> bool:
        return await stored(connection) == set(sent[: len(sent) - late])

    late = 0
    await until(some_stored)
    async with proxy.away():
        sent += await cut_off.enqueue(item("small"))
        sent += await cut_off.enqueue(item("x" * 70_000))
        sent += await cut_off.enqueue(item("small"))
        late = 2
        await until(some_stored)
    late = 0
    await until(some_stored)


async def test_a_redis_that_is_emptied_paused_and_killed_loses_nothing_that_was_answered(
    start_server: StartServer, redis: RedisServer, connection: Connection, tmp_path: Path
) -> None:
    chance = random.Random(11)
    hosts = [
        TopicApi(
            await start_server(
                queen_data_dir=tmp_path / f"host{number}",
                namespace_modes=BUFFERED,
                redis_addrs=redis.address,
                redis_timeout_ms=200,
            )
        )
        for number in range(2)
    ]
    sent: set[int] = set()
    stop = asyncio.Event()

    async def enqueue(topics: TopicApi) -> None:
        while not stop.is_set():
            sent.update(await topics.enqueue(item("x"), item("y")))
            await asyncio.sleep(0.002)

    async def more() -> None:
        count = len(sent) + 60

        async def enough() -> bool:
            return len(sent) >= count

        await until(enough)

    async with asyncio.TaskGroup() as group:
        for topics in hosts:
            group.create_task(enqueue(topics))
        for _ in range(3):
            await more()
            await redis.call("FLUSHALL")
            await more()
            redis.pause()
            await asyncio.sleep(chance.random() * 0.4)
            redis.resume()
            await more()
            await redis.kill()
            await more()
            await redis.start()
        await more()
        stop.set()

    async def all_stored() -> bool:
        return await stored(connection) == sent

    await until(all_stored)

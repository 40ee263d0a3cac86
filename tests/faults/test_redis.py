"""Redis goes away, comes back, comes back empty: nothing is lost, the order holds, and consumers hardly notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.broker.topics.test_prefetch import buffers, depth, heat
from tests.conftest import StartServer
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.database import Connection
from tests.support.topic_api import TopicApi, item, values

Fault = Callable[[RedisServer], Awaitable[None]]


async def killed(server: RedisServer) -> None:
    await server.kill()


async def paused(server: RedisServer) -> None:
    server.pause()


async def emptied(server: RedisServer) -> None:
    await server.call("FLUSHALL")


async def restarted(server: RedisServer) -> None:
    await server.kill()
    await server.start()


FAULTS: list[Fault] = [killed, paused, emptied, restarted]


async def left(connection: Connection) -> dict[str, list[object]]:
    """What PostgreSQL knows of items that are not done."""
    queries = {
        "items": "SELECT id, leased_until - now(), lease_owner, retries FROM queen.topic_items LIMIT 10",
        "ready queues": "SELECT * FROM queen.topic_ready LIMIT 10",
        "handouts": "SELECT owner, cardinality(ids) FROM queen.topic_handouts LIMIT 10",
    }
    return {name: list(await connection.fetch(query)) for name, query in queries.items()}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_order_holds_and_nothing_is_lost_or_retried(
    fault: Fault, redis: RedisServer, start_server: StartServer
) -> None:
    topics = TopicApi(await start_server(topic_ready_queues="on", redis_addrs=redis.address))
    await topics.enqueue(*(item(n) for n in range(100)))
    await heat(topics)
    first = await topics.dequeue(limit=10)
    assert depth(topics) == 90
    await fault(redis)
    await topics.enqueue(item("urgent", priority=-1))
    second = await topics.dequeue(limit=20)
    assert values(first + second) == [*range(10), "urgent", *range(10, 29)]
    rest = await topics.dequeue(limit=200)
    assert values(rest) == list(range(29, 100))
    assert {one["retries"] for one in rest} == {0}
    assert all(await topics.ack(*first, *second, *rest))
    assert (await topics.counts()) == {"ready": 0, "delayed": 0, "leased": 0, "dead": 0}


async def test_ready_queues_come_back_with_redis(redis: RedisServer, start_server: StartServer) -> None:
    topics = TopicApi(await start_server(topic_ready_queues="on", redis_addrs=redis.address))
    await topics.enqueue(*(item(n) for n in range(100)))
    await heat(topics)
    await redis.kill()
    assert values(await topics.dequeue(limit=5)) == list(range(5))
    assert buffers(topics).by_topic == {}
    await redis.start()
    await heat(topics)
    assert values(await topics.dequeue(limit=5)) == list(range(5, 10))
    assert depth(topics) == 90


async def test_a_redis_that_goes_back_in_time_hands_nothing_out_twice(
    redis: RedisServer, start_server: StartServer
) -> None:
    topics = TopicApi(await start_server(topic_ready_queues="on", redis_addrs=redis.address))
    await topics.enqueue(*(item(n) for n in range(50)))
    await heat(topics)
    (buffer,) = buffers(topics).by_topic.values()
    key = f"queen:ready:{{{buffer.topic.id}}}"
    # A replica that takes over may not have heard of the last changes.
    before = await redis.call("DUMP", key)
    assert isinstance(before, bytes)
    assert values(await topics.dequeue(limit=10)) == list(range(10))
    await redis.call("RESTORE", key, 0, before, "REPLACE")
    assert values(await topics.dequeue(limit=10)) == list(range(10, 20))
    assert values(await topics.dequeue(limit=100)) == list(range(20, 50))


async def test_a_host_without_redis_sees_the_same_order(redis: RedisServer, start_server: StartServer) -> None:
    with_redis = TopicApi(await start_server(topic_ready_queues="on", redis_addrs=redis.address))
    without = TopicApi(await start_server(topic_ready_queues="on"))
    await with_redis.enqueue(*(item(n) for n in range(50)))
    await heat(with_redis)
    assert values(await without.dequeue(limit=10)) == list(range(10))
    assert values(await with_redis.dequeue(limit=10)) == list(range(10, 20))
    assert values(await without.dequeue(limit=100)) == list(range(20, 50))


@pytest.mark.soak
async def test_under_load_every_item_is_acked_once(
    redis: RedisServer, start_server: StartServer, connection: Connection
) -> None:
    settings = {"redis_addrs": redis.address, "redis_timeout_ms": 1000, "topic_ready_queues": "on"}
    servers = [TopicApi(await start_server(n, num_workers=2, **settings)) for n in range(2)]
    total = 3000
    acked: list[int] = []
    enqueued = asyncio.Event()

    async def produce() -> None:
        for start in range(0, total, 50):
            await servers[0].enqueue(*(item(n) for n in range(start, start + 50)))
        enqueued.set()

    async def consume(topics: TopicApi) -> None:
        while True:
            some = await topics.dequeue(limit=25, lease=600)
            done = await topics.ack(*some) if some else []
            acked.extend(one["data"] for one, good in zip(some, done, strict=True) if good)
            if not some and enqueued.is_set() and len(acked) >= total:
                return

    async def disturb() -> None:
        for fault in FAULTS:

            async def goes_on(before: int = len(acked)) -> bool:
                return len(acked) > before + 100 or len(acked) >= total

            await fault(redis)
            await until(goes_on)
            if fault is paused:
                redis.resume()
            if fault is killed:
                await redis.start()

    try:
        async with asyncio.timeout(100):
            await asyncio.gather(produce(), disturb(), *(consume(servers[n % 2]) for n in range(4)))
    except TimeoutError:
        pytest.fail(f"{len(acked)} acked, all enqueued: {enqueued.is_set()}; left: {await left(connection)}")
    assert sorted(acked) == list(range(total))

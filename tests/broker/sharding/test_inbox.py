"""Pushing from SQL with two shards: each database has an inbox, for the queues and topics that live there."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count

import asyncpg
import pytest

from queen.wire.shards import Name, home
from tests.broker.sharding.names import queue_on, topic_on
from tests.broker.sharding.test_moving import move
from tests.conftest import StartServer
from tests.support.ageing import is_inbox_empty, until
from tests.support.api import Api, payloads
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, item, values


async def execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def drained(*dsns: str) -> None:
    for dsn in dsns:
        connection = await asyncpg.connect(dsn)
        try:
            await until(partial(is_inbox_empty, connection))
        finally:
            await connection.close()


async def test_each_database_takes_what_lives_there_and_says_where_the_rest_does(
    api: Api, topics: TopicApi, dsns: tuple[str, str]
) -> None:
    for number in range(2):
        other = 1 - number
        queue, topic = queue_on(number), topic_on(number)
        await execute(
            dsns[number], f"SELECT queen.push('{queue}', 'p', '1')", f"SELECT queen.enqueue('ns', '{topic}', '1')"
        )
        (message,) = await api.pop(queue, wait=True)
        assert message["data"] == 1
        assert values(await topics.dequeue(topic=topic, wait=True)) == [1]
        for call, name in (
            (f"queen.push('{queue}', 'p', '2')", queue),
            (f"queen.push('{queue}-new', 'p', '2')", f"{queue}-new"),
            (f"queen.enqueue('ns', '{topic}', '2')", f"ns/{topic}"),
        ):
            try:
                await execute(dsns[other], f"SELECT {call}")
            except asyncpg.PostgresError as error:
                assert error.sqlstate == "QN001"
                assert f"{name} lives on shard {number}, and this is the database of shard {other}" in str(error)
                assert f"database of shard {number}" in (error.hint or "")
            else:
                # The hash of the new name may have chosen this shard.
                assert name.endswith("-new")
    metrics = (await api.call("GET", "/metrics/prometheus")).body
    assert "queen_inbox_rows 0.0" in metrics


async def test_what_waits_for_a_queue_that_has_moved_is_appended_there_once(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    api = await start_server(database_urls=dsns)
    topics = TopicApi(api)
    queue, topic = queue_on(0), topic_on(0)
    await api.push(queue, "before")
    await topics.enqueue(item("before", topic))
    connection = await asyncpg.connect(dsns[0])
    transaction = connection.transaction()
    await transaction.start()
    own = await connection.fetchval("SELECT queen.push($1, 'Default', '\"during\"')", queue)
    await connection.execute("SELECT queen.push_many($1, 'Default', ARRAY['1', '2']::jsonb[])", queue)
    await connection.execute("SELECT queen.enqueue('ns', $1, '\"during\"')", topic)
    assert await move(dsns, Name.queue(queue), 1)
    assert await move(dsns, Name.topic("ns", topic), 1)
    await transaction.commit()
    await drained(*dsns)
    messages = await api.pop(queue, batch=10, wait=True)
    assert payloads(messages) == ["before", "during", 1, 2]
    assert messages[1]["transactionId"] == own
    assert sorted(values(await topics.dequeue(topic=topic))) == ["before", "during"]
    with pytest.raises(asyncpg.PostgresError, match="lives on shard 1"):
        await connection.execute("SELECT queen.push($1, 'Default', '3')", queue)
    await connection.close()


async def test_keys_and_quotas_of_a_namespace_hold_over_all_shards(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, namespace_quotas=(("few", 2),)))
    here, there = topic_on(0), topic_on(1)
    await topics.enqueue(item("first", here, idempotency_key="k"))
    await execute(dsns[1], f"SELECT queen.enqueue('ns', '{there}', '\"again\"', key => 'k')")
    await drained(*dsns)
    assert values(await topics.dequeue(topic=there)) == []
    few_here, few_there = topic_on(0, "few"), topic_on(1, "few")
    await execute(dsns[0], f"SELECT queen.enqueue('few', '{few_here}', '1')")
    await drained(*dsns)
    await execute(dsns[1], *[f"SELECT queen.enqueue('few', '{few_there}', '{number}')" for number in (2, 3)])
    await drained(*dsns)
    assert values(await topics.dequeue(topic=few_here, namespace="few")) == [1]
    assert values(await topics.dequeue(topic=few_there, namespace="few")) == [2]
    connection = await asyncpg.connect(dsns[1])
    assert await connection.fetchval("SELECT payload FROM queen.topic_dead_letters") == b"3"
    await connection.close()


async def test_items_wait_for_the_shard_that_keeps_their_keys_and_messages_do_not(
    start_server: StartServer, dsns: tuple[str, str], second_proxy: Proxy
) -> None:
    api = await start_server(database_urls=(dsns[0], second_proxy.dsn), db_away_ms=500)
    assert api.worker is not None
    namespace = next(name for n in count() if home(Name.namespace(name := f"ns{n}"), range(2)) == 1)
    topic, queue = topic_on(0, namespace), queue_on(0)
    availability = api.worker.brokers[1].database.availability
    async with second_proxy.away():
        await until(lambda: availability.down)
        await execute(
            dsns[0],
            f"SELECT queen.enqueue('{namespace}', '{topic}', '1', key => 'k')",
            f"SELECT queen.push('{queue}', 'p', '2')",
        )
        assert payloads(await api.pop(queue, wait=True, timeout=60_000)) == [2]
        connection = await asyncpg.connect(dsns[0])
        assert not await is_inbox_empty(connection)
        await connection.close()
    await drained(dsns[0])
    assert values(await TopicApi(api).dequeue(namespace=namespace, topic=topic)) == [1]


async def test_parked_pops_of_both_shards_wake(api: Api, dsns: tuple[str, str]) -> None:
    queues = [queue_on(number) for number in range(2)]
    waiting = [asyncio.create_task(api.pop(queue, wait=True, timeout=60_000)) for queue in queues]
    for dsn, queue in zip(dsns, queues, strict=True):
        await execute(dsn, f"SELECT queen.push('{queue}', 'p', '1')")
    for popped in waiting:
        assert payloads(await popped) == [1]

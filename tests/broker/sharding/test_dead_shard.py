"""A shard that is away affects what lives on it, and nothing else."""

from __future__ import annotations

import asyncio
import gc

from queen.broker.pop.requests import Pop, PopRequest
from queen.broker.sharding.sharded_broker import MovingPop
from queen.errors import DatabaseUnavailable
from queen.metrics.meter import Meter
from queen.wire.shards import Name
from tests.broker.sharding.names import queue_on, topic_on
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, item, values


async def test_what_lives_on_other_shards_goes_on_and_the_rest_comes_back(
    start_server: StartServer, dsn: str, second_proxy: Proxy
) -> None:
    api = await start_server(database_urls=(dsn, second_proxy.dsn), db_away_ms=500)
    topics = TopicApi(api)
    alive, dead = queue_on(0), queue_on(1)
    for queue in (alive, dead):
        await api.push(queue, "before")
    assert api.worker is not None
    availability = api.worker.brokers[1].database.availability
    async with second_proxy.away():
        await until(lambda: availability.down)
        await api.push(alive, "during")
        messages = await api.pop(alive, batch=5)
        assert [message["data"] for message in messages] == ["before", "during"]
        assert all(result["success"] for result in await api.ack(messages))
        new = queue_on(0, "new")
        await api.push(new, 1)
        assert len(await api.pop(new)) == 1
        await topics.enqueue(item(1, topic_on(0)))
        assert values(await topics.dequeue(topic=topic_on(0))) == [1]
        # Pushes to what is away are kept on disk, everything else is refused for now.
        assert (await api.push(dead, "spooled"))[0]["status"] != "failed"
        assert (await api.call("GET", f"/api/v1/pop/queue/{dead}")).status == 503
        assert (await topics.call("POST", "/enqueue", [item(1, topic_on(1))])).status == 503
        listed = (await api.call("GET", "/api/v1/resources/queues")).body["queues"]
        assert {queue["name"] for queue in listed} == {alive, new}
        namespaces = (await api.call("GET", "/api/v1/topics/namespaces")).body["namespaces"]
        assert [one["topics"] for one in namespaces] == [1]
        # No streaming query is known of the others, which says nothing of those that live there.
        assert (await api.call("GET", "/api/v1/streams")).status == 503
        ready = await api.call("GET", "/readyz")
        assert (ready.status, ready.body["ready"]) == (200, True)
        assert any("shard 1" in reason for reason in ready.body["reasons"])
        assert (await api.call("GET", "/health")).body["status"] == "degraded"
    await until(lambda: not availability.down)

    spool = api.worker.brokers[1].spool
    await until(lambda: spool.stats().messages == 0)
    messages = await api.pop(dead, batch=5, wait=True, timeout=30_000)
    assert [message["data"] for message in messages] == ["before", "spooled"]
    assert (await api.call("GET", "/health")).body["status"] == "healthy"


async def test_a_server_starts_while_one_of_its_shards_is_away(
    start_server: StartServer, dsn: str, second_proxy: Proxy
) -> None:
    urls = (dsn, second_proxy.dsn)
    first = await start_server(database_urls=urls, num_workers=2)
    await first.push(queue_on(1), 1)
    async with second_proxy.away():
        second = await start_server(worker_id=1, database_urls=urls, num_workers=2, db_away_ms=500)
        await second.push(queue_on(0), 1)
        assert len(await second.pop(queue_on(0))) == 1
    assert second.worker is not None
    availability = second.worker.brokers[1].database.availability
    await until(lambda: not availability.down)
    assert len(await second.pop(queue_on(1), wait=True, timeout=30_000)) == 1


async def test_a_worker_that_starts_again_while_all_shards_are_away_keeps_pushes(
    start_server: StartServer, proxy: Proxy, second_proxy: Proxy
) -> None:
    """It would give up, and with it the server: the shards were set up when the server was started."""
    urls = (proxy.dsn, second_proxy.dsn)
    first = await start_server(database_urls=urls, num_workers=2)
    await first.push(queue_on(1), 0)
    async with proxy.away(), second_proxy.away():
        second = await start_server(worker_id=1, database_urls=urls, num_workers=2, db_away_ms=500)
        pushed = [*await second.push(queue_on(0), 1), *await second.push(queue_on(1), 1)]
        assert [one["status"] for one in pushed] == ["buffered", "buffered"]
    assert second.worker is not None
    shards = [broker.database.availability for broker in second.worker.brokers]
    await until(lambda: not any(shard.down for shard in shards))
    for queue, want in ((queue_on(0), 1), (queue_on(1), 2)):
        got: list[object] = []
        while len(got) < want:
            got += await second.pop(queue, batch=5, wait=True, timeout=30_000, autoAck=True)


async def test_a_pop_whose_client_left_while_its_shard_was_looked_up_waits_for_nothing(api: Api) -> None:
    assert api.worker is not None
    broker = api.worker._sharded
    assert broker is not None
    queue = queue_on(0)
    await api.configure(queue)
    broker.directory._places.clear()
    pop = broker.popper.begin(PopRequest((queue,), None, "g", wait=True), lambda body: body)
    await asyncio.sleep(0)
    pop.answer.cancel()
    await broker.directory.find(Name.queue(queue))
    await asyncio.sleep(0.2)
    assert [one.popper.parked for one in broker.brokers] == [0, 0]


async def test_a_pop_that_fails_after_its_client_disconnected_is_not_logged() -> None:
    loop = asyncio.get_running_loop()
    lost: list[object] = []
    loop.set_exception_handler(lambda loop, context: lost.append(context))
    outer: asyncio.Future[bytes | None] = loop.create_future()
    pop = MovingPop(outer, lambda body: body)
    inner = Pop(PopRequest(("q",), None, "g"), lambda body: body, loop.create_future(), Meter())
    pop.follow(inner)
    inner.fail(DatabaseUnavailable("gone"))
    outer.cancel()
    await asyncio.sleep(0)
    del inner, pop
    gc.collect()
    assert lost == []

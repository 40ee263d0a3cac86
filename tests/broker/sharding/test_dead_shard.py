"""A shard that is away affects what lives on it, and nothing else."""

from __future__ import annotations

from tests.broker.sharding.names import queue_on, topic_on
from tests.conftest import StartServer
from tests.support.ageing import until
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

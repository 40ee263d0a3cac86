"""What waits in the spool of a shard for a queue that has moved meanwhile is stored where the queue is."""

from __future__ import annotations

from queen.wire.shards import Name
from tests.broker.sharding.names import queue_on
from tests.broker.sharding.test_moving import move
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.proxy import Proxy


async def test_pushes_that_waited_for_a_dead_shard_follow_a_queue_that_has_left_it(
    start_server: StartServer, dsns: tuple[str, str], second_proxy: Proxy
) -> None:
    """The server cannot see the second shard any more, while the mover can."""
    api = await start_server(database_urls=(dsns[0], second_proxy.dsn), db_away_ms=500)
    queue = queue_on(1)
    await api.push(queue, "before")
    assert api.worker is not None
    availability = api.worker.brokers[1].database.availability
    async with second_proxy.away():
        await until(lambda: availability.down)
        await api.push(queue, "spooled")
        assert await move(dsns, Name.queue(queue), 0)
    await until(lambda: not availability.down)
    spool = api.worker.brokers[1].spool
    await until(lambda: spool.stats().messages == 0)
    assert spool.stats().failed_records == 0
    messages = await api.pop(queue, batch=5, wait=True)
    assert [message["data"] for message in messages] == ["before", "spooled"]

"""Hosts with several shards tell each other which one something happened on."""

from __future__ import annotations

import asyncio

from queen.broker.events import EventKind, named, pushed
from queen.bus.peers import by_shard
from tests.broker.sharding.names import queue_on
from tests.conftest import StartServer


def test_events_come_back_to_the_shard_they_are_of() -> None:
    told = [pushed(1, 2, 3), named(EventKind.GROUP_CHANGED, "g", 77)]
    tagged = [(*event[:5], f"\x011\x01{event[5]}") for event in told]
    assert by_shard([*told, *tagged]) == {0: told, 1: told}
    assert by_shard([(*told[0][:5], "\x01nonsense\x01")]) == {}


async def test_two_workers_of_a_host_wake_each_other_on_every_shard(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    first = await start_server(database_urls=dsns, num_workers=2, pop_safety_poll_ms=600_000)
    second = await start_server(worker_id=1, database_urls=dsns, num_workers=2, pop_safety_poll_ms=600_000)
    for queue in (queue_on(0), queue_on(1)):
        await first.push(queue, 0)
        await second.pop(queue, autoAck=True)
        waiting = asyncio.create_task(second.pop(queue, wait=True, timeout=60_000))
        await asyncio.sleep(0)
        await first.push(queue, 1)
        assert [message["data"] for message in await waiting] == [1]

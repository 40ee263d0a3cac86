"""Servers die while their spools are written and replayed: what was answered is delivered once, in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from queen.server.worker import Worker
from tests.conftest import StartServer
from tests.faults.load import Client, Producer, answered, check_delivered, check_stored, pushing, stored_when_replayed
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection, make_queue, stored_messages
from tests.support.host import host
from tests.support.proxy import Proxy

_HOLD_APPENDS = "LOCK TABLE queen.segments IN SHARE MODE"
SETTINGS = {"FILE_BUFFER_MAX_BATCH": "1", "FILE_BUFFER_FLUSH_MS": "20"}


async def switch_maintenance(url: str, enabled: bool) -> None:
    client = Client(url)
    await client.persist("POST", "/api/v1/system/maintenance", {"enabled": enabled})
    await client.close()


@pytest.mark.parametrize("window", [0, pytest.param(3600, marks=pytest.mark.soak)])
async def test_servers_killed_during_replay_store_everything_once(
    dsn: str, connection: Connection, tmp_path: Path, window: int
) -> None:
    """Without a dedup window only the progress of the replay itself keeps messages from being stored twice."""
    chance = random.Random(window)
    await make_queue(connection, "orders", dedup_window_seconds=window)
    with host(dsn, tmp_path / "host", **SETTINGS) as server:
        server.start()
        await server.ready()
        await switch_maintenance(server.url, True)
        producers = [Producer(server.url, f"client{number}", "orders") for number in range(4)]
        async with pushing(producers):
            await answered(producers, requests=60)
        assert all(producer.buffered == producer.requests for producer in producers)
        total = sum(len(producer.answered[producer.name]) for producer in producers)
        async with sluice_of_appends(dsn) as sluice:
            await switch_maintenance(server.url, False)
            for _ in range(6):
                await until(sluice.has_waiting_append)
                stored_before_the_kill = chance.random() < 0.5
                if stored_before_the_kill:
                    await sluice.let_pass()
                if chance.random() < 0.6:
                    server.kill_a_worker(chance)
                else:
                    server.kill()
                    server.start()
                    await server.ready()
                if not stored_before_the_kill:
                    await sluice.let_pass()
            kept = sum([len(await stored_messages(connection, "orders", producer.name)) for producer in producers])
        assert kept < total, "the last of the kills did not interrupt the replay"
        await check_stored(connection, producers)
        await server.ready()
        await check_delivered(server.url, producers)


class Sluice:
    """Makes every append to the log wait, and lets some pass: the replay cannot be over too soon."""

    def __init__(self, connection: Connection, other: Connection) -> None:
        self._holding, self._next = connection, other

    async def hold(self) -> None:
        await self._holding.execute(f"BEGIN; {_HOLD_APPENDS}")

    async def has_waiting_append(self) -> bool:
        return await self._waits("RowExclusiveLock")

    async def let_pass(self) -> None:
        """Let the appends pass that wait by now, those of dead workers too, and none that comes after them."""
        # PostgreSQL grants a lock in the order of its requests: the next hold is asked for before this one ends.
        held = asyncio.create_task(self._next.execute(f"BEGIN; {_HOLD_APPENDS}"))

        async def is_queued() -> bool:
            return held.done() or await self._waits("ShareLock")

        await until(is_queued)
        await self._holding.execute("ROLLBACK")
        await held
        self._holding, self._next = self._next, self._holding

    async def _waits(self, mode: str) -> bool:
        found = await self._holding.fetchval(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND mode = $1"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND relation = 'queen.segments'::regclass)",
            mode,
        )
        return bool(found)


@asynccontextmanager
async def sluice_of_appends(dsn: str) -> AsyncIterator[Sluice]:
    """Appends wait while the block runs, as far as it does not let them pass."""
    connections = [await asyncpg.connect(dsn) for _ in range(2)]
    try:
        sluice = Sluice(*connections)
        await sluice.hold()
        yield sluice
    finally:
        for connection in connections:
            await connection.close()


@pytest.mark.soak
async def test_workers_killed_while_they_spool_lose_nothing_that_was_answered(
    proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    chance = random.Random(7)
    with host(proxy.dsn, tmp_path / "host", **SETTINGS) as server:
        server.start()
        await server.ready()
        producers = [Producer(server.url, f"client{number}", "orders") for number in range(4)]
        async with pushing(producers):
            await answered(producers, requests=10)
            for _ in range(3):
                async with proxy.away():
                    await answered(producers, requests=10)
                    server.kill_a_worker(chance)
                    await answered(producers, requests=10)
                await answered(producers, requests=5)
        await check_stored(connection, producers)
        await check_delivered(server.url, producers)
    assert sum(producer.buffered for producer in producers) > 0


async def test_a_server_starts_without_its_database_if_it_has_known_it(
    proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    with host(proxy.dsn, tmp_path / "host", **SETTINGS) as server:
        server.start()
        await server.ready()
        producer = Producer(server.url, "client", "orders")
        await producer.push_once()
        async with proxy.away():
            await producer.push_once()
            server.kill()
            server.start()
            await server.ready()
            for _ in range(5):
                await producer.push_once()
            api = Api(server.url)
            assert (await api.call("GET", "/health")).status == 503
            assert (await api.call("GET", "/api/v1/pop/queue/orders")).status == 503
            buffers = (await api.call("GET", "/api/v1/status/buffers")).body
            assert buffers["pending"] == 6 * 6
            assert buffers["dbHealthy"] is False
            await api.close()
        assert producer.buffered == 6
        await check_stored(connection, [producer])
        await check_delivered(server.url, [producer])
        await producer.close()


def is_drained(worker: Worker) -> bool:
    return not worker.broker.spool.state.engaged


async def test_two_hosts_that_replay_at_once_store_everything_once(
    start_server: StartServer, proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    hosts = []
    for number in range(2):
        hosts.append(
            await start_server(
                database_urls=(proxy.dsn,),
                queen_data_dir=tmp_path / f"host{number}",
                file_buffer_max_batch=3,
            )
        )
    # Each client has a host of its own; all of them push to the shared partition too.
    producers = [Producer(hosts[number % 2].url, f"client{number}", "orders") for number in range(4)]
    same = [{"queue": "twice", "partition": "same", "transactionId": f"t{number}"} for number in range(20)]
    async with pushing(producers):
        for _ in range(2):
            await answered(producers, requests=5)
            async with proxy.away():
                await answered(producers, requests=40)
                for api in hosts:
                    answer = await api.call("POST", "/api/v1/push", {"items": same})
                    assert answer.status == 201
            await answered(producers, requests=10)
    await check_stored(connection, producers)
    await check_delivered(hosts[0].url, producers)
    assert len(await stored_when_replayed(connection, "twice", "same", 20)) == 20
    assert all(producer.buffered > 0 and not producer.failures for producer in producers)
    for api in hosts:
        assert api.worker is not None
        await until(partial(is_drained, api.worker))

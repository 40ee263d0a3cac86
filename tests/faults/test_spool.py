"""Servers die while their spools are written and replayed: what was answered is delivered once, in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from queen.server import Worker
from tests.acceptance.served import environ_without_settings
from tests.conftest import StartServer
from tests.faults.load import Client, Producer, answered, check_delivered, check_stored, pushing, stored_when_replayed
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection, make_queue
from tests.support.ports import free_port
from tests.support.proxy import Proxy


@dataclass
class Host:
    """A `queen serve` with two workers on a PostgreSQL that is not its own; it can be killed and started again."""

    dsn: str
    data_dir: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("queen")), "serve", "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--data-dir", str(self.data_dir), "--workers", "2"]
        command += ["--database-url", self.dsn]
        settings = {"FILE_BUFFER_MAX_BATCH": "1", "FILE_BUFFER_FLUSH_MS": "20"}
        self.data_dir.mkdir(exist_ok=True)
        with (self.data_dir / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ_without_settings() | settings)

    async def ready(self) -> None:
        """Until it answers, with or without its database."""
        client = Client(self.url)
        await client.persist("GET", "/api/v1/status/buffers")
        await client.close()

    def kill_a_worker(self, chance: random.Random) -> None:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        if children:
            os.kill(chance.choice(children).pid, signal.SIGKILL)

    def kill(self) -> None:
        """All at once, as when the machine is switched off."""
        assert self.process is not None
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children()]:
            os.kill(process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@contextmanager
def host(dsn: str, data_dir: Path) -> Iterator[Host]:
    one = Host(dsn, data_dir, free_port())
    try:
        yield one
    finally:
        one.stop()


async def switch_maintenance(url: str, enabled: bool) -> None:
    client = Client(url)
    await client.persist("POST", "/api/v1/system/maintenance", {"enabled": enabled})
    await client.close()


@pytest.mark.parametrize("window", [0, 3600])
async def test_servers_killed_during_replay_store_everything_once(
    dsn: str, connection: Connection, tmp_path: Path, window: int
) -> None:
    """Without a dedup window only the progress of the replay itself keeps messages from being stored twice."""
    chance = random.Random(window)
    await make_queue(connection, "orders", dedup_window_seconds=window)
    with host(dsn, tmp_path / "host") as server:
        server.start()
        await server.ready()
        await switch_maintenance(server.url, True)
        producers = [Producer(server.url, f"client{number}", "orders") for number in range(4)]
        async with pushing(producers):
            await answered(producers, requests=60)
        assert all(producer.buffered == producer.requests for producer in producers)
        total = sum(len(producer.answered[producer.name]) for producer in producers)
        await switch_maintenance(server.url, False)
        kills = 0
        while kills < 12 and await count_stored(connection, producers) < total:
            await asyncio.sleep(chance.random() * 0.4)
            if chance.random() < 0.6:
                server.kill_a_worker(chance)
            else:
                server.kill()
                server.start()
                await server.ready()
            kills += 1
        assert kills > 1, "it was over before it could be disturbed"
        await check_stored(connection, producers)
        await server.ready()
        await check_delivered(server.url, producers)


async def count_stored(connection: Connection, producers: list[Producer]) -> int:
    counts = [
        len(await stored_when_replayed(connection, "orders", producer.name, 0, seconds=0)) for producer in producers
    ]
    return sum(counts)


async def test_workers_killed_while_they_spool_lose_nothing_that_was_answered(
    proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    chance = random.Random(7)
    with host(proxy.dsn, tmp_path / "host") as server:
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
    with host(proxy.dsn, tmp_path / "host") as server:
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

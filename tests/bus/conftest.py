"""Several hosts on one database, each with a directory of its own: the local bus of one does not reach the other."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from queen.bus.members import PeerStats
from queen.server.worker import Worker
from queen.settings import Settings
from tests.support.api import Api
from tests.support.ports import free_port

SECRET = "5e" * 32


class Host(Api):
    """A worker of a host, the calls to make to it, and its end."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"http://127.0.0.1:{worker.port}", worker)
        self.running = worker

    @property
    def stats(self) -> PeerStats:
        return self.running.broker.peers.stats()

    async def stop(self) -> None:
        if self.worker is not None:
            self.worker = None
            await self.close()
            await self.running.stop()


StartHost = Callable[..., Awaitable[Host]]


@dataclass(frozen=True)
class Ports:
    """Free ports of this machine."""

    kind: socket.SocketKind

    def free(self, count: int) -> list[int]:
        return [free_port(self.kind) for _ in range(count)]


@pytest.fixture
def udp_ports() -> Ports:
    return Ports(socket.SOCK_DGRAM)


@pytest.fixture
def tcp_ports() -> Ports:
    return Ports(socket.SOCK_STREAM)


@pytest.fixture
async def start_host(dsn: str, tmp_path: Path) -> AsyncIterator[StartHost]:
    """Starts hosts by name; the same name again is another worker of it. Stopped with the test."""
    numbers: dict[str, int] = {}
    async with AsyncExitStack() as stack:

        async def start(name: str, worker_id: int = 0, port: int = 0, **overrides: object) -> Host:
            directory = tmp_path / name
            directory.mkdir(exist_ok=True)
            values: dict[str, object] = {
                "num_workers": 1,
                "host": "127.0.0.1",
                "database_urls": (dsn,),
                "queen_sync_heartbeat_ms": 100,
                "queen_sync_dead_threshold_ms": 1000,
                # Hosts on one machine are told apart by their port.
                "port": port or 20_000 + numbers.setdefault(name, len(numbers)),
                # The default port may belong to a server that runs beside the tests.
                "queen_udp_notify_port": Ports(socket.SOCK_DGRAM).free(1)[0],
            }
            settings = Settings.from_env({}, **(values | overrides))
            worker = Worker(settings, worker_id, directory, port=port)
            await worker.start()
            host = Host(worker)
            stack.push_async_callback(host.stop)
            return host

        yield start

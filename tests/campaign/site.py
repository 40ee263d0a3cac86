"""What a campaign runs against: PostgreSQL, perhaps with a standby, Redis, hosts, and proxies in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import asyncpg
import psutil

from queen.embedded import EmbeddedPostgres
from tests.bus.lossy import Lossy, lossy
from tests.deploy.postgres_tools import as_embedded, postgres_tool
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.database import Connection
from tests.support.host import Host
from tests.support.ports import free_port
from tests.support.proxy import TcpProxy

_POSTGRES_SETTINGS = {"fsync": "off", "superuser_reserved_connections": "3"}
_SHARD_CONNECTIONS = 100
_STANDBY_SETTINGS = {"wal_level": "replica", "hot_standby": "on", "synchronous_commit": "on", "max_wal_senders": "10"}
_HOST_SETTINGS = {
    "RETENTION_INTERVAL": "500",
    "EVICTION_INTERVAL": "500",
    "DB_STATEMENT_TIMEOUT": "5000",
    "DB_LOCK_TIMEOUT": "3000",
    "POP_SAFETY_POLL_MS": "1000",
    "STATS_CACHE_MS": "0",
    "NAMESPACE_MODES": "buffered:buffered",
}
_STANDBY_SESSION = "user=postgres application_name=standby"
_SPOOL_MB = 48
_SECRET = "5e" * 32
_POSTGRES_MB = 700


@dataclass(frozen=True)
class Shape:
    """What there is of everything."""

    hosts: int = 1
    shards: int = 1
    standby: bool = False
    redis: bool = True
    small_disks: bool = True
    """Spools and PostgreSQL lie on file systems that can be filled."""
    clocks: bool = False
    """The clocks of hosts can be set, where libfaketime is installed."""
    older: Path | None = None
    """Sources of the version before this one, which hosts are started with."""


class Node:
    """One PostgreSQL server, and the proxy by which hosts reach it."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self.directory = directory
        self.port = free_port()
        self._settings = settings
        self.server = EmbeddedPostgres(directory, settings=settings, port=self.port)
        self.proxy = TcpProxy(self._connect)
        self._dsn = ""

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)
        self._dsn = self.server.dsn("DATABASE")

    async def stop(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def kill(self) -> None:
        """Every process of it, as a crash of the machine would."""
        await asyncio.to_thread(self.server.kill)

    async def start_again(self) -> None:
        """Until it starts: there may be no room on its disk yet."""
        async with asyncio.timeout(90):
            while True:
                with contextlib.suppress(Exception):
                    return await self.start()
                await asyncio.sleep(0.2)

    @property
    def has_ended(self) -> bool:
        """Whether it was started and runs no more."""
        return bool(self._dsn) and not self.server.running

    def processes(self) -> list[psutil.Process]:
        """Of a running server, the postmaster first."""
        try:
            postmaster = psutil.Process(self.server.pid)
            return [postmaster, *postmaster.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def dsn(self, database: str = "postgres") -> str:
        """Where it is, or was before it stopped."""
        return self._dsn.replace("/DATABASE?", f"/{database}?")

    def remake(self) -> None:
        """Nothing of it is left; it can become a standby."""
        with contextlib.suppress(Exception):
            self.server.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.server = EmbeddedPostgres(self.directory, settings=self._settings, port=self.port)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.server.running:
            raise ConnectionRefusedError("PostgreSQL is not running")
        where = parse_qs(urlsplit(self.dsn()).query)
        return await asyncio.open_unix_connection(f"{where['host'][0]}/.s.PGSQL.{where['port'][0]}")


@dataclass
class Site:
    """All of it, running."""

    directory: Path
    shape: Shape
    nodes: list[Node] = field(default_factory=list)
    """The primary first, then its standby."""
    hosts: list[Host] = field(default_factory=list)
    fronts: list[TcpProxy] = field(default_factory=list)
    """For each host, the proxy by which clients reach it."""
    peers: list[TcpProxy] = field(default_factory=list)
    """For each of several hosts, the proxy by which the others reach it."""
    datagrams: list[Lossy] = field(default_factory=list)
    """For each of several hosts, the network by which packets of the others reach it."""
    redis: RedisServer | None = None
    disks: list[Path] = field(default_factory=list)
    """Small file systems: that of PostgreSQL, then those of the spools."""
    clocks: list[Path] = field(default_factory=list)
    """Files that say by how many seconds the clock of each host is wrong."""
    updated: set[int] = field(default_factory=set)
    """Hosts that run the present version by now."""

    @property
    def primary(self) -> Node:
        return self.nodes[0]

    @property
    def urls(self) -> list[str]:
        """Where clients connect to."""
        return [f"http://127.0.0.1:{front.port}" for front in self.fronts]

    @property
    def databases(self) -> list[str]:
        return [f"shard{number}" for number in range(self.shape.shards)]

    @property
    def dsns(self) -> tuple[str, ...]:
        """The databases, past the proxies."""
        return tuple(self.primary.dsn(name) for name in self.databases)

    @asynccontextmanager
    async def connection(self, shard: int = 0) -> AsyncIterator[Connection]:
        connection = await asyncpg.connect(self.dsns[shard])
        try:
            yield connection
        finally:
            await connection.close()

    def start_host(self, number: int) -> None:
        """Once a host was updated, and with it the schema, the version before does not start any more."""
        if self.updated:
            self.updated.add(number)
        self.hosts[number].start(None if self.updated else self.shape.older)

    def log_lines(self) -> list[str]:
        return [
            line
            for host in self.hosts
            if host.log.exists()
            for line in host.log.read_text(errors="replace").splitlines()
        ]

    def front_dsn(self, database: str) -> str:
        """The database behind the proxies; with a standby, whichever of the two takes writes."""
        places = ",".join(
            f"127.0.0.1:{node.proxy.port}" for node in sorted(self.nodes, key=lambda node: node.directory)
        )
        query = {"host": places, "sslmode": "disable"}
        if self.shape.standby:
            query["target_session_attrs"] = "primary"
        return f"postgresql://postgres@/{database}?{urlencode(query)}"

    async def make_standby(self, node: Node) -> None:
        """Copy the primary, and wait until no commit is answered before the standby has it."""
        node.remake()
        copy = self.directory / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        primary = self.primary
        where = parse_qs(urlsplit(primary.dsn()).query)
        await postgres_tool(
            "pg_basebackup", "--pgdata", copy, "--wal-method", "stream", "--checkpoint", "fast",
            "--write-recovery-conf", "--dbname", f"host={where['host'][0]} port={primary.port} {_STANDBY_SESSION}",
        )  # fmt: skip
        # Once it is promoted, there is no standby that its commits could wait for.
        with (copy / "postgresql.auto.conf").open("a") as file:
            file.write("synchronous_standby_names = ''\n")
        as_embedded(copy, node.directory)
        await node.start()
        connection = await asyncpg.connect(primary.dsn())
        try:
            await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby)'")
            await connection.execute("SELECT pg_reload_conf()")

            async def synchronous() -> bool:
                return bool(await connection.fetchval("SELECT sync_state FROM pg_stat_replication") == "sync")

            await until(synchronous, 60)
        finally:
            await connection.close()


@asynccontextmanager
async def running(directory: Path, shape: Shape) -> AsyncIterator[Site]:
    """A site while the block runs."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        site = Site(directory, shape)
        await _start_postgres(site, stack)
        if shape.redis and shutil.which("redis-server"):
            site.redis = RedisServer(directory / "redis")
            await site.redis.start()
            stack.push_async_callback(site.redis.kill)
        ports = await _connect_peers(site, stack) if shape.hosts > 1 else []
        for number in range(shape.hosts):
            await _add_host(site, number, ports, stack)
        for number in range(shape.hosts):
            site.start_host(number)
            await site.hosts[number].ready("/readyz")
        yield site


async def _start_postgres(site: Site, stack: AsyncExitStack) -> None:
    disk = _small_disk(site, "postgres-disk", _POSTGRES_MB, stack)
    settings = _POSTGRES_SETTINGS | (_STANDBY_SETTINGS if site.shape.standby else {})
    settings["max_connections"] = str(_SHARD_CONNECTIONS * site.shape.shards)
    if disk is not None:
        settings |= {"max_wal_size": "128MB", "min_wal_size": "64MB"}
    site.nodes.append(Node((disk or site.directory) / "a", dict(settings)))
    if site.shape.standby:
        site.nodes.append(Node(site.directory / "b", dict(settings)))
    for node in site.nodes:
        await node.proxy.start()
        stack.push_async_callback(node.proxy.stop)
        stack.push_async_callback(_stop_quietly, node)
    await site.primary.start()
    connection = await asyncpg.connect(site.primary.dsn())
    for name in site.databases:
        await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    if site.shape.standby:
        await site.make_standby(site.nodes[1])


async def _stop_quietly(node: Node) -> None:
    # A process that was stopped by a signal does not hear another one.
    node.signal(signal.SIGCONT)
    with contextlib.suppress(Exception):
        await node.stop()


async def _connect_peers(site: Site, stack: AsyncExitStack) -> list[int]:
    """The networks between hosts, by HTTP and by UDP; the ports at which hosts listen for packets."""
    ports = [free_port(socket.SOCK_DGRAM) for _ in range(site.shape.hosts)]
    for number, port in enumerate(ports):
        site.datagrams.append(stack.enter_context(lossy(port)))
        proxy = TcpProxy(partial(_open_host, site, number))
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        site.peers.append(proxy)
    return ports


async def _open_host(site: Site, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", site.hosts[number].port)


async def _add_host(site: Site, number: int, ports: list[int], stack: AsyncExitStack) -> None:
    settings = dict(_HOST_SETTINGS)
    if site.redis is not None:
        settings |= {"REDIS_ADDRS": site.redis.address, "TOPIC_READY_QUEUES": "on"}
    if ports:
        others = [other for other in range(site.shape.hosts) if other != number]
        settings |= {
            "QUEEN_UDP_NOTIFY_PORT": str(ports[number]),
            "QUEEN_UDP_PEERS": ",".join(f"127.0.0.1:{site.datagrams[other].port}" for other in others),
            "QUEEN_PEERS": ",".join(f"http://127.0.0.1:{site.peers[other].port}" for other in others),
            "QUEEN_SYNC_SECRET": _SECRET,
        }
    clock = _own_clock(site, number)
    if clock is not None:
        settings |= clock
    disk = _small_disk(site, f"spool-disk-{number}", _SPOOL_MB, stack)
    if disk is not None:
        settings["FILE_BUFFER_DIR"] = str(disk / "spool")
    # Commas in a URL stand between URLs.
    dsn = ",".join(site.front_dsn(name).replace(",", "%2C") for name in site.databases)
    host = Host(dsn, site.directory / f"host{number}", settings=settings)
    site.hosts.append(host)
    stack.callback(_end, host)
    front = TcpProxy(partial(_open_host, site, number))
    await front.start()
    stack.push_async_callback(front.stop)
    site.fronts.append(front)


def _own_clock(site: Site, number: int) -> dict[str, str] | None:
    """What makes the processes of a host read their time of day from a file."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if not site.shape.clocks or library is None:
        return None
    clock = site.directory / f"clock{number}"
    clock.write_text("+0")
    site.clocks.append(clock)
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _end(host: Host) -> None:
    for process in host.worker_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    with contextlib.suppress(Exception):
        host.stop()


def _small_disk(site: Site, name: str, megabytes: int, stack: AsyncExitStack) -> Path | None:
    """A file system of its own; None where none can be mounted."""
    if not site.shape.small_disks:
        return None
    disk = site.directory / name
    disk.mkdir(exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(disk)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    disk.chmod(0o755)
    stack.callback(subprocess.run, ["umount", "-l", str(disk)], capture_output=True)
    site.disks.append(disk)
    return disk


def fill(disk: Path) -> Path:
    """Leave no room on a disk; returns the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return filler

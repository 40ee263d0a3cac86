"""Faults, at moments and of kinds that a seed decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import asyncpg
import psutil

from tests.campaign.site import Site, fill
from tests.support.ageing import until

# A worker that dies right after its start, several times in a row, makes its supervisor give up.
_YOUTH_SECONDS = 3.0
_TOGETHER = 0.2
"""How often a fault comes while the one before it lasts."""
_SOON_SECONDS = 0.2
_SPREAD = 1_000_003
_JUMPS = ("-7200", "-60", "-1.5", "+1.5", "+60", "+7200")


@dataclass(frozen=True)
class Fault:
    """When it comes (seconds after the one before it), how long it lasts, and a number to choose by."""

    number: int
    kind: str
    after: float
    lasts: float
    choice: int

    @property
    def together(self) -> bool:
        """Whether it does not wait for the end of the one before it."""
        return self.after < _SOON_SECONDS

    def pick(self, count: int) -> int:
        return self.choice % count


class NotNow(Exception):
    """The fault cannot happen at this moment, or at this site."""


Inflict = Callable[[Site, Fault], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. Two that harm the same thing do not happen at the same time."""

    harms: str
    inflict: Inflict
    possible: Callable[[Site], bool] = lambda site: True
    weight: float = 1.0


def schedule(seed: int, kinds: Sequence[str], pace: float) -> Iterator[Fault]:
    """Faults without end, the same for the same seed; `pace`: seconds between them, on average."""
    chance = random.Random(seed)
    weights = [KINDS[kind].weight for kind in kinds]
    number = 0
    while kinds:
        number += 1
        (kind,) = chance.choices(kinds, weights)
        together = chance.random() < _TOGETHER
        after = chance.uniform(0.0, _SOON_SECONDS) if together else _SOON_SECONDS + chance.uniform(0.5, 1.5) * pace
        # Most are short; the others outlast what the server waits before it counts PostgreSQL as unavailable.
        lasts = chance.uniform(0.5, 3.0) if chance.random() < 0.3 else chance.uniform(0.05, 0.5)
        yield Fault(number, kind, after, lasts, chance.randrange(_SPREAD))


def possible_kinds(site: Site, wanted: Sequence[str] = ()) -> list[str]:
    """The kinds that can happen at a site, of those that are wanted (all, when none are named)."""
    unknown = set(wanted) - set(KINDS)
    if unknown:
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return [name for name in wanted or KINDS if KINDS[name].possible(site)]


# Hosts: workers, supervisors, restarts.


@asynccontextmanager
async def _worker_kill(site: Site, fault: Fault) -> AsyncIterator[None]:
    os.kill(_a_worker(site, fault).pid, signal.SIGKILL)
    yield


@asynccontextmanager
async def _worker_stop(site: Site, fault: Fault) -> AsyncIterator[None]:
    worker = _a_worker(site, fault)
    worker.suspend()
    try:
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


@asynccontextmanager
async def _host_kill(site: Site, fault: Fault) -> AsyncIterator[None]:
    number = fault.pick(len(site.hosts))
    site.hosts[number].kill()
    yield
    await _start_host(site, number)


@asynccontextmanager
async def _supervisor_kill(site: Site, fault: Fault) -> AsyncIterator[None]:
    """Without it the workers end by themselves."""
    number = fault.pick(len(site.hosts))
    host = site.hosts[number]
    assert host.process is not None
    workers = host.worker_processes()
    host.process.kill()
    host.process.wait()
    yield
    await until(
        lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers), 30
    )
    await _start_host(site, number)


@asynccontextmanager
async def _host_restart(site: Site, fault: Fault) -> AsyncIterator[None]:
    number = fault.pick(len(site.hosts))
    yield
    await asyncio.to_thread(site.hosts[number].stop)
    await _start_host(site, number)


@asynccontextmanager
async def _host_update(site: Site, fault: Fault) -> AsyncIterator[None]:
    """From the version before this one to this one."""
    left = [number for number in range(len(site.hosts)) if number not in site.updated]
    if not left:
        raise NotNow
    yield
    await asyncio.to_thread(site.hosts[left[0]].stop)
    site.updated.add(left[0])
    await _start_host(site, left[0])


def _a_worker(site: Site, fault: Fault) -> psutil.Process:
    workers = site.hosts[fault.pick(len(site.hosts))].worker_processes()
    old = [worker for worker in workers if time.time() - worker.create_time() > _YOUTH_SECONDS]
    if len(workers) < 2 or not old:
        raise NotNow
    return old[fault.pick(len(old))]


async def _start_host(site: Site, number: int) -> None:
    site.start_host(number)
    await site.hosts[number].ready()


@asynccontextmanager
async def _maintenance(site: Site, fault: Fault) -> AsyncIterator[None]:
    """An operator holds pushes back for a while."""
    await _switch_maintenance(site, enabled=True)
    try:
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        await _switch_maintenance(site, enabled=False)


async def _switch_maintenance(site: Site, *, enabled: bool) -> None:
    url = f"{site.hosts[0].url}/api/v1/system/maintenance"
    async with asyncio.timeout(60), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.post(url, json={"enabled": enabled}) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


# PostgreSQL: its processes, its sessions, its disk.


@asynccontextmanager
async def _postgres_kill(site: Site, fault: Fault) -> AsyncIterator[None]:
    await site.primary.kill()
    yield
    await asyncio.sleep(fault.lasts)
    await site.primary.start_again()


@asynccontextmanager
async def _postgres_restart(site: Site, fault: Fault) -> AsyncIterator[None]:
    yield
    await site.primary.stop()
    await site.primary.start_again()


@asynccontextmanager
async def _postgres_stop(site: Site, fault: Fault) -> AsyncIterator[None]:
    site.primary.signal(signal.SIGSTOP)
    try:
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        site.primary.signal(signal.SIGCONT)


@asynccontextmanager
async def _backend_crash(site: Site, fault: Fault) -> AsyncIterator[None]:
    """PostgreSQL ends all sessions and recovers when one of its processes dies."""
    backends = [
        process
        for process in site.primary.processes()[1:]
        if "127.0.0.1" in _title(process) or "local" in _title(process)
    ]
    if not backends:
        raise NotNow
    with contextlib.suppress(ProcessLookupError):
        os.kill(backends[fault.pick(len(backends))].pid, signal.SIGKILL)
    yield


@asynccontextmanager
async def _backends_end(site: Site, fault: Fault) -> AsyncIterator[None]:
    connection = await _connect(site)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND pid % 3 = $1",
            fault.pick(3),
        )
    finally:
        await connection.close()
    yield


@asynccontextmanager
async def _connections_taken(site: Site, fault: Fault) -> AsyncIterator[None]:
    """Sessions are ended, and before the server has new ones there are no more to be had."""
    taken: list[asyncpg.Connection[asyncpg.Record]] = [await _connect(site)]
    try:
        await taken[0].execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        with contextlib.suppress(asyncpg.PostgresError, OSError, TimeoutError):
            while len(taken) < 200:
                taken.append(await _connect(site))
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        for connection in taken:
            connection.terminate()


@asynccontextmanager
async def _failover(site: Site, fault: Fault) -> AsyncIterator[None]:
    """The primary dies, its synchronous standby takes over; afterwards the dead one is made its standby."""
    lost, standby = site.nodes
    await lost.kill()
    promoting = await asyncpg.connect(standby.dsn())
    try:
        await promoting.fetchval("SELECT pg_promote()")
    finally:
        await promoting.close()
    site.nodes.reverse()
    yield
    await site.make_standby(lost)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def _connect(site: Site) -> asyncpg.Connection[asyncpg.Record]:
    try:
        return await asyncpg.connect(site.primary.dsn(), timeout=5)
    except (asyncpg.PostgresError, OSError, TimeoutError) as error:
        raise NotNow from error


# Networks, on both sides of the hosts.


def _network(side: str, harm: str) -> Inflict:
    @asynccontextmanager
    async def inflict(site: Site, fault: Fault) -> AsyncIterator[None]:
        proxies = site.fronts if side == "clients" else [node.proxy for node in site.nodes]
        proxy = proxies[fault.pick(len(proxies))]
        if harm == "cut":
            proxy.cut()
            yield
        elif harm == "lost-answers":
            proxy.lose_answers(1 + fault.pick(5))
            yield
            await asyncio.sleep(fault.lasts)
            proxy.lose_answers(0)
        elif harm == "slow":
            proxy.delay = 0.02 + 0.2 * (fault.choice / _SPREAD)
            try:
                yield
                await asyncio.sleep(fault.lasts)
            finally:
                proxy.delay = 0.0
        elif harm == "half-open":
            proxy.half_open(1 + fault.pick(3))
            yield
            await asyncio.sleep(fault.lasts)
            proxy.cut()
        else:
            async with proxy.stalled() if harm == "stall" else proxy.away():
                yield
                await asyncio.sleep(fault.lasts)

    return inflict


# Redis and disks.


@asynccontextmanager
async def _redis_kill(site: Site, fault: Fault) -> AsyncIterator[None]:
    assert site.redis is not None
    await site.redis.kill()
    yield
    await asyncio.sleep(fault.lasts)
    await site.redis.start()


@asynccontextmanager
async def _redis_stop(site: Site, fault: Fault) -> AsyncIterator[None]:
    assert site.redis is not None
    site.redis.pause()
    try:
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        site.redis.resume()


@asynccontextmanager
async def _redis_flush(site: Site, fault: Fault) -> AsyncIterator[None]:
    assert site.redis is not None
    await site.redis.call("FLUSHALL")
    yield


def _disk_full(which: Callable[[Site], list[int]]) -> Inflict:
    @asynccontextmanager
    async def inflict(site: Site, fault: Fault) -> AsyncIterator[None]:
        fillers = [await asyncio.to_thread(fill, site.disks[number]) for number in which(site)]
        try:
            yield
            await asyncio.sleep(fault.lasts)
        finally:
            for filler in fillers:
                filler.unlink(missing_ok=True)

    return inflict


@asynccontextmanager
async def _clock_jump(site: Site, fault: Fault) -> AsyncIterator[None]:
    """The time of day of a host jumps, and later back; that of PostgreSQL does not."""
    clock = site.clocks[fault.pick(len(site.clocks))]
    clock.write_text(_JUMPS[fault.pick(len(_JUMPS))])
    try:
        yield
        await asyncio.sleep(fault.lasts)
    finally:
        clock.write_text("+0")


def _has_disks(site: Site) -> bool:
    return len(site.disks) == 1 + len(site.hosts)


def _has_redis(site: Site) -> bool:
    return site.redis is not None


KINDS: dict[str, Kind] = {
    "worker-kill": Kind("hosts", _worker_kill, weight=3),
    "worker-stop": Kind("hosts", _worker_stop, weight=2),
    "host-kill": Kind("hosts", _host_kill),
    "supervisor-kill": Kind("hosts", _supervisor_kill, weight=0.5),
    "host-restart": Kind("hosts", _host_restart, weight=0.5),
    "host-update": Kind("hosts", _host_update, lambda site: site.shape.older is not None, weight=3),
    "postgres-kill": Kind("postgres", _postgres_kill),
    "postgres-restart": Kind("postgres", _postgres_restart),
    "postgres-stop": Kind("postgres", _postgres_stop),
    "backend-crash": Kind("postgres", _backend_crash),
    "backends-end": Kind("postgres", _backends_end, weight=2),
    "connections-taken": Kind("postgres", _connections_taken),
    "failover": Kind("postgres", _failover, lambda site: site.shape.standby, weight=3),
    **{
        f"{side}-{harm}": Kind(side, _network(side, harm))
        for side in ("clients", "database")
        for harm in ("cut", "away", "stall", "slow", "half-open", "lost-answers")
    },
    "maintenance": Kind("maintenance", _maintenance),
    "clock-jump": Kind("clocks", _clock_jump, lambda site: bool(site.clocks), weight=2),
    "redis-kill": Kind("redis", _redis_kill, _has_redis),
    "redis-stop": Kind("redis", _redis_stop, _has_redis),
    "redis-flush": Kind("redis", _redis_flush, _has_redis),
    "spool-full": Kind("disks", _disk_full(lambda site: list(range(1, len(site.disks)))), _has_disks),
    "postgres-full": Kind("postgres", _disk_full(lambda site: [0]), _has_disks),
    "disks-full": Kind("postgres", _disk_full(lambda site: list(range(len(site.disks)))), _has_disks, weight=0.5),
}

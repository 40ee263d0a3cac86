"""Faults, at moments and of kinds that a seed decides. Each makes sure that it has hit something."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import asyncpg
import psutil

from tests.campaign.site import Site, fill
from tests.support.ageing import until
from tests.support.proxy import TcpProxy

# A worker that dies right after its start, several times in a row, makes its supervisor give up.
_YOUTH_SECONDS = 3.0
_TOGETHER = 0.2
"""How often a fault comes while the one before it lasts."""
_SOON_SECONDS = 0.2
_SELDOM = 0.1
"""How much less often a costly fault comes in a storm, where what is meant is many at once."""
_SPREAD = 1_000_003
_JUMPS = ("-7200", "-60", "-1.5", "+1.5", "+60", "+7200")
_PER_HOST = ("hosts", "clients", "peers", "packets", "clocks")
"""What every host has one of; of the rest there is one."""


@dataclass(frozen=True)
class Fault:
    """When it comes (seconds after the one before it), how long it lasts, what it hits, and a number to choose by."""

    number: int
    kind: str
    after: float
    lasts: float
    target: int
    choice: int

    @property
    def together(self) -> bool:
        """Whether it does not wait for the end of the one before it."""
        return self.after < _SOON_SECONDS

    def pick(self, count: int) -> int:
        return self.choice % count


class NotNow(Exception):
    """The fault cannot happen at this moment or at this site, or it has hit nothing."""


Inflict = Callable[[Site, Fault], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. Two that harm the same thing do not happen at the same time."""

    harms: str
    inflict: Inflict
    possible: Callable[[Site], bool] = lambda site: True
    weight: float = 1.0
    costly: bool = False
    """Whether processes start because of it."""
    harms_too: str = ""


@dataclass(frozen=True, order=True)
class Lane:
    """One thing that is harmed: faults in a lane come one after the other."""

    harms: str
    target: int = 0


def lanes_of(kind: str, target: int, hosts: int) -> list[Lane]:
    """What a fault takes for itself while it lasts."""
    found = [KINDS[kind].harms, KINDS[kind].harms_too]
    return sorted(Lane(name, target % hosts if name in _PER_HOST else 0) for name in found if name)


def takes_host_down(kind: str) -> bool:
    """Whether a host as a whole has to start again because of it."""
    return KINDS[kind].harms == "hosts" and KINDS[kind].costly and kind != "worker-kill"


def lanes(kinds: Sequence[str], hosts: int) -> list[Lane]:
    """Everything that some kinds of faults harm first of all."""
    harmed = {KINDS[kind].harms for kind in kinds}
    return sorted(Lane(name, target) for name in harmed for target in range(hosts if name in _PER_HOST else 1))


def schedule(seed: int, kinds: Sequence[str], pace: float) -> Iterator[Fault]:
    """Faults without end, the same for the same seed; `pace`: seconds between them, on average."""
    chance = random.Random(seed)
    weights = [KINDS[kind].weight for kind in kinds]
    for number in itertools.count(1) if kinds else ():
        (kind,) = chance.choices(kinds, weights)
        together = chance.random() < _TOGETHER
        after = chance.uniform(0.0, _SOON_SECONDS) if together else _SOON_SECONDS + chance.uniform(0.5, 1.5) * pace
        # Most are short; the others outlast what the server waits before it counts PostgreSQL as unavailable.
        lasts = chance.uniform(0.5, 3.0) if chance.random() < 0.3 else chance.uniform(0.05, 0.5)
        yield Fault(number, kind, after, lasts, chance.randrange(_SPREAD), chance.randrange(_SPREAD))


def storm_schedule(seed: int, lane: Lane, kinds: Sequence[str], pace: float) -> Iterator[Fault]:
    """Faults without end in one lane of a storm: short, and close upon each other."""
    own = [kind for kind in kinds if KINDS[kind].harms == lane.harms]
    chance = random.Random(f"{seed}/{lane.harms}/{lane.target}")
    weights = [KINDS[kind].weight * (_SELDOM if KINDS[kind].costly else 1.0) for kind in own]
    for number in itertools.count(1) if own else ():
        (kind,) = chance.choices(own, weights)
        lasts = chance.uniform(0.4, 1.5) if chance.random() < 0.1 else chance.uniform(0.05, 0.4)
        yield Fault(number, kind, chance.uniform(0.2, 1.8) * pace, lasts, lane.target, chance.randrange(_SPREAD))


def possible_kinds(site: Site, wanted: Sequence[str] = ()) -> list[str]:
    """The kinds that can happen at a site, of those that are wanted (all, when none are named)."""
    unknown = set(wanted) - set(KINDS)
    if unknown:
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return [name for name in wanted or KINDS if KINDS[name].possible(site)]


# Processes that are stopped.


@asynccontextmanager
async def _suspended(*processes: psutil.Process) -> AsyncIterator[None]:
    """Stopped while the block runs; the first of them was seen to be."""
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        await until(lambda: processes[0].status() == psutil.STATUS_STOPPED, 5)
        yield
    except (psutil.NoSuchProcess, TimeoutError) as error:
        raise NotNow from error
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Hosts: workers, supervisors, restarts.


async def _worker_kill(site: Site, fault: Fault) -> None:
    worker = _a_worker(site, fault)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: _is_over(worker), 10)


async def _worker_stop(site: Site, fault: Fault) -> None:
    async with _suspended(_a_worker(site, fault)):
        await asyncio.sleep(fault.lasts)


async def _supervisor_stop(site: Site, fault: Fault) -> None:
    host = site.hosts[_number(site, fault)]
    if host.process is None:
        raise NotNow
    async with _suspended(psutil.Process(host.process.pid)):
        await asyncio.sleep(fault.lasts)


async def _host_kill(site: Site, fault: Fault) -> None:
    number = _number(site, fault)
    site.hosts[number].kill()
    await _start_host(site, number)


async def _supervisor_kill(site: Site, fault: Fault) -> None:
    """Without it the workers end by themselves."""
    number = _number(site, fault)
    host = site.hosts[number]
    assert host.process is not None
    workers = host.worker_processes()
    host.process.kill()
    host.process.wait()
    await until(lambda: all(_is_over(worker) for worker in workers), 30)
    await _start_host(site, number)


async def _host_restart(site: Site, fault: Fault) -> None:
    number = _number(site, fault)
    await asyncio.to_thread(site.hosts[number].stop)
    await _start_host(site, number)


async def _host_update(site: Site, fault: Fault) -> None:
    """From the version before this one to this one."""
    number = _number(site, fault)
    if number in site.updated:
        raise NotNow
    await asyncio.to_thread(site.hosts[number].stop)
    site.updated.add(number)
    await _start_host(site, number)


def _number(site: Site, fault: Fault) -> int:
    return fault.target % len(site.hosts)


def _a_worker(site: Site, fault: Fault) -> psutil.Process:
    workers = site.hosts[_number(site, fault)].worker_processes()
    old = [worker for worker in workers if time.time() - worker.create_time() > _YOUTH_SECONDS]
    if len(workers) < 2 or not old:
        raise NotNow
    return old[fault.pick(len(old))]


async def _start_host(site: Site, number: int) -> None:
    site.start_host(number)
    await site.hosts[number].ready()


async def _maintenance(site: Site, fault: Fault) -> None:
    """An operator holds pushes back for a while."""
    await _switch_maintenance(site, enabled=True)
    try:
        await asyncio.sleep(fault.lasts)
    finally:
        await _switch_maintenance(site, enabled=False)


async def _switch_maintenance(site: Site, *, enabled: bool) -> None:
    url = f"{site.hosts[0].url}/api/v1/system/maintenance"
    # In a storm PostgreSQL and this host may be away in turn.
    async with asyncio.timeout(180), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.post(url, json={"enabled": enabled}) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


# PostgreSQL: its processes, its sessions, its disk.


async def _postgres_kill(site: Site, fault: Fault) -> None:
    await site.primary.kill()
    await asyncio.sleep(fault.lasts)
    await site.primary.start_again()


async def _postgres_restart(site: Site, fault: Fault) -> None:
    await site.primary.stop()
    await site.primary.start_again()


async def _postgres_stop(site: Site, fault: Fault) -> None:
    processes = site.primary.processes()
    if not processes:
        raise NotNow
    async with _suspended(*processes):
        await asyncio.sleep(fault.lasts)


async def _backend_crash(site: Site, fault: Fault) -> None:
    """PostgreSQL ends all sessions and recovers when one of its processes dies."""
    backend = _a_backend(site, fault)
    with contextlib.suppress(ProcessLookupError):
        os.kill(backend.pid, signal.SIGKILL)
    await until(lambda: _is_over(backend), 10)


async def _backend_stop(site: Site, fault: Fault) -> None:
    """One session stands still, with whatever locks it holds."""
    async with _suspended(_a_backend(site, fault)):
        await asyncio.sleep(fault.lasts)


def _a_backend(site: Site, fault: Fault) -> psutil.Process:
    backends = [
        process
        for process in site.primary.processes()[1:]
        if "127.0.0.1" in _title(process) or "local" in _title(process)
    ]
    if not backends:
        raise NotNow
    return backends[fault.pick(len(backends))]


async def _backends_end(site: Site, fault: Fault) -> None:
    connection = await _connect(site)
    try:
        ended = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND pid % 3 = $1",
            fault.pick(3),
        )
    finally:
        await connection.close()
    if not ended:
        raise NotNow


async def _connections_taken(site: Site, fault: Fault) -> None:
    """Sessions are ended, and before the server has new ones there are no more to be had."""
    taken: list[asyncpg.Connection[asyncpg.Record]] = [await _connect(site)]
    try:
        await taken[0].execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                taken.append(await asyncpg.connect(site.primary.dsn(), timeout=5))
        await asyncio.sleep(fault.lasts)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise NotNow from error
    finally:
        for connection in taken:
            connection.terminate()


async def _failover(site: Site, fault: Fault) -> None:
    """The primary dies, its synchronous standby takes over; afterwards the dead one is made its standby."""
    lost, standby = site.nodes
    await lost.kill()
    promoting = await asyncpg.connect(standby.dsn())
    try:
        await promoting.fetchval("SELECT pg_promote()")
    finally:
        await promoting.close()
    site.nodes.reverse()
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


# Networks: on both sides of the hosts, and between them.


def _network(side: str, harm: str) -> Inflict:
    async def inflict(site: Site, fault: Fault) -> None:
        proxies = {"clients": site.fronts, "peers": site.peers, "database": [site.primary.proxy]}[side]
        proxy = proxies[fault.target % len(proxies)]
        before = proxy.harmed
        await _harm(proxy, harm, fault)
        if proxy.harmed == before:
            raise NotNow

    return inflict


async def _harm(proxy: TcpProxy, harm: str, fault: Fault) -> None:
    if harm == "cut":
        proxy.cut(every=1 + fault.pick(3))
    elif harm == "lost-answers":
        proxy.lose_answers(1 + fault.pick(5))
        await asyncio.sleep(fault.lasts)
        proxy.lose_answers(0)
    elif harm == "slow":
        proxy.delay = 0.02 + 0.2 * (fault.choice / _SPREAD)
        try:
            await asyncio.sleep(fault.lasts)
        finally:
            proxy.delay = 0.0
    elif harm == "half-open":
        proxy.half_open(1 + fault.pick(3))
        await asyncio.sleep(fault.lasts)
        proxy.cut_silent()
    else:
        async with proxy.stalled() if harm == "stall" else proxy.away():
            await asyncio.sleep(fault.lasts)


async def _packets_lost(site: Site, fault: Fault) -> None:
    """Datagrams to a host do not arrive: some of them, or none at all."""
    network = site.datagrams[fault.target % len(site.datagrams)]
    before = network.lost
    network.loss = (0.3, 0.6, 1.0)[fault.pick(3)]
    try:
        await asyncio.sleep(fault.lasts)
    finally:
        network.loss = 0.0
    if network.lost == before:
        raise NotNow


# Redis, disks and clocks.


async def _redis_kill(site: Site, fault: Fault) -> None:
    assert site.redis is not None
    await site.redis.kill()
    await asyncio.sleep(fault.lasts)
    await site.redis.start()


async def _redis_stop(site: Site, fault: Fault) -> None:
    assert site.redis is not None
    async with _suspended(psutil.Process(site.redis.pid)):
        await asyncio.sleep(fault.lasts)


async def _redis_flush(site: Site, fault: Fault) -> None:
    assert site.redis is not None
    await site.redis.call("FLUSHALL")


def _disk_full(which: Callable[[Site], list[int]]) -> Inflict:
    async def inflict(site: Site, fault: Fault) -> None:
        disks = [site.disks[number] for number in which(site)]
        fillers = [await asyncio.to_thread(fill, disk) for disk in disks]
        try:
            if any(os.statvfs(disk).f_bavail for disk in disks):
                raise NotNow
            await asyncio.sleep(fault.lasts)
        finally:
            for filler in fillers:
                filler.unlink(missing_ok=True)

    return inflict


async def _clock_jump(site: Site, fault: Fault) -> None:
    """The time of day of a host jumps, and later back; that of PostgreSQL does not."""
    clock = site.clocks[fault.target % len(site.clocks)]
    clock.write_text(_JUMPS[fault.pick(len(_JUMPS))])
    try:
        await asyncio.sleep(fault.lasts)
    finally:
        clock.write_text("+0")


def _has_disks(site: Site) -> bool:
    return len(site.disks) == 1 + len(site.hosts)


def _has_redis(site: Site) -> bool:
    return site.redis is not None


def _has_peers(site: Site) -> bool:
    return len(site.hosts) > 1


_HARMS = ("cut", "away", "stall", "slow", "half-open", "lost-answers")
KINDS: dict[str, Kind] = {
    "worker-kill": Kind("hosts", _worker_kill, weight=3, costly=True),
    "worker-stop": Kind("hosts", _worker_stop, weight=2),
    "host-kill": Kind("hosts", _host_kill, costly=True),
    "supervisor-kill": Kind("hosts", _supervisor_kill, weight=0.5, costly=True),
    "supervisor-stop": Kind("hosts", _supervisor_stop, weight=0.5),
    "host-restart": Kind("hosts", _host_restart, weight=0.5, costly=True),
    "host-update": Kind("hosts", _host_update, lambda site: site.shape.older is not None, weight=3, costly=True),
    "postgres-kill": Kind("postgres", _postgres_kill, costly=True),
    "postgres-restart": Kind("postgres", _postgres_restart, costly=True),
    "postgres-stop": Kind("postgres", _postgres_stop),
    "backend-crash": Kind("postgres", _backend_crash, costly=True),
    "backend-stop": Kind("postgres", _backend_stop, weight=2),
    "backends-end": Kind("postgres", _backends_end, weight=2),
    "connections-taken": Kind("postgres", _connections_taken, costly=True),
    "failover": Kind("postgres", _failover, lambda site: site.shape.standby, weight=3, costly=True),
    **{
        f"{side}-{harm}": Kind(side, _network(side, harm), _has_peers if side == "peers" else lambda site: True)
        for side in ("clients", "database", "peers")
        for harm in _HARMS
    },
    "packets-lost": Kind("packets", _packets_lost, _has_peers, weight=3),
    "maintenance": Kind("maintenance", _maintenance),
    "clock-jump": Kind("clocks", _clock_jump, lambda site: bool(site.clocks), weight=2),
    "redis-kill": Kind("redis", _redis_kill, _has_redis),
    "redis-stop": Kind("redis", _redis_stop, _has_redis),
    "redis-flush": Kind("redis", _redis_flush, _has_redis),
    "spool-full": Kind("disks", _disk_full(lambda site: list(range(1, len(site.disks)))), _has_disks),
    "postgres-full": Kind("postgres", _disk_full(lambda site: [0]), _has_disks),
    "disks-full": Kind(
        "postgres", _disk_full(lambda site: list(range(len(site.disks)))), _has_disks, weight=0.5, harms_too="disks"
    ),
}

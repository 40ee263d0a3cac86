"""What ten open dashboards cost: throughput, and CPU of the server and PostgreSQL.

    python -m bench.dashboards [--seconds 10] [--repeat 2] [--dashboards 10] [--partitions 10000] [--connections 64]

The server holds 100 queues, of 100 partitions each, and three groups that lag behind. The load generator pushes 100
messages a request, alone and watched in turns. A dashboard reads the stream of events and asks, at its intervals, for
what the overview asks for. Dashboards run in a process of their own, which uses the same two cores as everything else:
what it takes itself is shown, for no server can make that cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.generator import Generator
from bench.processes import Usage
from bench.target import Target, fresh_server

STREAM = "/api/v1/events"
# What dashboard/src/pages/Overview.vue and App.vue ask for while everything changes, and every how many seconds.
POLLED = {
    "/api/v1/resources/overview": 5,
    "/api/v1/consumer-groups?limit=8&sort=time&order=desc": 2,
    "/api/v1/status/queues?sort=pending&order=desc&limit=8": 2,
    "/api/v1/status?includeQueues=false": 5,
    "/api/v1/analytics/queue-ops?busiest=0": 5,
    "/api/v1/analytics/retention": 15,
    "/health": 15,
}
ALLOWED = 0.03
FILL = (
    "INSERT INTO queen.queues (name) SELECT 'queue-' || n FROM generate_series(1, 100) n",
    "INSERT INTO queen.groups (name) SELECT 'group-' || n FROM generate_series(1, 3) n",
    "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at)"
    " SELECT q.id, p::text, 1000, now() FROM queen.queues q, generate_series(1, 100) p",
    "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
    " SELECT p.id, 100 * k, 100, now() - make_interval(hours => 9 - k), decode(repeat('00', 816), 'hex'), '\\x00'"
    " FROM queen.partitions p, generate_series(0, 9) k",
    "INSERT INTO queen.cursors (partition_id, group_id, committed)"
    " SELECT p.id, g.id, 100 * g.id FROM queen.partitions p, queen.groups g WHERE g.name LIKE 'group-%'",
    "VACUUM ANALYZE",
)


START_WITHIN_SECONDS = 60


@dataclass(frozen=True)
class Round:
    """One stretch of pushing: messages per second, and CPU microseconds of a message in the server and PostgreSQL."""

    rate: float
    server: float
    postgres: float


def watch(url: str, dashboards: int, stop: Any, ready: Any, report: Any) -> None:
    """The dashboards, in their own process; they report their CPU seconds and the latency of each path."""

    async def listen(session: aiohttp.ClientSession) -> None:
        async with session.get(url + STREAM, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass

    async def dashboard(number: int, took: dict[str, list[float]]) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(number / dashboards)
            stream = asyncio.create_task(listen(session))
            for second in itertools.count():
                due = time.monotonic() + 1
                for path, every in POLLED.items():
                    if second % every:
                        continue
                    begun = time.monotonic()
                    async with session.get(url + path) as answer:
                        answer.raise_for_status()
                        await answer.read()
                    took[path].append(time.monotonic() - begun)
                ready.set()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if stop.is_set():
                    break
                if stream.done():
                    stream.result()
                    raise RuntimeError("the stream has ended")
            stream.cancel()

    async def run() -> None:
        took: dict[str, list[float]] = {path: [] for path in POLLED}
        before = os.times()
        await asyncio.gather(*(dashboard(number, took) for number in range(dashboards)))
        after = os.times()
        report.put((after.user + after.system - before.user - before.system, took))

    asyncio.run(run())


@asynccontextmanager
async def watched(
    target: Target, dashboards: int, found: dict[str, list[float]], cpu: list[float]
) -> AsyncIterator[None]:
    """Dashboards look on while the block runs; afterwards `found` and `cpu` hold what they report."""
    context = multiprocessing.get_context("spawn")
    stop, ready, report = context.Event(), context.Event(), context.Queue()
    url = f"http://{target.host}:{target.port}"
    process = context.Process(target=watch, args=(url, dashboards, stop, ready, report))
    process.start()
    if not await asyncio.to_thread(ready.wait, START_WITHIN_SECONDS):
        process.kill()
        raise TimeoutError(f"the dashboards have not begun within {START_WITHIN_SECONDS} s")
    begun = time.monotonic()
    try:
        yield
    finally:
        stop.set()
        used, took = await asyncio.to_thread(report.get)
        cpu.append(used / (time.monotonic() - begun))
        for path, times in took.items():
            found.setdefault(path, []).extend(times)
        await asyncio.to_thread(process.join)


async def push(target: Target, generator: Generator, arguments: argparse.Namespace) -> Round:
    usage = Usage(target.watched)
    options = {"queue": "load", "messages": 100, "partitions": 16, "connections": arguments.connections}
    result = await generator.run(
        "push", options | {"seconds": arguments.seconds, "warmup": 1.0}, usage.start, usage.stop
    )
    assert usage.cpu is not None and result.errors.total == 0, result.errors
    server, postgres = (seconds * 1e6 / result.pushed for seconds in (usage.cpu.server, usage.cpu.postgres))
    return Round(result.pushed / result.seconds, server, postgres)


async def idle_cpu(target: Target, seconds: float) -> float:
    """Cores used by the server and PostgreSQL while idle."""
    usage = Usage(target.watched)
    usage.start()
    await asyncio.sleep(seconds)
    usage.stop()
    assert usage.cpu is not None
    return (usage.cpu.server + usage.cpu.postgres) / seconds


async def measure(arguments: argparse.Namespace) -> None:
    alone: list[Round] = []
    looked_at: list[Round] = []
    took: dict[str, list[float]] = {}
    own_cpu: list[float] = []
    async with fresh_server(arguments.workers) as target:
        assert target.database is not None
        connection = await target.database.connect()
        for statement in FILL:
            await connection.execute(statement.replace("(1, 100) p", f"(1, {arguments.partitions // 100}) p"))
        await connection.close()
        generator = Generator(target.host, target.port)
        await push(target, generator, arguments)
        for number in range(2 * arguments.repeat):
            # One before the other, then the other before the one: what the machine does besides harms both alike.
            for is_watched in (False, True) if number % 2 == 0 else (True, False):
                if is_watched:
                    async with watched(target, arguments.dashboards, took, own_cpu):
                        looked_at.append(await push(target, generator, arguments))
                else:
                    alone.append(await push(target, generator, arguments))
        quiet = await idle_cpu(target, arguments.seconds)
        async with watched(target, arguments.dashboards, {}, []):
            busy = await idle_cpu(target, arguments.seconds)
    print(f"{'':>10}{'msg/s':>12}{'lowest':>12}{'highest':>12}{'server':>10}{'PostgreSQL':>12}   CPU µs a message")
    for name, rounds in (("alone", alone), ("watched", looked_at)):
        rates = [each.rate for each in rounds]
        server, postgres = (
            statistics.median(getattr(each, part) for each in rounds) for part in ("server", "postgres")
        )
        cells = "".join(f"{rate:>12,.0f}" for rate in (statistics.median(rates), min(rates), max(rates)))
        print(f"{name:>10}{cells}{server:>10.2f}{postgres:>12.2f}")
    pairs = list(zip(alone, looked_at, strict=True))
    shares = [there.rate / here.rate for here, there in pairs]
    share = statistics.median(shares)
    wanted = "as wanted" if share >= 1 - ALLOWED else f"less than {1 - ALLOWED:.2f}"
    print(f"throughput, watched / alone: {share:.3f} ({min(shares):.3f} - {max(shares):.3f}): {wanted}")
    costs = [(there.server + there.postgres) / (here.server + here.postgres) for here, there in pairs]
    print(f"CPU a message, watched / alone: {statistics.median(costs):.3f} ({min(costs):.3f} - {max(costs):.3f})")
    print(f"the dashboards' own CPU: {statistics.median(own_cpu):.3f} cores of {os.cpu_count()}")
    print(f"idle server and PostgreSQL: {quiet:.3f} cores unwatched, {busy:.3f} watched")
    # Of a server without load: it is less noisy than the throughput of two rounds, and says nothing of what dashboards
    # cost by getting in the way of pushes. That is the ratio above, for which the machine has to be quiet.
    taken = (busy - quiet) / (os.cpu_count() or 1)
    verdict = f"at most {ALLOWED:.0%}" if taken <= ALLOWED else f"more than {ALLOWED:.0%}"
    each = 1000 * (busy - quiet) / arguments.dashboards
    print(
        f"{arguments.dashboards} dashboards take {taken:.1%} of an idle machine,"
        f" {each:.1f} ms of CPU a second each: {verdict}"
    )
    for path, times in took.items():
        times.sort()
        middle, high = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(f"{path:40} {len(times):5} asked   p50 {middle * 1000:6.1f} ms   p99 {high * 1000:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round is measured")
    parser.add_argument(
        "--repeat", type=int, default=2, help="how often they take turns: alone, watched, watched, alone"
    )
    parser.add_argument("--dashboards", type=int, default=10, help="how many look on")
    parser.add_argument("--partitions", type=int, default=10_000, help="in 100 queues, for each of three groups")
    parser.add_argument("--connections", type=int, default=64, help="that push")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

"""What ten open dashboards cost: throughput, and CPU of the server and PostgreSQL.

    python -m bench.dashboards [--pairs 40] [--slice 3] [--dashboards 10] [--partitions 10000] [--connections 64]

The server holds 100 queues, of 100 partitions each, and three groups that lag behind. The load generator pushes 100
messages a request without a pause; meanwhile ten dashboards look on for a slice of some seconds, look away for the
next, and so on, in an order that alternates. A slice is compared with its neighbour alone, so what the machine does
besides, and what changes while the database grows, harms both alike; the verdict is the median of all pairs, with the
bounds between which the true median lies with 95 % confidence. A dashboard reads the stream of events and asks, at its
intervals, for what the overview asks for. Dashboards run in a process of their own, which uses the same cores as
everything else: what it takes itself is shown, for no server can make that cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvloop

from bench.generator import Generator
from bench.processes import Usage
from bench.target import Target, fresh_server

STREAM = "/api/v1/events"
# What dashboard/src/pages/Overview.vue and App.vue ask for while everything changes, and every how many seconds.
POLLED = {
    "/api/v1/resources/overview": 5,
    "/api/v1/consumer-groups?limit=8&sort=time&order=desc": 5,
    "/api/v1/status/queues?sort=pending&order=desc&limit=8": 5,
    "/api/v1/status?includeQueues=false": 15,
    "/api/v1/analytics/queue-ops?busiest=0": 15,
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


# What was appended to the queue that is pushed to.
STORED = (
    "SELECT coalesce(sum(p.next_offset), 0)::bigint FROM queen.partitions p"
    " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = 'load'"
)
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)")
BROWSER = "Accept-Encoding: gzip, deflate, br\r\nAccept-Language: en\r\nUser-Agent: bench\r\n"
START_WITHIN_SECONDS = 60
SWITCH_SECONDS = 0.05
WARM_SECONDS = 5.0
# Longer than any run: it is ended after the last slice.
LOAD_SECONDS = 6 * 3600.0


SETTLE_SECONDS = 1.0
"""After a switch, before a slice is measured."""


@dataclass(frozen=True)
class Slice:
    """Some seconds of pushing: messages per second, and CPU microseconds of a message in the server and PostgreSQL."""

    rate: float
    server: float
    postgres: float

    @property
    def cpu(self) -> float:
        return self.server + self.postgres


class Connection(asyncio.Protocol):
    """A connection of a page to the server. Answers are read, not decoded: pages do that on machines of their own."""

    def __init__(self, host: str) -> None:
        self._headers = f"Host: {host}\r\n{BROWSER}\r\n"
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._end = 0
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # That of uvloop is none of asyncio's by its class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError("the server has closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            return  # Of the stream, whose headers have come.
        self._received += data
        if not self._end:
            head, end, _ = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                self._fail(RuntimeError(self._received.decode()))
                return
            length = LENGTH.search(head)
            self._end = len(head) + len(end) + (int(length[1]) if length else 0)
        if len(self._received) >= self._end:
            self._answered.set_result(None)

    async def get(self, path: str, accept: str = "application/json") -> None:
        """Returns when all of the answer is there; of the stream, when it has begun."""
        assert self._transport is not None
        self._received, self._end = b"", 0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(f"GET {path} HTTP/1.1\r\nAccept: {accept}\r\n{self._headers}".encode())
        await self._answered

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


async def look(target: tuple[str, int], seconds: Iterator[int], took: dict[str, list[float]], ready: Any) -> None:
    """A page that is open until it is cancelled.

    `seconds` goes on after a pause: every slice has its share of what is seldom asked for, and none the rush of an
    opening.
    """
    loop = asyncio.get_running_loop()
    connect = partial(Connection, f"{target[0]}:{target[1]}")
    (_, stream), (_, calls) = [await loop.create_connection(connect, *target) for _ in range(2)]
    try:
        await stream.get(STREAM, "text/event-stream")
        due = loop.time()
        for number, second in enumerate(seconds):
            for path, every in POLLED.items():
                if second % every:
                    continue
                begun = time.monotonic()
                await calls.get(path)
                took[path].append(time.monotonic() - begun)
            if not number:
                ready.set()
            due = max(due + 1, loop.time())
            await asyncio.sleep(due - loop.time())
            if stream.closed:
                raise RuntimeError("the stream has ended")
    finally:
        stream.close()
        calls.close()


def watch(host: str, port: int, dashboards: int, stop: Any, looking: Any, ready: Any, report: Any) -> None:
    """The dashboards, in their own process; they report their CPU seconds and the latency of each path.

    While `looking` is not set they are hidden tabs, which have no stream and ask for nothing.
    """

    async def page(number: int, seconds: Iterator[int], took: dict[str, list[float]]) -> None:
        await asyncio.sleep(number / dashboards)
        await look((host, port), seconds, took, ready)

    async def run() -> None:
        took: dict[str, list[float]] = {path: [] for path in POLLED}
        seconds = [itertools.count(number) for number in range(dashboards)]
        used = 0.0
        while not stop.is_set():
            if not looking.is_set():
                await asyncio.sleep(SWITCH_SECONDS)
                continue
            before = time.process_time()
            pages = [asyncio.create_task(page(number, seconds[number], took)) for number in range(dashboards)]
            while looking.is_set() and not stop.is_set():
                done, _ = await asyncio.wait(pages, timeout=SWITCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            for one in pages:
                one.cancel()
            await asyncio.gather(*pages, return_exceptions=True)
            used += time.process_time() - before
        report.put((used, took))

    uvloop.run(run())


class Dashboards:
    """Dashboards that look on, or do not."""

    def __init__(self, target: Target, dashboards: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, self._looking, self._ready = context.Event(), context.Event(), context.Event()
        self._report = context.Queue()
        told = (target.host, target.port, dashboards, self._stop, self._looking, self._ready, self._report)
        self._process = context.Process(target=watch, args=told)
        self._process.start()

    async def switch(self, looking: bool) -> None:
        """Open or hide all of them; returns when that is so."""
        if not looking:
            self._looking.clear()
        elif not self._looking.is_set():
            self._ready.clear()
            self._looking.set()
            if not await asyncio.to_thread(self._ready.wait, START_WITHIN_SECONDS):
                raise TimeoutError(f"the dashboards have not begun within {START_WITHIN_SECONDS} s")

    async def end(self) -> tuple[float, dict[str, list[float]]]:
        """Close them; their CPU seconds, and how long each path took."""
        self._stop.set()
        report: tuple[float, dict[str, list[float]]] = await asyncio.to_thread(self._report.get)
        await asyncio.to_thread(self._process.join)
        return report

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()


async def measure_slice(target: Target, stored: Callable[[], Awaitable[int]], seconds: float) -> Slice:
    await asyncio.sleep(SETTLE_SECONDS)
    begun, before, cpu = time.perf_counter(), await stored(), target.watched.cpu()
    await asyncio.sleep(seconds)
    took, after, used = time.perf_counter() - begun, await stored(), target.watched.cpu().since(cpu)
    messages = max(1, after - before)
    return Slice(messages / took, used.server * 1e6 / messages, used.postgres * 1e6 / messages)


async def idle_cpu(target: Target, seconds: float) -> float:
    """Cores used by the server and PostgreSQL while idle."""
    usage = Usage(target.watched)
    usage.start()
    await asyncio.sleep(seconds)
    usage.stop()
    assert usage.cpu is not None
    return (usage.cpu.server + usage.cpu.postgres) / seconds


def bounds(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between which of the ratios the true one lies with 95 % confidence (by the sign test)."""
    ordered, count = sorted(ratios), len(ratios)
    outside = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return statistics.median(ordered), ordered[outside], ordered[count - 1 - outside]


async def measure(arguments: argparse.Namespace) -> None:
    alone: list[Slice] = []
    looked_at: list[Slice] = []
    async with fresh_server(arguments.workers) as target:
        assert target.database is not None
        connection = await target.database.connect()
        for statement in FILL:
            await connection.execute(statement.replace("(1, 100) p", f"(1, {arguments.partitions // 100}) p"))
        generator = Generator(target.host, target.port)

        async def stored() -> int:
            count: int = await connection.fetchval(STORED)
            return count

        dashboards = Dashboards(target, arguments.dashboards)
        options = {"queue": "load", "messages": 100, "partitions": 16, "connections": arguments.connections}
        load = asyncio.create_task(generator.run("push", options | {"seconds": LOAD_SECONDS, "warmup": 1.0}))
        try:
            await dashboards.switch(True)
            await asyncio.sleep(WARM_SECONDS)
            for number in range(arguments.pairs):
                # One before the other, then the other before the one.
                for looking in (False, True) if number % 2 == 0 else (True, False):
                    await dashboards.switch(looking)
                    (looked_at if looking else alone).append(await measure_slice(target, stored, arguments.slice))
                    if load.done():
                        raise RuntimeError("the load has ended before the last slice")
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await dashboards.switch(False)
            await asyncio.sleep(WARM_SECONDS)
            quiet = await idle_cpu(target, 10.0)
            await dashboards.switch(True)
            busy = await idle_cpu(target, 10.0)
            own, took = await dashboards.end()
        finally:
            load.cancel()
            dashboards.kill()
            await connection.close()
    report(alone, looked_at)
    looked = arguments.pairs * (arguments.slice + SETTLE_SECONDS) + 10.0
    print(
        f"the dashboards themselves, which share the {os.cpu_count()} cores: {1000 * own / looked:.0f} ms of CPU a"
        f" second, {own / looked / (os.cpu_count() or 1):.2%} of the machine"
    )
    taken = (busy - quiet) / (os.cpu_count() or 1)
    each = 1000 * (busy - quiet) / arguments.dashboards
    print(
        f"without load: {quiet:.3f} cores unwatched, {busy:.3f} watched: {taken:.1%} of the machine,"
        f" {each:.1f} ms of CPU a second for each dashboard"
    )
    for path, times in took.items():
        times.sort()
        middle, high = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(f"{path:40} {len(times):5} asked   p50 {middle * 1000:6.1f} ms   p99 {high * 1000:6.1f} ms")


def report(alone: Sequence[Slice], looked_at: Sequence[Slice]) -> None:
    """The medians, and the ratios of neighbours with their bounds."""
    print(f"{'':>10}{'msg/s':>12}{'lowest':>12}{'highest':>12}{'server':>10}{'PostgreSQL':>12}   CPU µs a message")
    for name, slices in (("alone", alone), ("watched", looked_at)):
        rates = [each.rate for each in slices]
        server, postgres = (
            statistics.median(getattr(each, part) for each in slices) for part in ("server", "postgres")
        )
        cells = "".join(f"{rate:>12,.0f}" for rate in (statistics.median(rates), min(rates), max(rates)))
        print(f"{name:>10}{cells}{server:>10.2f}{postgres:>12.2f}")
    pairs = list(zip(alone, looked_at, strict=True))
    share, low, high = bounds([there.rate / here.rate for here, there in pairs])
    if low >= 1 - ALLOWED:
        verdict = f"they cost at most {ALLOWED:.0%}"
    elif high < 1 - ALLOWED:
        verdict = f"they cost more than {ALLOWED:.0%}"
    elif share >= 1 - ALLOWED:
        verdict = f"probably at most {ALLOWED:.0%}; more pairs, or a quieter machine, decide it"
    else:
        verdict = f"probably more than {ALLOWED:.0%}; more pairs, or a quieter machine, decide it"
    print(f"throughput, watched / alone: {share:.3f} ({low:.3f} to {high:.3f}, 95 %): {verdict}")
    cost, low, high = bounds([there.cpu / here.cpu for here, there in pairs])
    print(f"CPU a message, watched / alone: {cost:.3f} ({low:.3f} to {high:.3f}, 95 %)")
    extra, low, high = bounds([1000 * (there.cpu - here.cpu) * here.rate / 1e6 for here, there in pairs])
    load = statistics.median(here.cpu * here.rate / 1e6 for here in alone)
    print(
        f"CPU of the load: {load:.2f} cores; of the dashboards, at the rate of the load alone: {extra:.0f} ms a second "
        f"({low:.0f} to {high:.0f}, 95 %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="slices with and without dashboards")
    parser.add_argument("--slice", type=float, default=3.0, help="seconds of each")
    parser.add_argument("--dashboards", type=int, default=10, help="how many look on")
    parser.add_argument("--partitions", type=int, default=10_000, help="in 100 queues, for each of three groups")
    parser.add_argument("--connections", type=int, default=64, help="that push")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

"""Samples a worker, publishes its report to the other workers of the host, and writes history to PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import asyncpg
import msgspec
import psutil

from queen.broker.broker import Broker
from queen.errors import QueenError
from queen.metrics.counters import Gauge, WorkerTally
from queen.metrics.report import Report, Row, SnapshotStore, new_life


class ProcessStats:
    """Statistics of one worker process. Counters of its components are copied into the tally."""

    def __init__(self, broker: Broker) -> None:
        self._brokers = broker.siblings or (broker,)
        self._process = psutil.Process()
        self._cpu = self._process.cpu_times()
        self._cpu_at = time.monotonic()
        self._errors = 0
        self._batches = 0

    def gauges(self) -> dict[str, float]:
        """Gauges by column name. CPU is in hundredths of a percent of one core."""
        pools = [broker.database.usage for broker in self._brokers]
        memory = self._process.memory_info()
        user, system = self._cpu_use()
        waiting = sum(
            len(broker.pusher.batcher) + len(broker.acker.batcher) + len(broker.renewer.batcher)
            for broker in self._brokers
        )
        return {
            "free_slots": sum(pool.largest - pool.active for pool in pools),
            "job_queue": waiting,
            "db_connections": sum(pool.size + pool.links for pool in pools),
            "pool_size": sum(pool.size for pool in pools),
            "pool_idle": sum(pool.idle for pool in pools),
            "pool_active": sum(pool.active for pool in pools),
            "cpu_user": user,
            "cpu_system": system,
            "rss_bytes": memory.rss,
            "virtual_bytes": memory.vms,
        }

    def cpu_seconds(self) -> tuple[float, float]:
        """User and system CPU time of the process."""
        times = self._process.cpu_times()
        return times.user, times.system

    def count(self, total: WorkerTally) -> None:
        """Add what was counted since the last call."""
        errors = sum(broker.database.errors for broker in self._brokers)
        batches = sum(
            broker.claimer.batches
            + sum(batcher.batches for batcher in (broker.pusher.batcher, broker.acker.batcher, broker.renewer.batcher))
            for broker in self._brokers
        )
        total.db_errors += errors - self._errors
        total.batches += batches - self._batches
        self._errors, self._batches = errors, batches

    def _cpu_use(self) -> tuple[float, float]:
        times, now = self._process.cpu_times(), time.monotonic()
        elapsed = max(0.001, now - self._cpu_at)
        use = [10_000 * (getattr(times, what) - getattr(self._cpu, what)) / elapsed for what in ("user", "system")]
        self._cpu, self._cpu_at = times, now
        return max(0.0, use[0]), max(0.0, use[1])


log = logging.getLogger(__name__)

_RATE_SECONDS: Final = 60.0
_LAST_FLUSH_SECONDS: Final = 1.0
# Publishing takes at most a hundredth of a worker's time, however many queues are in the report.
_PUBLISH_SHARE: Final = 100.0
_IDLE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class HttpStats:
    """Statistics of the HTTP server."""

    statuses: dict[int, int]
    """Responses by status; a restarted worker continues the counters of its predecessor."""
    in_flight: Callable[[], int]
    """Requests in flight."""
    connections: Callable[[], list[tuple[str, str]]] = list
    """The address of each client, and the route that serves its request, or nothing."""


class Recorder:
    """Makes and publishes the reports of one worker, and flushes its counters to PostgreSQL."""

    def __init__(self, broker: Broker, snapshots: SnapshotStore, host: str, http: HttpStats) -> None:
        settings = broker.settings
        self._broker = broker
        self._meter = broker.meter
        self._snapshots = snapshots
        self._http = http
        self._process_stats = ProcessStats(broker)
        self._sample_seconds = settings.metrics_sample_interval_ms / 1000
        self._flush_seconds = float(settings.metrics_aggregate_interval_s)
        self._host = host
        self.port = 0
        self._started_at = time.time()
        self._life = new_life()
        self._flush = 1
        self._flushed_at = self._started_at
        self._base = self._meter.total.copy()
        self._queue_bases = {name: tally.copy() for name, tally in self._meter.queues.items()}
        self._unsent: Report | None = None
        self._cpu_before = (0.0, 0.0)
        self._gauges: dict[str, Gauge] = {}
        self._parked: dict[str, Gauge] = {}
        self._rates: deque[tuple[float, int, int]] = deque()
        self._used_at: dict[str, float] = {}
        self._publish_after = 0.0
        self._flushing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def gone_after(self) -> float:
        """Seconds without a flush after which a worker is considered gone."""
        return 2.5 * self._flush_seconds

    @property
    def shares_state(self) -> bool:
        """Whether notifications are exchanged with other hosts."""
        return self._broker.peers.enabled

    def start(self) -> None:
        """Continue the report of the predecessor of this worker, if there was one."""
        before = self._snapshots.own()
        if before is not None:
            self._resume(before)
        self._sample(0.0)
        self._tasks = [asyncio.create_task(self._keep_sampling()), asyncio.create_task(self._keep_flushing())]

    async def stop(self) -> None:
        """Flush for the last time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(_LAST_FLUSH_SECONDS):
                await self.flush()
        except TimeoutError:
            log.warning(
                "last flush of metrics timed out after %g s; metrics of the last minute are lost", _LAST_FLUSH_SECONDS
            )

    def report(self) -> Report:
        """The current report of this worker."""
        self._process_stats.count(self._meter.total)
        self._meter.total.http_responses = sum(self._http.statuses.values())
        return Report(
            life=self._life,
            host=self._host,
            port=self.port,
            worker_id=self._broker.worker_id,
            pid=os.getpid(),
            started_at=self._started_at,
            at=time.time(),
            flush=self._flush,
            flushed_at=self._flushed_at,
            total=self._meter.total,
            base=self._base,
            queues=self._meter.queues,
            queue_bases=self._queue_bases,
            histograms=dict(self._meter.histograms()),
            gauges=self._gauges,
            parked=self._parked,
            statuses=self._http.statuses,
            cpu_seconds=self._cpu_seconds(),
            rates=self._rate(),
            topics=self._meter.topics,
            topic_requests=self._meter.topic_requests,
            notification_errors=self._meter.notification_errors,
            done=self._meter.all_done(),
            connections=Counter(map("\n".join, self._http.connections())),
            unsent=self._unsent,
        )

    async def reports(self) -> list[Report]:
        """Reports of all workers of this host: this one's current, the others' as published."""
        own = self.report().copy()
        return sorted([own, *await self._snapshots.others()], key=lambda report: report.worker_id)

    async def live_reports(self) -> list[Report]:
        """The same without a copy: the counters of this worker go on changing."""
        others = await self._snapshots.others()
        return sorted([self.report(), *others], key=lambda report: report.worker_id)

    async def published_reports(self) -> list[Report]:
        """The same, published first: if this worker dies, counters that were shown do not decrease."""
        own = await self._publish()
        return sorted([own, *await self._snapshots.others()], key=lambda report: report.worker_id)

    async def flush(self) -> None:
        """Write to PostgreSQL what was counted since the last flush; a failed flush is repeated later."""
        async with self._flushing:
            if self._unsent is not None and not await self._send(self._unsent):
                return
            self._unsent = self._cut()
            await self._send(self._unsent)
        await self._publish()

    def _cpu_seconds(self) -> tuple[float, float]:
        user, system = self._process_stats.cpu_seconds()
        return user + self._cpu_before[0], system + self._cpu_before[1]

    def _resume(self, before: Report) -> None:
        self._meter.resume(before)
        self._life, self._flush, self._flushed_at = before.life, before.flush, before.flushed_at
        self._base, self._queue_bases = before.base, before.queue_bases
        self._unsent = before.unsent
        self._cpu_before = before.cpu_seconds
        for status, count in before.statuses.items():
            self._http.statuses[status] = self._http.statuses.get(status, 0) + count

    async def _keep_sampling(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._sample_seconds
            await asyncio.sleep(self._sample_seconds)
            self._sample(max(0.0, loop.time() - due) * 1000)
            if loop.time() >= self._publish_after:
                await self._publish()

    async def _publish(self) -> Report:
        """Publish the current report to the other workers, and return it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        report = self.report().copy()
        try:
            await self._snapshots.publish(report)
        except OSError as error:
            log.warning("could not publish the metrics of this worker to the others: %s", error)
        self._publish_after = loop.time() + _PUBLISH_SHARE * (loop.time() - began) - self._sample_seconds
        return report

    def _sample(self, loop_lag_ms: float) -> None:
        parked: dict[str, int] = {}
        for broker in self._broker.siblings or (self._broker,):
            parked |= broker.popper.parked_by_queue()
        sampled = self._process_stats.gauges() | {
            "loop_lag_ms": loop_lag_ms,
            "in_flight": self._http.in_flight(),
            "parked": sum(parked.values()),
        }
        for name, value in sampled.items():
            self._gauges.setdefault(name, Gauge()).sample(value)
        for name in parked.keys() | self._parked.keys():
            self._parked.setdefault(name, Gauge()).sample(parked.get(name, 0))
        self._note_rate()

    def _note_rate(self) -> None:
        total, now = self._meter.total, time.monotonic()
        answers = sum(self._http.statuses.values())
        self._rates.append((now, answers, total.push_messages + total.pop_messages))
        while self._rates[0][0] < now - _RATE_SECONDS:
            self._rates.popleft()

    def _rate(self) -> tuple[float, float]:
        """HTTP responses and messages per second since the first sample kept."""
        then, answers, messages = self._rates[0]
        total, elapsed = self._meter.total, max(1.0, time.monotonic() - then)
        moved = total.push_messages + total.pop_messages - messages
        return (sum(self._http.statuses.values()) - answers) / elapsed, moved / elapsed

    async def _keep_flushing(self) -> None:
        while True:
            now = time.time()
            # On the minute, staggered by worker.
            due = math.floor(now / self._flush_seconds + 1) * self._flush_seconds
            apart = min(0.1, self._flush_seconds / 50) * (self._broker.worker_id % 10)
            await asyncio.sleep(due + apart - now)
            try:
                await self.flush()
            except Exception:
                # A failed flush must not end the loop.
                log.exception("flush of metrics failed; retrying with the next one")

    def _cut(self) -> Report:
        """Start a new flush interval; returns the report of the last one."""
        # A copy, because the counters continue.
        report = self.report().copy()
        now = report.at
        for name, tally in self._meter.queues.items():
            if tally != self._queue_bases.get(name):
                self._used_at[name] = now
            tally.lag_max_ms = 0.0
        self._meter.total.lag_max_ms = 0.0
        self._forget_idle(now)
        self._base = self._meter.total.copy()
        self._queue_bases = {name: tally.copy() for name, tally in self._meter.queues.items()}
        self._gauges, self._parked = {}, {}
        self._flush += 1
        self._flushed_at = now
        self._sample(0.0)
        return report

    def _forget_idle(self, now: float) -> None:
        idle = sorted((at, name) for name, at in self._used_at.items() if at < now - _IDLE_SECONDS)
        self._meter.forget_idle(name for _, name in idle)
        self._used_at = {name: at for name, at in self._used_at.items() if name in self._meter.queues}

    async def _send(self, report: Report) -> bool:
        """Whether it was stored. Sending it twice is harmless."""
        database = self._broker.database
        queues = report.queue_rows()
        try:
            counts = await database.fetch("partition_counts", [row["queue_name"] for row in queues])
            async with database.transaction() as transaction:
                await transaction.fetch("flush_life", _json(report.life_row()))
                await transaction.fetch(
                    "flush_minutes",
                    _json(report.worker_rows()),
                    _json(_with_counts(queues, {row["name"]: row["partitions"] for row in counts})),
                )
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("flush of metrics failed, retrying with the next one: %s", error)
            return False
        if self._unsent is report:
            self._unsent = None
        return True


def _with_counts(rows: list[Row], counts: dict[str, int]) -> list[Row]:
    return [row | {"partition_count": counts.get(row["queue_name"])} for row in rows]


def _json(value: Row | list[Row]) -> str:
    return msgspec.json.encode(value).decode()

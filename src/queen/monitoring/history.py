"""History: time series of what the workers of all hosts have counted.

What the workers of this host have counted but not written yet is part of it, so that a server just started has
something to show; of other hosts the running minute is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, Final

import msgspec
from msgspec import UNSET

from queen.concurrency import chunked_map
from queen.metrics.counters import WorkerTally
from queen.metrics.report import Row
from queen.monitoring.recorder import Recorder
from queen.storage.database import Database, Record
from queen.wire.api.monitoring.analytics import (
    Cpu,
    Memory,
    Parked,
    ParkedPoint,
    ParkedWorker,
    Pool,
    PopLagPoint,
    QueueOperations,
    QueuePoint,
    Registries,
    Removed,
    RemovedPoint,
    Replica,
    Retention,
    RolledUp,
    RolledUpGroup,
    RolledUpQueue,
    Sampled,
    SystemMetrics,
    SystemPoint,
    SystemSample,
    ThreadPool,
    ThreadPools,
)
from queen.wire.api.monitoring.status import TimeRange as ShownRange
from queen.wire.times import iso_millis, iso_seconds

_BUCKETS: Final = ((60, 1), (6 * 60, 5), (24 * 60, 15), (7 * 24 * 60, 60))
_LARGEST_BUCKET: Final = 360


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A stretch of time, cut into buckets whose size follows from its length."""

    since: datetime
    until: datetime

    @property
    def bucket_minutes(self) -> int:
        minutes = (self.until - self.since) / timedelta(minutes=1)
        return next((size for longest, size in _BUCKETS if minutes <= longest), _LARGEST_BUCKET)

    def seconds_in(self, bucket: datetime) -> float:
        """How much of a bucket is over: what happened in it is divided by that to get a rate."""
        return max(1.0, min(self.bucket_minutes * 60, (datetime.now(UTC) - bucket).total_seconds()))

    def shown(self) -> ShownRange:
        return ShownRange(iso_millis(self.since), iso_millis(self.until))


class History:
    """Reads the history of one shard."""

    def __init__(self, database: Database, recorder: Recorder) -> None:
        self._database = database
        self._recorder = recorder

    async def workers(self, times: TimeRange, host: str = "", worker_id: int | None = None) -> list[Record]:
        """Counters summed over all workers, newest bucket first."""
        return await self._database.fetch(
            "worker_series",
            times.since,
            times.until,
            times.bucket_minutes,
            await self._pending_workers(),
            host,
            worker_id,
        )

    async def worker_series(self, times: TimeRange, host: str = "", worker_id: int | None = None) -> list[Record]:
        """Series of each worker."""
        return await self._database.fetch(
            "workers_seen", times.since, times.until, await self._pending_workers(), host, worker_id
        )

    async def queues(
        self, times: TimeRange, names: Sequence[str] | None = None, busiest: int | None = None
    ) -> list[Record]:
        """What was counted for queues (or for these alone), oldest bucket first.

        With `busiest`, for that many of them, and for all together, whose name is empty.
        """
        return await self._database.fetch(
            "queue_series",
            times.since,
            times.until,
            times.bucket_minutes,
            await self._pending_queues(),
            names,
            busiest,
        )

    async def pop_lags(self, times: TimeRange) -> list[Record]:
        """Age of popped messages by queue."""
        return await self._database.fetch("queue_pop_lags", times.since, times.until, await self._pending_queues())

    async def recent(self, span: timedelta) -> Record:
        """The current rates of all workers, in one row."""
        now = datetime.now(UTC)
        (row,) = await self._database.fetch("recent_work", now - span, now, await self._pending_workers())
        return row

    async def lifetime(self) -> WorkerTally:
        """Totals of all workers of all hosts since the beginning; other hosts as of their last flush."""
        reports = await self._recorder.reports()
        (row,) = await self._database.fetch("lifetime_totals", [report.life for report in reports])
        total = WorkerTally(**dict(row))
        for report in reports:
            total.add(report.total)
        return total

    async def age(self) -> int:
        """Age in seconds of the oldest flush of a running worker; 0 with one host."""
        lives = [report.life for report in await self._recorder.reports()]
        (row,) = await self._database.fetch("oldest_flush", lives, self._recorder.gone_after)
        return int(row["age"])

    async def system_metrics(self, times: TimeRange, host: str, worker_id: int | None) -> SystemMetrics:
        """CPU, memory and connections of each worker; `shared_state` is the setting of this host."""
        shares = self._recorder.shares_state
        rows = await self._database.fetch(
            "system_series",
            times.since,
            times.until,
            times.bucket_minutes,
            await self._pending_workers(),
            host,
            worker_id,
        )
        replicas: dict[tuple[str, int, int], list[SystemPoint]] = {}
        for row in rows:
            points = replicas.setdefault((row["host"], row["port"], row["worker_id"]), [])
            points.append(SystemPoint(iso_seconds(row["bucket"]), row["samples"], _system(row, shares)))
        return SystemMetrics(
            times.shown(),
            [Replica(*key, points) for key, points in replicas.items()],
            len(replicas),
            times.bucket_minutes,
            len({row["bucket"] for row in rows}),
        )

    async def queue_lag(self, times: TimeRange, names: Sequence[str] | None) -> list[PopLagPoint]:
        """Age of messages when they were popped, by minute, newest first."""
        rows = await self._database.fetch(
            "queue_lag_series", times.since, times.until, 1, await self._pending_queues(), names
        )
        return await chunked_map(partial(_lag_point, cache(iso_seconds)), rows)

    async def queue_operations(
        self, times: TimeRange, names: Sequence[str] | None, busiest: int | None
    ) -> QueueOperations:
        """Everything that was counted for queues; with `busiest`, for that many of them and for all together."""
        rows = await self.queues(times, names, busiest)
        points = await chunked_map(partial(_operations, cache(iso_seconds), cache(times.seconds_in)), rows)
        series = [point for point in points if point.queue_name]
        listed = sorted({point.queue_name for point in series})
        together = UNSET if busiest is None else [point for point in points if not point.queue_name]
        return QueueOperations(times.shown(), times.bucket_minutes, series, listed, together)

    async def parked(self, times: TimeRange, names: Sequence[str] | None) -> Parked:
        """Waiting pops by queue."""
        rows = await self._database.fetch(
            "parked_series", times.since, times.until, times.bucket_minutes, await self._pending_queues(), names
        )
        series = [
            ParkedPoint(
                iso_seconds(row["bucket"]),
                row["queue_name"],
                row["host"],
                row["worker_id"],
                round(row["parked_seconds"] / times.seconds_in(row["bucket"]), 2),
            )
            for row in rows
        ]
        workers = sorted({(row["host"], row["worker_id"]) for row in rows})
        return Parked(times.shown(), times.bucket_minutes, series, [ParkedWorker(*worker) for worker in workers])

    async def retention(self, times: TimeRange, queue: str) -> Retention:
        """Messages removed by retention, eviction and expiry."""
        rows = await self._database.fetch("retention_series", times.since, times.until, times.bucket_minutes, queue)
        columns = ("retention", "completed_retention", "eviction", "messages", "events")
        series = [RemovedPoint(*(row[column] for column in columns), bucket=iso_seconds(row["bucket"])) for row in rows]
        totals = Removed(*(sum(row[column] for row in rows) for column in columns))
        return Retention(times.shown(), times.bucket_minutes, series, totals)

    async def _pending_workers(self) -> str:
        return _json([row for report in await self._recorder.reports() for row in report.worker_rows()])

    async def _pending_queues(self) -> str:
        return _json([row for report in await self._recorder.reports() for row in report.queue_rows()])


def lag(row: Record | Mapping[str, Any]) -> tuple[float, float]:
    """Age of messages when they were popped: mean and maximum in milliseconds."""
    popped = row["pop_messages"]
    if not popped:
        return 0.0, 0.0
    return round(row["lag_ms"] / popped, 3), round(row["lag_max_ms"], 3)


def seen_worker(
    row: Record,
) -> tuple[str, int, float | None, float | None, float | None, float | None, float | None, int, int]:
    """What the views of status and of worker metrics both show of a worker, in the order of `SeenWorker`."""
    return (
        row["host"],
        row["worker_id"],
        number(row["loop_lag_avg"]),
        number(row["loop_lag_max"]),
        row["free_slots"],
        row["db_connections"],
        row["job_queue"],
        row["messages"],
        row["port"],
    )


def _lag_point(show: Callable[[datetime], str], row: Record) -> PopLagPoint:
    return PopLagPoint(row["queue_name"], row["pop_messages"], *lag(row), show(row["bucket"]))


def number(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _operations(show: Callable[[datetime], str], seconds_in: Callable[[datetime], float], row: Record) -> QueuePoint:
    seconds = seconds_in(row["bucket"])
    average, largest = lag(row)
    return QueuePoint(
        bucket=show(row["bucket"]),
        queue_name=row["queue_name"],
        push_requests=row["push_requests"],
        push_messages=row["push_messages"],
        pop_messages=row["pop_messages"],
        pop_empty=row["pop_empty"],
        ack_requests=row["ack_requests"],
        ack_success=row["ack_success"],
        ack_failed=row["ack_failed"],
        transactions=row["transactions"],
        partitions_created=row["partitions_created"],
        partitions_deleted=row["partitions_deleted"],
        partition_count=row["partition_count"],
        avg_lag_ms=average,
        max_lag_ms=largest,
        push_per_second=round(row["push_messages"] / seconds, 3),
        pop_per_second=round(row["pop_messages"] / seconds, 3),
        ack_per_second=round((row["ack_success"] + row["ack_failed"]) / seconds, 3),
        empty_per_second=round(row["pop_empty"] / seconds, 3),
        parked_count=round(row["parked_seconds"] / seconds, 2),
    )


def _system(row: Record, shares_state: bool) -> SystemSample:
    def summary(name: str) -> Sampled:
        return Sampled(*map(number, row[name]))

    none = Sampled(0, 0, 0, 0)
    pool, waiting = summary("pool_size"), summary("job_queue")
    return SystemSample(
        Cpu(summary("cpu_user"), summary("cpu_system")),
        Memory(summary("rss_bytes"), summary("virtual_bytes")),
        Pool(pool, summary("pool_idle"), summary("pool_active")),
        # There is no thread pool: database calls are asynchronous.
        ThreadPools(ThreadPool(pool, waiting), ThreadPool(none, none)),
        Registries(summary("in_flight")),
        {"enabled": shares_state},
    )


def _json(rows: list[Row]) -> str:
    return msgspec.json.encode(rows).decode()


async def rollup_series(database: Database, times: TimeRange, queue: str, group: str) -> RolledUp:
    """Buckets of rolled up minutes, oldest first; of one queue and one group where they are named."""
    rows = await database.fetch("rollup_series", times.since, times.until, times.bucket_minutes, queue, group)
    return RolledUp(
        times.shown(),
        times.bucket_minutes,
        [_queue_point(times, row) for row in rows if not row["group_name"]],
        [_group_point(row) for row in rows if row["group_name"]],
    )


def _queue_point(times: TimeRange, row: Record) -> RolledUpQueue:
    messages, delivered = row["messages"] or 0, row["delivered"] or 0
    return RolledUpQueue(
        iso_seconds(row["bucket"]),
        row["queue_name"],
        messages,
        round(messages / times.seconds_in(row["bucket"]), 3),
        row["bytes"] or 0,
        row["largest_bytes"] or 0,
        row["partitions"] or 0,
        delivered,
        round(row["latency_ms"] / delivered, 3) if delivered else None,
        round(row["latency_max_ms"], 3) if delivered else None,
    )


def _group_point(row: Record) -> RolledUpGroup:
    return RolledUpGroup(
        iso_seconds(row["bucket"]),
        row["queue_name"],
        row["group_name"],
        row["consumed"] or 0,
        row["lag_messages"],
        None if row["lag_seconds"] is None else round(row["lag_seconds"], 3),
        row["errors"] or 0,
    )

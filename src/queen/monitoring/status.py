"""The status of the server: throughput, queues, leases, dead letters, workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from queen.broker.inspect.queue_stats import QueueStats
from queen.monitoring.history import History, TimeRange, lag, number, seen_worker
from queen.storage.database import Database, Record
from queen.wire.api.monitoring.analytics import CountingWorker, PopLag, WorkerMetrics, WorkerPoint, WorkerSummary
from queen.wire.api.monitoring.status import (
    BatchEfficiency,
    DeadLetterQueue,
    Errors,
    Leases,
    Requests,
    SeenWorker,
    StatusMessages,
    StatusQueue,
    StatusView,
    StoredPoint,
    ThroughputPoint,
    TopError,
)
from queen.wire.api.resources.queues import Counters, Lag, Overview, Spread, Throughput
from queen.wire.times import iso_millis, iso_seconds

_RECENT: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """A filter of queues; empty: any."""

    queue: str = ""
    namespace: str = ""
    task: str = ""

    @property
    def everything(self) -> bool:
        return not (self.queue or self.namespace or self.task)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What all queues hold together; `behind`: messages pending on the partitions that have any."""

    at: datetime
    queues: int
    namespaces: int
    tasks: int
    partitions: int
    pushed: int
    pending: int
    processing: int
    consumed: int
    dead_letters: int
    behind: Spread


class Status:
    """Views over one shard. Counts are read live and are exact; series are what workers have counted."""

    def __init__(self, database: Database, history: History, queue_stats: QueueStats) -> None:
        """`queue_stats` are those of all queues."""
        self._database = database
        self._history = history
        self._queue_stats = queue_stats
        self._summed: tuple[list[Record], _Sums] = ([], _sums([]))

    async def overview(self) -> Overview:
        """The whole status.

        - messages: `total` is all that was ever pushed to the queues there are. `completed` is what the groups consumed
          in all (each group counts), without what became a dead letter; `failed` are the acknowledgments of all time
          that reported a failure or were refused.
        - lag: how long messages popped in the last five minutes had waited; and, over the partitions that have
          something pending, how many messages that are.
        - throughput: of the last five minutes.
        """
        now = self._sums(await self._queue_stats())
        work = await self._history.recent(_RECENT)
        seconds = _RECENT.total_seconds()
        waited = [round(work[f"{what}_ms"] / 1000, 3) for what in ("avg", "median", "max")]
        return Overview(
            now.queues,
            now.partitions,
            now.namespaces,
            now.tasks,
            Counters(
                now.pushed,
                now.pending,
                now.processing,
                max(0, now.consumed - now.dead_letters),
                (await self._history.lifetime()).ack_failed,
                now.dead_letters,
            ),
            Lag(Spread(waited[0], waited[1], 0, waited[2]), now.behind),
            Throughput(round(work["pushed"] / seconds, 3), round(work["processed"] / seconds, 3)),
            iso_millis(now.at),
            await self._history.age(),
        )

    def _sums(self, queue_stats: list[Record]) -> _Sums:
        """Added up once for as long as they are the same."""
        if queue_stats is not self._summed[0]:
            self._summed = (queue_stats, _sums(queue_stats))
        return self._summed[1]

    async def status(self, times: TimeRange, wanted: QueueFilter, *, with_queues: bool = True) -> StatusView:
        """The current state, and the throughput over a span of time."""
        queue_stats = await self._queue_stats.of(wanted.queue, wanted.namespace, wanted.task)
        names = None if wanted.everything else [row["name"] for row in queue_stats]
        points = await self._throughput(times, names)
        seen = await self._history.worker_series(times)
        letters = await self._dead_letters(queue_stats)

        over = partial(_total, points)
        now = partial(_total, queue_stats)
        return StatusView(
            times.shown(),
            times.bucket_minutes,
            len(points),
            [_point(point, times) for point in points],
            [_queue(row) for row in queue_stats if row["stored"]] if with_queues else [],
            StatusMessages(
                now("pushed"),
                now("pending"),
                now("processing"),
                max(0, now("consumed") - letters.total_messages),
                over("ack_failed"),
                letters.total_messages,
                Requests(over("push_requests"), over("pop_requests"), over("ack_requests")),
                BatchEfficiency(
                    _ratio(over("push_messages"), over("push_requests")),
                    _ratio(over("pop_messages"), over("pop_requests")),
                    _ratio(over("ack_success") + over("ack_failed"), over("ack_requests")),
                ),
            ),
            Leases(now("leases"), now("leased_partitions"), now("leased"), now("acked")),
            letters,
            [SeenWorker(*seen_worker(row)) for row in seen],
            Errors(over("db_errors"), over("ack_failed"), over("dead_letters")),
            await self._history.age(),
        )

    async def worker_metrics(self, times: TimeRange, host: str, worker_id: int | None) -> WorkerMetrics:
        """Series of what workers counted."""
        rows = await self._history.workers(times, host, worker_id)
        queues = await self._history.pop_lags(times)
        seen = await self._history.worker_series(times, host, worker_id)
        queue_stats = await self._queue_stats()

        over = partial(_total, rows)
        return WorkerMetrics(
            times.shown(),
            times.bucket_minutes,
            len(rows),
            [_worker_point(row, times) for row in rows],
            [CountingWorker(*seen_worker(row), 0, iso_millis(row["seen_at"])) for row in seen],
            [PopLag(row["queue_name"], row["pop_messages"], *lag(row)) for row in queues],
            WorkerSummary(
                over("push_messages"),
                over("pop_messages"),
                over("ack_success") + over("ack_failed"),
                over("push_requests"),
                over("pop_requests"),
                over("ack_requests"),
                over("db_errors"),
                over("ack_failed"),
                over("dead_letters"),
                _total(queue_stats, "pending"),
            ),
        )

    async def stored_by_time(self, times: TimeRange, seconds: int, wanted: QueueFilter) -> list[StoredPoint]:
        """How many of the messages that are still stored were stored in each interval of `seconds`."""
        queues = await self._database.fetch("queue_ids", wanted.queue, wanted.namespace, wanted.task)
        rows = await self._database.fetch(
            "stored_by_time", [row["id"] for row in queues], times.since, times.until, float(seconds)
        )
        found = {int(row["bucket"].timestamp()): row["messages"] for row in rows}
        first = int(times.since.timestamp()) // seconds * seconds
        return [
            StoredPoint(iso_seconds(datetime.fromtimestamp(at, UTC)), found.get(at, 0))
            for at in range(first, _whole(times.until), seconds)
        ]

    async def _throughput(self, times: TimeRange, names: list[str] | None) -> list[dict[str, Any]]:
        """Newest first. With names, messages of these queues; worker columns are always of all workers."""
        points = [dict(row) for row in await self._history.workers(times)]
        if names is None:
            return points
        sums: dict[datetime, dict[str, Any]] = {}
        for row in await self._history.queues(times, names):
            own = sums.setdefault(row["bucket"], dict.fromkeys(_OF_QUEUES, 0))
            for key in _OF_QUEUES:
                own[key] = max(own[key], row[key]) if key == "lag_max_ms" else own[key] + row[key]
        return [point | sums.get(point["bucket"], dict.fromkeys(_OF_QUEUES, 0)) for point in points]

    async def _dead_letters(self, queue_stats: list[Record]) -> DeadLetterQueue:
        names = {row["name"] for row in queue_stats}
        counts = [row for row in await self._database.fetch("dead_letter_counts") if row["name"] in names]
        errors: list[Record] = []
        if counts:
            errors = await self._database.fetch("top_errors", [row["id"] for row in queue_stats])
        return DeadLetterQueue(
            _total(counts, "messages"),
            _total(counts, "partitions"),
            [TopError(row["error"], row["found"]) for row in errors],
        )


_OF_QUEUES: Final = (
    "push_requests",
    "push_messages",
    "pop_requests",
    "pop_messages",
    "auto_acked",
    "ack_requests",
    "ack_success",
    "ack_failed",
    "dead_letters",
    "lag_ms",
    "lag_max_ms",
)


def _point(row: dict[str, Any], times: TimeRange) -> ThroughputPoint:
    seconds = times.seconds_in(row["bucket"])
    processed = row["ack_success"] + row["auto_acked"] + row["dead_letters"]
    average, largest = lag(row)
    return ThroughputPoint(
        timestamp=iso_seconds(row["bucket"]),
        ingested=row["push_messages"],
        processed=processed,
        pop_messages=row["pop_messages"],
        ingested_per_second=round(row["push_messages"] / seconds, 3),
        processed_per_second=round(processed / seconds, 3),
        pop_per_second=round(row["pop_messages"] / seconds, 3),
        avg_lag_ms=average,
        max_lag_ms=largest,
        avg_event_loop_lag_ms=number(row["loop_lag_avg"]),
        max_event_loop_lag_ms=number(row["loop_lag_max"]),
        min_free_slots=row["free_slots_min"],
        db_errors=row["db_errors"],
        ack_failed=row["ack_failed"],
        dlq_count=row["dead_letters"],
        queen_cpu_user_pct=_of_all(row, "cpu_user", 100),
        queen_cpu_sys_pct=_of_all(row, "cpu_system", 100),
        queen_rss_mb=_of_all(row, "rss_bytes", 1 << 20),
        db_pool_active=_of_all(row, "pool_active"),
        db_pool_idle=_of_all(row, "pool_idle"),
        db_pool_size=_of_all(row, "pool_size"),
    )


def _worker_point(row: Record, times: TimeRange) -> WorkerPoint:
    seconds = times.seconds_in(row["bucket"])
    acks = row["ack_success"] + row["ack_failed"]
    average, largest = lag(row)
    return WorkerPoint(
        timestamp=iso_seconds(row["bucket"]),
        push_messages=row["push_messages"],
        pop_messages=row["pop_messages"],
        ack_messages=acks,
        push_requests=row["push_requests"],
        pop_requests=row["pop_requests"],
        ack_requests=row["ack_requests"],
        jobs_done=row["batches"],
        push_per_second=round(row["push_messages"] / seconds, 3),
        pop_per_second=round(row["pop_messages"] / seconds, 3),
        ack_per_second=round(acks / seconds, 3),
        avg_event_loop_lag_ms=number(row["loop_lag_avg"]),
        max_event_loop_lag_ms=number(row["loop_lag_max"]),
        avg_free_slots=number(row["free_slots_avg"]),
        min_free_slots=row["free_slots_min"],
        db_connections=_of_all(row, "db_connections"),
        avg_job_queue_size=number(row["job_queue_avg"]),
        max_job_queue_size=row["job_queue_max"],
        backoff_size=0,
        avg_lag_ms=average,
        max_lag_ms=largest,
        lag_count=row["pop_messages"],
        db_errors=row["db_errors"],
        ack_success=row["ack_success"],
        ack_failed=row["ack_failed"],
        dlq_count=row["dead_letters"],
    )


def _of_all(row: Any, name: str, unit: float = 1) -> float | None:
    """Sum over the workers of rows that hold averages per worker."""
    value = row[name]
    return None if value is None else round(value * row["workers"] / unit, 3)


def _sums(rows: list[Record]) -> _Sums:
    behind, pending = _total(rows, "behind"), _total(rows, "pending")
    return _Sums(
        at=rows[0]["at"] if rows else datetime.now(UTC),
        queues=len(rows),
        namespaces=len({row["namespace"] for row in rows} - {""}),
        tasks=len({row["task"] for row in rows} - {""}),
        partitions=_total(rows, "partitions"),
        pushed=_total(rows, "pushed"),
        pending=pending,
        processing=_total(rows, "processing"),
        consumed=_total(rows, "consumed"),
        dead_letters=_total(rows, "dead_letters"),
        behind=Spread(
            round(pending / behind, 3) if behind else 0.0,
            round(rows[0]["median_behind"], 3) if rows else 0.0,
            min((row["min_behind"] for row in rows if row["min_behind"] is not None), default=0),
            max((row["max_behind"] for row in rows), default=0),
        ),
    )


def _queue(row: Record) -> StatusQueue:
    return StatusQueue(
        str(row["public_id"]), row["name"], row["namespace"], row["task"], row["partitions"], row["consumed"]
    )


def _total(rows: Sequence[Record | Mapping[str, Any]], key: str) -> int:
    return sum(row[key] for row in rows)


def _ratio(messages: int, requests: int) -> float:
    return round(messages / requests, 3) if requests else 0.0


def _whole(moment: datetime) -> int:
    """Seconds since the epoch, rounded up."""
    return -int(-moment.timestamp() // 1)

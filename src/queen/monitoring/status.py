"""How the whole is: throughput, queues, leases, dead letters, workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from queen.concurrency import SingleFlightCache
from queen.monitoring.history import History, TimeRange, lag, last_seen, number, seen_worker
from queen.storage.database import Database, Record
from queen.wire.times import iso_millis, iso_seconds

_RECENT: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """Which queues are meant; empty means any."""

    queue: str = ""
    namespace: str = ""
    task: str = ""

    @property
    def everything(self) -> bool:
        return not (self.queue or self.namespace or self.task)


class Status:
    """Views over one shard. Counts are read live and are exact; series are what workers have counted."""

    def __init__(self, database: Database, history: History, standings: SingleFlightCache[list[Record]]) -> None:
        """`standings` are those of all queues."""
        self._database = database
        self._history = history
        self._standings = standings

    async def overview(self) -> dict[str, Any]:
        """Everything at once.

        - messages: `total` is all that was ever pushed to the queues there are. `completed` is what the groups consumed
          in all (each group counts), without what became a dead letter; `failed` are the acknowledgments of all time
          that reported a failure or were refused.
        - lag: how long messages popped in the last five minutes had waited; and, over the partitions that have
          something pending, how many messages that are.
        - throughput: of the last five minutes.
        """
        (row,) = await self._database.fetch("overview")
        work = await self._history.recent(_RECENT)
        seconds = _RECENT.total_seconds()
        return {
            "queues": row["queues"],
            "partitions": row["partitions"],
            "namespaces": row["namespaces"],
            "tasks": row["tasks"],
            "messages": {
                "total": row["pushed"],
                "pending": row["pending"],
                "processing": row["processing"],
                "completed": max(0, row["consumed"] - row["dead_letters"]),
                "failed": (await self._history.lifetime()).ack_failed,
                "deadLetter": row["dead_letters"],
            },
            "lag": {
                "time": {
                    "avg": round(work["avg_ms"] / 1000, 3),
                    "median": round(work["median_ms"] / 1000, 3),
                    "min": 0,
                    "max": round(work["max_ms"] / 1000, 3),
                },
                "offset": {what: round(row[f"{what}_behind"], 3) for what in ("avg", "median", "min", "max")},
            },
            "throughput": {
                "ingestedPerSecond": round(work["pushed"] / seconds, 3),
                "processedPerSecond": round(work["processed"] / seconds, 3),
            },
            "timestamp": iso_millis(row["at"]),
            "statsAge": await self._history.age(),
        }

    async def status(self, times: TimeRange, wanted: QueueFilter) -> dict[str, Any]:
        """The state of things, and how it came about over a stretch of time."""
        standings = await self._standings_of(wanted)
        names = None if wanted.everything else [row["name"] for row in standings]
        points = await self._throughput(times, names)
        seen = await self._history.seen(times)
        letters = await self._dead_letters(standings)

        over = partial(_total, points)
        return {
            "timeRange": times.show(),
            "bucketMinutes": times.bucket_minutes,
            "pointCount": len(points),
            "throughput": [_point(point, times) for point in points],
            "queues": [_queue(row) for row in standings if row["stored"]],
            "messages": {
                "total": sum(row["pushed"] for row in standings),
                "pending": sum(row["pending"] for row in standings),
                "processing": sum(row["processing"] for row in standings),
                "completed": max(0, sum(row["consumed"] for row in standings) - letters["totalMessages"]),
                "failed": over("ack_failed"),
                "deadLetter": letters["totalMessages"],
                "requests": {
                    "push": over("push_requests"),
                    "pop": over("pop_requests"),
                    "ack": over("ack_requests"),
                },
                "batchEfficiency": {
                    "push": _ratio(over("push_messages"), over("push_requests")),
                    "pop": _ratio(over("pop_messages"), over("pop_requests")),
                    "ack": _ratio(over("ack_success") + over("ack_failed"), over("ack_requests")),
                },
            },
            "leases": {
                "active": sum(row["leases"] for row in standings),
                "partitionsWithLeases": sum(row["leased_partitions"] for row in standings),
                "totalBatchSize": sum(row["leased"] for row in standings),
                "totalAcked": sum(row["acked"] for row in standings),
            },
            "deadLetterQueue": letters,
            "workers": [{**seen_worker(row), "messagesProcessed": row["messages"]} for row in seen],
            "errors": {
                "dbErrors": over("db_errors"),
                "ackFailed": over("ack_failed"),
                "dlqMessages": over("dead_letters"),
            },
            "statsAge": await self._history.age(),
        }

    async def worker_metrics(self, times: TimeRange, host: str, worker_id: int | None) -> dict[str, Any]:
        """What workers have counted."""
        rows = await self._history.workers(times, host, worker_id)
        queues = await self._history.pop_lags(times)
        seen = await self._history.seen(times, host, worker_id)
        standings = await self._standings.get()

        over = partial(_total, rows)
        return {
            "timeRange": times.show(),
            "bucketMinutes": times.bucket_minutes,
            "pointCount": len(rows),
            "timeSeries": [_worker_point(row, times) for row in rows],
            "workers": [
                {
                    **seen_worker(row),
                    "backoffSize": 0,
                    "messagesProcessed": row["messages"],
                    "lastSeen": last_seen(row),
                }
                for row in seen
            ],
            "queues": [{"queueName": row["queue_name"], "popCount": row["pop_messages"], **lag(row)} for row in queues],
            "summary": {
                "totalPushMessages": over("push_messages"),
                "totalPopMessages": over("pop_messages"),
                "totalAckMessages": over("ack_success") + over("ack_failed"),
                "totalPushRequests": over("push_requests"),
                "totalPopRequests": over("pop_requests"),
                "totalAckRequests": over("ack_requests"),
                "totalDbErrors": over("db_errors"),
                "totalAckFailed": over("ack_failed"),
                "totalDlq": over("dead_letters"),
                "pendingMessages": sum(row["pending"] for row in standings),
            },
        }

    async def stored_by_time(self, times: TimeRange, seconds: int, wanted: QueueFilter) -> list[dict[str, Any]]:
        """How many of the messages that are still stored were stored in each span of so many seconds."""
        queues = await self._database.fetch("queue_ids", wanted.queue, wanted.namespace, wanted.task)
        rows = await self._database.fetch(
            "stored_by_time", [row["id"] for row in queues], times.since, times.until, float(seconds)
        )
        found = {int(row["bucket"].timestamp()): row["messages"] for row in rows}
        first = int(times.since.timestamp()) // seconds * seconds
        return [
            {"timestamp": iso_seconds(datetime.fromtimestamp(at, UTC)), "messages": found.get(at, 0)}
            for at in range(first, _whole(times.until), seconds)
        ]

    async def _standings_of(self, wanted: QueueFilter) -> list[Record]:
        if wanted.everything:
            return await self._standings.get()
        return await self._database.fetch("queue_standings", wanted.queue, wanted.namespace, wanted.task)

    async def _throughput(self, times: TimeRange, names: list[str] | None) -> list[dict[str, Any]]:
        """Newest first. With names, messages are those of the queues; how the workers were is always of all."""
        points = [dict(row) for row in await self._history.workers(times)]
        if names is None:
            return points
        sums: dict[datetime, dict[str, Any]] = {}
        for row in await self._history.queues(times, names):
            own = sums.setdefault(row["bucket"], dict.fromkeys(_OF_QUEUES, 0))
            for key in _OF_QUEUES:
                own[key] = max(own[key], row[key]) if key == "lag_max_ms" else own[key] + row[key]
        return [point | sums.get(point["bucket"], dict.fromkeys(_OF_QUEUES, 0)) for point in points]

    async def _dead_letters(self, standings: list[Record]) -> dict[str, Any]:
        names = {row["name"] for row in standings}
        counts = [row for row in await self._database.fetch("dead_letter_counts") if row["name"] in names]
        errors: list[Record] = []
        if counts:
            errors = await self._database.fetch("top_errors", [row["id"] for row in standings])
        return {
            "totalMessages": sum(row["messages"] for row in counts),
            "affectedPartitions": sum(row["partitions"] for row in counts),
            "topErrors": [{"error": row["error"], "count": row["found"]} for row in errors],
        }


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


def _point(row: dict[str, Any], times: TimeRange) -> dict[str, Any]:
    seconds = times.seconds_in(row["bucket"])
    processed = row["ack_success"] + row["auto_acked"] + row["dead_letters"]
    return {
        "timestamp": iso_seconds(row["bucket"]),
        "ingested": row["push_messages"],
        "processed": processed,
        "popMessages": row["pop_messages"],
        "ingestedPerSecond": round(row["push_messages"] / seconds, 3),
        "processedPerSecond": round(processed / seconds, 3),
        "popPerSecond": round(row["pop_messages"] / seconds, 3),
        **lag(row),
        "avgEventLoopLagMs": number(row["loop_lag_avg"]),
        "maxEventLoopLagMs": number(row["loop_lag_max"]),
        "minFreeSlots": row["free_slots_min"],
        "dbErrors": row["db_errors"],
        "ackFailed": row["ack_failed"],
        "dlqCount": row["dead_letters"],
        "queenCpuUserPct": _of_all(row, "cpu_user", 100),
        "queenCpuSysPct": _of_all(row, "cpu_system", 100),
        "queenRssMb": _of_all(row, "rss_bytes", 1 << 20),
        "dbPoolActive": _of_all(row, "pool_active"),
        "dbPoolIdle": _of_all(row, "pool_idle"),
        "dbPoolSize": _of_all(row, "pool_size"),
    }


def _worker_point(row: Record, times: TimeRange) -> dict[str, Any]:
    seconds = times.seconds_in(row["bucket"])
    acks = row["ack_success"] + row["ack_failed"]
    return {
        "timestamp": iso_seconds(row["bucket"]),
        "pushMessages": row["push_messages"],
        "popMessages": row["pop_messages"],
        "ackMessages": acks,
        "pushRequests": row["push_requests"],
        "popRequests": row["pop_requests"],
        "ackRequests": row["ack_requests"],
        "jobsDone": row["batches"],
        "pushPerSecond": round(row["push_messages"] / seconds, 3),
        "popPerSecond": round(row["pop_messages"] / seconds, 3),
        "ackPerSecond": round(acks / seconds, 3),
        "avgEventLoopLagMs": number(row["loop_lag_avg"]),
        "maxEventLoopLagMs": number(row["loop_lag_max"]),
        "avgFreeSlots": number(row["free_slots_avg"]),
        "minFreeSlots": row["free_slots_min"],
        "dbConnections": _of_all(row, "db_connections"),
        "avgJobQueueSize": number(row["job_queue_avg"]),
        "maxJobQueueSize": row["job_queue_max"],
        "backoffSize": 0,
        **lag(row),
        "lagCount": row["pop_messages"],
        "dbErrors": row["db_errors"],
        "ackSuccess": row["ack_success"],
        "ackFailed": row["ack_failed"],
        "dlqCount": row["dead_letters"],
    }


def _of_all(row: Any, name: str, unit: float = 1) -> float | None:
    """What the workers had together: rows tell what each had on average."""
    value = row[name]
    return None if value is None else round(value * row["workers"] / unit, 3)


def _queue(row: Record) -> dict[str, Any]:
    return {
        "id": str(row["public_id"]),
        "name": row["name"],
        "namespace": row["namespace"],
        "task": row["task"],
        "partitions": row["partitions"],
        "totalConsumed": row["consumed"],
    }


def _total(rows: Sequence[Record | Mapping[str, Any]], key: str) -> int:
    return sum(row[key] for row in rows)


def _ratio(messages: int, requests: int) -> float:
    return round(messages / requests, 3) if requests else 0.0


def _whole(moment: datetime) -> int:
    """Seconds, rounded up: the span that a moment is in the middle of counts."""
    return -int(-moment.timestamp() // 1)

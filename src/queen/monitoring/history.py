"""What workers have counted, read back: series over time, of all hosts.

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

from queen.concurrency import chunked_map
from queen.metrics.counters import WorkerTally
from queen.metrics.report import Row
from queen.monitoring.recorder import Recorder
from queen.storage.database import Database, Record
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

    def show(self) -> dict[str, Any]:
        return {"from": iso_millis(self.since), "to": iso_millis(self.until)}


class History:
    """Reads the history of one shard."""

    def __init__(self, database: Database, recorder: Recorder) -> None:
        self._database = database
        self._recorder = recorder

    async def workers(self, times: TimeRange, host: str = "", worker_id: int | None = None) -> list[Record]:
        """What all of them counted together, newest bucket first."""
        return await self._database.fetch(
            "worker_series",
            times.since,
            times.until,
            times.bucket_minutes,
            await self._pending_workers(),
            host,
            worker_id,
        )

    async def seen(self, times: TimeRange, host: str = "", worker_id: int | None = None) -> list[Record]:
        """Each worker that was there."""
        return await self._database.fetch(
            "workers_seen", times.since, times.until, await self._pending_workers(), host, worker_id
        )

    async def queues(self, times: TimeRange, names: Sequence[str] | None = None) -> list[Record]:
        """What was counted for queues (or for these alone), oldest bucket first."""
        return await self._database.fetch(
            "queue_series",
            times.since,
            times.until,
            times.bucket_minutes,
            await self._pending_queues(),
            names,
        )

    async def pop_lags(self, times: TimeRange) -> list[Record]:
        """How long messages of each queue that was popped had waited."""
        return await self._database.fetch("queue_pop_lags", times.since, times.until, await self._pending_queues())

    async def recent(self, span: timedelta) -> Record:
        """What all workers have done lately, in one row."""
        now = datetime.now(UTC)
        (row,) = await self._database.fetch("recent_work", now - span, now, await self._pending_workers())
        return row

    async def lifetime(self) -> WorkerTally:
        """All that the workers of all hosts ever counted; of other hosts, up to their last flush."""
        reports = await self._recorder.reports()
        (row,) = await self._database.fetch("lifetime_totals", [report.life for report in reports])
        total = WorkerTally(**dict(row))
        for report in reports:
            total.add(report.total)
        return total

    async def age(self) -> int:
        """How many seconds old the oldest number of a worker that is still there is; 0 when there is one host."""
        lives = [report.life for report in await self._recorder.reports()]
        (row,) = await self._database.fetch("oldest_flush", lives, self._recorder.gone_after)
        return int(row["age"])

    async def system_metrics(self, times: TimeRange, host: str, worker_id: int | None) -> dict[str, Any]:
        """How the processes were: CPU, memory, connections. Whether hosts share state is as set where it is asked."""
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
        replicas: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        for row in rows:
            points = replicas.setdefault((row["host"], row["port"], row["worker_id"]), [])
            points.append(
                {
                    "timestamp": iso_seconds(row["bucket"]),
                    "sampleCount": row["samples"],
                    "metrics": _system(row, shares),
                }
            )
        return {
            "timeRange": times.show(),
            "replicas": [
                {"hostname": key[0], "port": key[1], "workerId": key[2], "timeSeries": points}
                for key, points in replicas.items()
            ],
            "replicaCount": len(replicas),
            "bucketMinutes": times.bucket_minutes,
            "pointCount": len({row["bucket"] for row in rows}),
        }

    async def queue_lag(self, times: TimeRange, names: Sequence[str] | None) -> list[dict[str, Any]]:
        """Minute by minute, newest first: how long messages had waited when they were popped."""
        rows = await self._database.fetch(
            "queue_lag_series", times.since, times.until, 1, await self._pending_queues(), names
        )
        return await chunked_map(partial(_lag_point, cache(iso_seconds)), rows)

    async def queue_operations(self, times: TimeRange, names: Sequence[str] | None) -> dict[str, Any]:
        """Everything that was counted for queues."""
        rows = await self.queues(times, names)
        return {
            "timeRange": times.show(),
            "bucketMinutes": times.bucket_minutes,
            "series": await chunked_map(partial(_operations, cache(iso_seconds), cache(times.seconds_in)), rows),
            "queues": sorted({row["queue_name"] for row in rows}),
        }

    async def parked(self, times: TimeRange, names: Sequence[str] | None) -> dict[str, Any]:
        """How many pops waited, and where."""
        rows = await self._database.fetch(
            "parked_series", times.since, times.until, times.bucket_minutes, await self._pending_queues(), names
        )
        return {
            "timeRange": times.show(),
            "bucketMinutes": times.bucket_minutes,
            "series": [
                {
                    "bucket": iso_seconds(row["bucket"]),
                    "queueName": row["queue_name"],
                    "hostname": row["host"],
                    "workerId": row["worker_id"],
                    "parkedCount": round(row["parked_seconds"] / times.seconds_in(row["bucket"]), 2),
                }
                for row in rows
            ],
            "replicas": [
                {"hostname": host, "workerId": worker_id}
                for host, worker_id in sorted({(row["host"], row["worker_id"]) for row in rows})
            ],
        }

    async def retention(self, times: TimeRange, queue: str) -> dict[str, Any]:
        """What retention, eviction and expiry have removed."""
        rows = await self._database.fetch("retention_series", times.since, times.until, times.bucket_minutes, queue)
        series = [
            {
                "bucket": iso_seconds(row["bucket"]),
                "retentionMsgs": row["retention"],
                "completedRetentionMsgs": row["completed_retention"],
                "evictionMsgs": row["eviction"],
                "totalMsgs": row["messages"],
                "eventCount": row["events"],
            }
            for row in rows
        ]
        counters = ("retentionMsgs", "completedRetentionMsgs", "evictionMsgs", "totalMsgs", "eventCount")
        return {
            "timeRange": times.show(),
            "bucketMinutes": times.bucket_minutes,
            "series": series,
            "totals": {counter: sum(point[counter] for point in series) for counter in counters},
        }

    async def _pending_workers(self) -> str:
        return _json([row for report in await self._recorder.reports() for row in report.worker_rows()])

    async def _pending_queues(self) -> str:
        return _json([row for report in await self._recorder.reports() for row in report.queue_rows()])


def lag(row: Record | Mapping[str, Any]) -> dict[str, float]:
    """How long messages had waited when they were popped."""
    popped = row["pop_messages"]
    return {
        "avgLagMs": round(row["lag_ms"] / popped, 3) if popped else 0.0,
        "maxLagMs": round(row["lag_max_ms"], 3) if popped else 0.0,
    }


def seen_worker(row: Record) -> dict[str, Any]:
    """What the views of status and of worker metrics both say of a worker."""
    return {
        "hostname": row["host"],
        "workerId": row["worker_id"],
        "avgEventLoopLagMs": number(row["loop_lag_avg"]),
        "maxEventLoopLagMs": number(row["loop_lag_max"]),
        "freeSlots": row["free_slots"],
        "dbConnections": row["db_connections"],
        "jobQueueSize": row["job_queue"],
    }


def _lag_point(show: Callable[[datetime], str], row: Record) -> dict[str, Any]:
    return {
        "queueName": row["queue_name"],
        "popCount": row["pop_messages"],
        **lag(row),
        "bucketTime": show(row["bucket"]),
    }


def number(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def last_seen(row: Record) -> str | None:
    moment: datetime = row["seen_at"]
    return iso_millis(moment)


def _operations(
    show: Callable[[datetime], str], seconds_in: Callable[[datetime], float], row: Record
) -> dict[str, Any]:
    seconds = seconds_in(row["bucket"])
    acks = row["ack_success"] + row["ack_failed"]
    return {
        "bucket": show(row["bucket"]),
        "queueName": row["queue_name"],
        "pushRequests": row["push_requests"],
        "pushMessages": row["push_messages"],
        "popMessages": row["pop_messages"],
        "popEmpty": row["pop_empty"],
        "ackRequests": row["ack_requests"],
        "ackSuccess": row["ack_success"],
        "ackFailed": row["ack_failed"],
        "transactions": row["transactions"],
        "partitionsCreated": row["partitions_created"],
        "partitionsDeleted": row["partitions_deleted"],
        "partitionCount": row["partition_count"],
        **lag(row),
        "pushPerSecond": round(row["push_messages"] / seconds, 3),
        "popPerSecond": round(row["pop_messages"] / seconds, 3),
        "ackPerSecond": round(acks / seconds, 3),
        "emptyPerSecond": round(row["pop_empty"] / seconds, 3),
        "parkedCount": round(row["parked_seconds"] / seconds, 2),
    }


def _system(row: Record, shares_state: bool) -> dict[str, Any]:
    def summary(name: str) -> dict[str, float | None]:
        return dict(zip(("avg", "min", "max", "last"), map(number, row[name]), strict=True))

    none = dict.fromkeys(("avg", "min", "max", "last"), 0)
    pool, waiting = summary("pool_size"), summary("job_queue")
    return {
        "cpu": {"user_us": summary("cpu_user"), "system_us": summary("cpu_system")},
        "memory": {"rss_bytes": summary("rss_bytes"), "virtual_bytes": summary("virtual_bytes")},
        "database": {"pool_size": pool, "pool_idle": summary("pool_idle"), "pool_active": summary("pool_active")},
        "threadpool": {
            "db": {"pool_size": pool, "queue_size": waiting},
            # No work is given to a pool of threads: what the database does is awaited.
            "system": {"pool_size": none, "queue_size": none},
        },
        "registries": {"response": summary("in_flight")},
        "shared_state": {"enabled": shares_state},
    }


def _json(rows: list[Row]) -> str:
    return msgspec.json.encode(rows).decode()


async def rollup_series(database: Database, times: TimeRange, queue: str, group: str) -> dict[str, Any]:
    """Buckets of rolled up minutes, oldest first; of one queue and one group where they are named."""
    rows = await database.fetch("rollup_series", times.since, times.until, times.bucket_minutes, queue, group)
    return {
        "timeRange": times.show(),
        "bucketMinutes": times.bucket_minutes,
        "queues": [_queue_point(times, row) for row in rows if not row["group_name"]],
        "groups": [_group_point(row) for row in rows if row["group_name"]],
    }


def _queue_point(times: TimeRange, row: Record) -> dict[str, Any]:
    messages, delivered = row["messages"] or 0, row["delivered"] or 0
    return {
        "bucket": iso_seconds(row["bucket"]),
        "queueName": row["queue_name"],
        "messages": messages,
        "messagesPerSecond": round(messages / times.seconds_in(row["bucket"]), 3),
        "bytes": row["bytes"] or 0,
        "largestBytes": row["largest_bytes"] or 0,
        "partitions": row["partitions"] or 0,
        "delivered": delivered,
        "avgLatencyMs": round(row["latency_ms"] / delivered, 3) if delivered else None,
        "maxLatencyMs": round(row["latency_max_ms"], 3) if delivered else None,
    }


def _group_point(row: Record) -> dict[str, Any]:
    return {
        "bucket": iso_seconds(row["bucket"]),
        "queueName": row["queue_name"],
        "consumerGroup": row["group_name"],
        "consumed": row["consumed"] or 0,
        "lagMessages": row["lag_messages"],
        "lagSeconds": None if row["lag_seconds"] is None else round(row["lag_seconds"], 3),
        "errors": row["errors"] or 0,
    }

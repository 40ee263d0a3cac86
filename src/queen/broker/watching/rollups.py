"""What `queen pipeline rollup` has made of messages, cursors and dead letters."""

from __future__ import annotations

from typing import Any

from queen.broker.watching.time_range import TimeRange
from queen.storage.database import Database, Record
from queen.wire.times import iso_seconds


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

"""What there is and what it holds: queues, partitions, namespaces, tasks. Read live, exact at the moment of asking.

Numbers of a partition: `total` messages are stored; `pending` are those that a group has not consumed, or all when no
group has begun; `processing` are leased just now; `completed` are consumed and not dead. Of several groups the largest
number counts. Numbers of a queue are sums over its partitions.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from queen.broker.gently import gently
from queen.broker.timeline import Moment, offsets_after
from queen.errors import NotFound
from queen.storage.database import Database, Record
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis

_RECENT_SECONDS: Final = 300.0
_MOST_RECENT: Final = 10_000
_COUNTERS: Final = ("total", "pending", "processing", "completed", "failed", "deadLetter")


class Resources:
    """Views of one shard."""

    def __init__(self, database: Database, shard: int) -> None:
        self._database = database
        self._shard = shard

    async def queues(
        self, namespace: str, task: str, limit: int | None = None, offset: int = 0
    ) -> list[dict[str, Any]]:
        """Queues, newest first, of a namespace and task unless these are empty. `pending` leaves out `processing`."""
        rows = await self._database.fetch("queue_list", namespace, task, limit, offset)
        return [
            {
                "id": str(row["public_id"]),
                "name": row["name"],
                "namespace": row["namespace"],
                "task": row["task"],
                "createdAt": iso_millis(row["created_at"]),
                "partitions": row["partitions"],
                "messages": {
                    "total": row["total"],
                    "pending": max(0, row["pending"] - row["processing"]),
                    "processing": row["processing"],
                },
            }
            for row in rows
        ]

    async def queue_count(self, namespace: str, task: str) -> int:
        (row,) = await self._database.fetch("count_queues", namespace, task)
        return int(row["found"])

    async def queue(self, name: str) -> dict[str, Any]:
        """One queue with its partitions, by name. Here `pending` includes what is being processed."""
        queue = await self._queue(name)
        page = await self._database.fetch("queue_partition_page", queue["id"], None, 0)
        rows = await self._database.fetch("partition_list", [row["id"] for row in page])
        partitions = await gently(self._partition, rows)
        return {
            "id": str(queue["public_id"]),
            "name": queue["name"],
            "namespace": queue["namespace"],
            "task": queue["task"],
            "createdAt": iso_millis(queue["created_at"]),
            "partitions": partitions,
            "totals": {counter: sum(partition["stats"][counter] for partition in partitions) for counter in _COUNTERS},
        }

    async def partitions(self, queue_name: str, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        """A page of the partitions of one queue, or of all when no name is given, by name; and how many there are."""
        if queue_name:
            queue_id = (await self._queue(queue_name))["id"]
            page = await self._database.fetch("queue_partition_page", queue_id, limit, offset)
            (count,) = await self._database.fetch("count_queue_partitions", queue_id)
        else:
            page = await self._database.fetch("partition_page", limit, offset)
            (count,) = await self._database.fetch("count_partitions")
        rows = await self._database.fetch("partition_list", [row["id"] for row in page])
        return [{"queue": row["queue_name"], **self._partition(row)} for row in rows], count["found"]

    async def labels(self, kind: Literal["namespace", "task"]) -> list[dict[str, Any]]:
        """The namespaces or tasks that queues have, by name."""
        return [
            {
                kind: row["label"],
                "queues": row["queues"],
                "partitions": row["partitions"],
                "messages": {"total": row["total"], "pending": row["pending"]},
            }
            for row in await self._database.fetch("label_list", kind)
        ]

    async def overview(self) -> dict[str, Any]:
        """Everything at once, from what the tables can tell.

        - messages: `total` is all that was ever pushed to the queues there are. `completed` is what the groups consumed
          in all (each group counts), without what became a dead letter; `failed` are the failed deliveries of batches
          that are being retried.
        - lag: over the partitions that have something pending, how long the first pending message waits, and how many
          there are.
        - throughput: `ingestedPerSecond` is the messages stored in the last five minutes. No table has the times of
          consumption, so `processedPerSecond` is an estimate: of the groups that consumed in the last five minutes, the
          average rate since they began.
        """
        (row,) = await self._database.fetch("overview")
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
                "failed": row["failed"],
                "deadLetter": row["dead_letters"],
            },
            "lag": {
                unit: {what: round(row[f"{what}_{column}"], 3) for what in ("avg", "median", "min", "max")}
                for unit, column in (("time", "seconds"), ("offset", "behind"))
            },
            "throughput": {
                "ingestedPerSecond": round(await self._pushed_lately() / _RECENT_SECONDS, 3),
                "processedPerSecond": round(row["consumed_per_second"], 3),
            },
            "timestamp": iso_millis(row["at"]),
            "statsAge": 0,
        }

    async def counts(self) -> dict[str, int]:
        """How many `queues`, `partitions`, `namespaces` and `tasks` there are."""
        (row,) = await self._database.fetch("count_everything")
        return dict(row)

    async def _pushed_lately(self) -> float:
        """Messages stored lately; of very many partitions that got some, a part speaks for all."""
        rows = await self._database.fetch("recent_partitions", _RECENT_SECONDS, _MOST_RECENT)
        moments = [Moment(row["id"], 0, row["next_offset"], row["at"]) for row in rows]
        offsets = await offsets_after(self._database, moments)
        messages = sum(moment.high - offset for moment, offset in zip(moments, offsets, strict=True))
        return float(messages * rows[0]["found"] / len(rows)) if rows else 0.0

    async def _queue(self, name: str) -> Record:
        for record in await self._database.fetch("queue_by_name", name):
            return record
        raise NotFound("Queue not found")

    def _partition(self, row: Record) -> dict[str, Any]:
        return {
            "id": partition_uuid(self._shard, row["id"]),
            "name": row["name"],
            "createdAt": iso_millis(row["created_at"]),
            "stats": {
                "total": row["total"],
                "pending": row["pending"],
                "processing": row["processing"],
                "completed": row["completed"],
                "failed": 0,
                "deadLetter": row["dead_letter"],
            },
            "oldestMessage": iso_millis(row["oldest"]),
            "newestMessage": iso_millis(row["newest"]),
        }

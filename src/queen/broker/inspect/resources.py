"""What there is and what it holds: queues, partitions, namespaces, tasks. Read live, exact at the moment of asking.

Numbers of a partition: `total` messages are stored; `pending` are those that a group has not consumed, or all when no
group has begun; `processing` are leased just now; `completed` are consumed and not dead. Of several groups the largest
number counts. Numbers of a queue are sums over its partitions.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from queen.broker.queues import OPTIONS
from queen.concurrency import chunked_map
from queen.errors import NotFound
from queen.storage.database import Database, Record
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis

_COUNTERS: Final = ("total", "pending", "processing", "completed", "failed", "deadLetter")


class Resources:
    """Views of one shard."""

    def __init__(self, database: Database, shard: int) -> None:
        self._database = database
        self._shard = shard

    async def queues(
        self, namespace: str, task: str, limit: int | None = None, offset: int = 0, *, with_processing: bool = False
    ) -> list[dict[str, Any]]:
        """Queues, newest first, of a namespace and task unless these are empty.

        `pending` leaves out what is being processed, unless `with_processing`.
        """
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
                    "pending": max(0, row["pending"] - (0 if with_processing else row["processing"])),
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
        queue, rows = await self._queue_and_partitions(name)
        partitions = await chunked_map(self._partition, rows)
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

    async def counts(self) -> dict[str, int]:
        """How many `queues`, `partitions`, `namespaces` and `tasks` there are."""
        (row,) = await self._database.fetch("count_everything")
        return dict(row)

    async def check_exists(self, name: str) -> None:
        """Raises `NotFound` when there is no queue of that name."""
        await self._queue(name)

    async def queue_status(self, name: str) -> dict[str, Any]:
        """One queue as it is watched: its configuration, and how far its partitions have come."""
        queue, rows = await self._queue_and_partitions(name)
        partitions = await chunked_map(self._partition_status, rows)
        totals = {counter: sum(partition["stats"][counter] for partition in partitions) for counter in _COUNTERS}
        return {
            "queue": {
                "id": str(queue["public_id"]),
                "name": queue["name"],
                "namespace": queue["namespace"],
                "task": queue["task"],
                "priority": queue["priority"],
                "createdAt": iso_millis(queue["created_at"]),
                "config": {
                    "leaseTime": queue["lease_time"],
                    "retryLimit": queue["retry_limit"],
                    "retryDelay": queue["retry_delay"],
                    "ttl": queue["ttl"],
                    "maxQueueSize": queue["max_size"],
                    "deadLetterQueue": queue["dead_letter_queue"],
                },
                "options": {option.name: queue[option.column] for option in OPTIONS},
            },
            "partitions": partitions,
            "totals": {"messages": totals, **totals},
        }

    async def _queue_and_partitions(self, name: str) -> tuple[Record, list[Record]]:
        queue = await self._queue(name)
        page = await self._database.fetch("queue_partition_page", queue["id"], None, 0)
        return queue, await self._database.fetch("partition_list", [row["id"] for row in page])

    def _partition_status(self, row: Record) -> dict[str, Any]:
        partition = self._partition(row)
        return {
            "id": partition["id"],
            "name": partition["name"],
            "createdAt": partition["createdAt"],
            "messages": partition["stats"],
            "stats": partition["stats"],
            "cursor": {"totalConsumed": row["total_consumed"], "batchesConsumed": row["total_batches"]},
            "lastActivity": iso_millis(row["last_activity"]),
            "oldestMessage": partition["oldestMessage"],
            "newestMessage": partition["newestMessage"],
        }

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

"""What there is and what it holds: queues, partitions, namespaces, tasks. Read live, exact at the moment of asking.

Numbers of a partition: `total` messages are stored; `pending` are those that a group has not consumed, or all when no
group has begun; `processing` are leased just now; `completed` are consumed and not dead. Of several groups the largest
number counts. Numbers of a queue are sums over its partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from queen.concurrency import chunked_map
from queen.errors import NotFound
from queen.storage.database import Database, Record
from queen.wire.api.monitoring.status import (
    QueueStatus,
    WatchedConfig,
    WatchedCursor,
    WatchedPartition,
    WatchedQueue,
    WatchedTotals,
)
from queen.wire.api.resources.queues import (
    Counters,
    LabelCounters,
    NamespaceView,
    PartitionInList,
    PartitionView,
    QueueInList,
    QueueOptions,
    QueueView,
    ShortCounters,
    TaskView,
)
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis


class Resources:
    """Views of one shard."""

    def __init__(self, database: Database, shard: int) -> None:
        self._database = database
        self._shard = shard

    async def queues(
        self, namespace: str, task: str, limit: int | None = None, offset: int = 0, *, with_processing: bool = False
    ) -> list[QueueInList]:
        """Queues, newest first, of a namespace and task unless these are empty.

        `pending` leaves out what is being processed, unless `with_processing`.
        """
        rows = await self._database.fetch("queue_list", namespace, task, limit, offset)
        return [
            QueueInList(
                str(row["public_id"]),
                row["name"],
                row["namespace"],
                row["task"],
                iso_millis(row["created_at"]),
                row["partitions"],
                ShortCounters(
                    row["total"],
                    max(0, row["pending"] - (0 if with_processing else row["processing"])),
                    row["processing"],
                ),
                row["paused"],
            )
            for row in rows
        ]

    async def queue_count(self, namespace: str, task: str) -> int:
        (row,) = await self._database.fetch("count_queues", namespace, task)
        return int(row["found"])

    async def queue(self, name: str) -> QueueView:
        """One queue with its partitions, by name. Here `pending` includes what is being processed."""
        queue, rows = await self._queue_and_partitions(name)
        partitions = await chunked_map(self._partition, rows)
        return QueueView(
            str(queue["public_id"]),
            queue["name"],
            queue["namespace"],
            queue["task"],
            iso_millis(queue["created_at"]),
            partitions,
            _total(partition.stats for partition in partitions),
            queue["paused"],
            sorted(queue["paused_groups"]),
        )

    async def partitions(self, queue_name: str, limit: int, offset: int) -> tuple[list[PartitionInList], int]:
        """A page of the partitions of one queue, or of all when no name is given, by name; and how many there are."""
        if queue_name:
            queue_id = (await self._queue(queue_name))["id"]
            page = await self._database.fetch("queue_partition_page", queue_id, limit, offset)
            (count,) = await self._database.fetch("count_queue_partitions", queue_id)
        else:
            page = await self._database.fetch("partition_page", limit, offset)
            (count,) = await self._database.fetch("count_partitions")
        rows = await self._database.fetch("partition_list", [row["id"] for row in page])
        listed = [
            PartitionInList(**msgspec.structs.asdict(self._partition(row)), queue=row["queue_name"]) for row in rows
        ]
        return listed, count["found"]

    async def namespaces(self) -> list[NamespaceView]:
        """The namespaces that queues have, by name."""
        rows = await self._database.fetch("label_list", "namespace")
        return [NamespaceView(row["label"], row["queues"], row["partitions"], _of_label(row)) for row in rows]

    async def tasks(self) -> list[TaskView]:
        """The tasks that queues have, by name."""
        rows = await self._database.fetch("label_list", "task")
        return [TaskView(row["label"], row["queues"], row["partitions"], _of_label(row)) for row in rows]

    async def counts(self) -> dict[str, int]:
        """How many `queues`, `partitions`, `namespaces` and `tasks` there are."""
        (row,) = await self._database.fetch("count_everything")
        return dict(row)

    async def check_exists(self, name: str) -> None:
        """Raises `NotFound` when there is no queue of that name."""
        await self._queue(name)

    async def queue_status(self, name: str) -> QueueStatus:
        """One queue in detail: its configuration, and the counters of its partitions."""
        queue, rows = await self._queue_and_partitions(name)
        partitions = await chunked_map(self._partition_status, rows)
        totals = _total(partition.stats for partition in partitions)
        return QueueStatus(
            WatchedQueue(
                str(queue["public_id"]),
                queue["name"],
                queue["namespace"],
                queue["task"],
                queue["priority"],
                iso_millis(queue["created_at"]),
                WatchedConfig(
                    queue["lease_time"],
                    queue["retry_limit"],
                    queue["retry_delay"],
                    queue["ttl"],
                    queue["max_size"],
                    queue["dead_letter_queue"],
                ),
                QueueOptions(*(queue[field] for field in QueueOptions.__struct_fields__)),
                queue["paused"],
                sorted(queue["paused_groups"]),
            ),
            partitions,
            WatchedTotals(**msgspec.structs.asdict(totals), messages=totals),
        )

    async def _queue_and_partitions(self, name: str) -> tuple[Record, list[Record]]:
        queue = await self._queue(name)
        page = await self._database.fetch("queue_partition_page", queue["id"], None, 0)
        return queue, await self._database.fetch("partition_list", [row["id"] for row in page])

    def _partition_status(self, row: Record) -> WatchedPartition:
        partition = self._partition(row)
        return WatchedPartition(
            partition.id,
            partition.name,
            partition.created_at,
            partition.stats,
            partition.stats,
            WatchedCursor(row["total_consumed"], row["total_batches"]),
            iso_millis(row["last_activity"]),
            partition.oldest_message,
            partition.newest_message,
        )

    async def _queue(self, name: str) -> Record:
        for record in await self._database.fetch("queue_by_name", name):
            return record
        raise NotFound("Queue not found")

    def _partition(self, row: Record) -> PartitionView:
        return PartitionView(
            partition_uuid(self._shard, row["id"]),
            row["name"],
            iso_millis(row["created_at"]),
            Counters(row["total"], row["pending"], row["processing"], row["completed"], 0, row["dead_letter"]),
            iso_millis(row["oldest"]),
            iso_millis(row["newest"]),
        )


def _total(counters: Iterable[Counters]) -> Counters:
    sums = [sum(column) for column in zip(*map(msgspec.structs.astuple, counters), strict=True)]
    return Counters(*sums) if sums else Counters(0, 0, 0, 0, 0, 0)


def _of_label(row: Record) -> LabelCounters:
    return LabelCounters(row["total"], row["pending"])

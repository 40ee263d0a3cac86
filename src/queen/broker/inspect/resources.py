"""Listing queues, partitions, namespaces and tasks with their counters: read live, and exact.

Numbers of a partition: `total` messages are stored; `pending` are those that a group has not consumed, or all when no
group has begun; `processing` are leased just now; `completed` are consumed and not dead. Of several groups the largest
number counts. Numbers of a queue are sums over its partitions; those of very many partitions are as of the last count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET

from queen.broker.inspect.queue_stats import LARGE, QueueStats
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
from queen.wire.api.resources.groups import GroupSummary
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

_BY_COUNTERS: Final[Mapping[str, Callable[[Record], float]]] = {
    "partitions": lambda row: int(row["partitions"]),
    "stored": lambda row: int(row["stored"]),
    "pending": lambda row: int(row["pending"]),
    "density": lambda row: int(row["stored"]) / max(1, int(row["partitions"])),
}


@dataclass(frozen=True, slots=True)
class QueueListing:
    """Which queues are listed, and in which order; empty: any."""

    namespace: str = ""
    task: str = ""
    search: str = ""
    sort: str = "created"
    descending: bool = True

    def admits(self, row: Record) -> bool:
        return (
            self.namespace in ("", row["namespace"])
            and self.task in ("", row["task"])
            and self.search.lower() in row["name"].lower()
        )


class Resources:
    """Views of one shard."""

    def __init__(
        self,
        database: Database,
        queue_stats: QueueStats,
        group_summaries: Callable[[], Awaitable[list[GroupSummary]]],
    ) -> None:
        """`queue_stats` gives the counters of all queues and `group_summaries` all groups; views share them."""
        self._database = database
        self._queue_stats = queue_stats
        self._group_summaries = group_summaries

    async def queues(
        self, wanted: QueueListing, limit: int | None = None, offset: int = 0, *, with_processing: bool = False
    ) -> list[QueueInList]:
        """Queues, newest first unless they are to be sorted otherwise.

        `pending` leaves out what is being processed, unless `with_processing`.
        """
        chosen: list[int] | None = None
        known = await self._queue_stats.large()
        lags = await self._lags() if wanted.sort == "lag" else {}
        if wanted.sort == "lag" or wanted.sort in _BY_COUNTERS:
            # Counting what all queues hold takes long where there are many partitions: it is done once for all pages.
            counted = [row for row in await self._queue_stats() if wanted.admits(row)]
            counted.sort(key=lambda row: row["name"])
            key = _BY_COUNTERS.get(wanted.sort, lambda row: lags.get(row["name"], -1))
            counted.sort(key=key, reverse=wanted.descending)
            chosen = [row["id"] for row in counted[offset : None if limit is None else offset + limit]]
            limit, offset = None, 0
        elif limit is None:
            known = {row["id"]: row for row in await self._queue_stats()}
        rows = await self._database.fetch(
            "queue_list",
            wanted.namespace,
            wanted.task,
            wanted.search,
            wanted.sort,
            wanted.descending,
            chosen,
            limit,
            offset,
            list(known),
        )
        listed = [_listed(row, known.get(row["id"]), with_processing=with_processing) for row in rows]
        for queue in listed:
            queue.max_time_lag = lags.get(queue.name, UNSET)
        return listed

    async def _lags(self) -> dict[str, int]:
        """How many seconds the group of a queue that is furthest behind is so, by the name of the queue."""
        lags: dict[str, int] = {}
        for group in await self._group_summaries():
            lags[group.queue_name] = max(lags.get(group.queue_name, 0), group.max_time_lag)
        return lags

    async def queue_count(self, wanted: QueueListing) -> int:
        (row,) = await self._database.fetch("count_queues", wanted.namespace, wanted.task, wanted.search)
        return int(row["found"])

    async def queue(self, name: str, limit: int = 1000, after: str = "") -> QueueView:
        """One queue with a page of its partitions, by name. Here `pending` includes what is being processed."""
        queue, rows, more = await self._queue_and_partitions(name, limit, 0, after)
        partitions = await chunked_map(self._partition, rows)
        shown = [partition.stats for partition in partitions]
        return QueueView(
            str(queue["public_id"]),
            queue["name"],
            queue["namespace"],
            queue["task"],
            iso_millis(queue["created_at"]),
            partitions,
            await self._totals(queue["id"], shown, whole=not more and not after),
            more,
            queue["paused"],
            sorted(queue["paused_groups"]),
        )

    async def partitions(
        self, queue_name: str, search: str, sort: str, descending: bool, limit: int, offset: int
    ) -> tuple[list[PartitionInList], int]:
        """A page of the partitions of one queue, or of all (by name) when no queue is named; and how many there are."""
        if queue_name:
            queue_id = (await self._queue(queue_name))["id"]
            page = await self._database.fetch("queue_partition_page", queue_id, search, sort, descending, limit, offset)
            (count,) = await self._database.fetch("count_queue_partitions", queue_id, search)
        else:
            page = await self._database.fetch("partition_page", search, descending, limit, offset)
            (count,) = await self._database.fetch("count_partitions", search)
        rows = await self._database.fetch("partition_list", [row["id"] for row in page])
        listed = [
            PartitionInList(**msgspec.structs.asdict(self._partition(row)), queue=row["queue_name"]) for row in rows
        ]
        return listed, count["found"]

    async def namespaces(self) -> list[NamespaceView]:
        """The namespaces that queues have, by name."""
        return [NamespaceView(*label) for label in await self._labels("namespace")]

    async def tasks(self) -> list[TaskView]:
        """The tasks that queues have, by name."""
        return [TaskView(*label) for label in await self._labels("task")]

    async def _labels(self, kind: str) -> list[tuple[str, int, int, LabelCounters]]:
        """The labels of a kind that are in use, by name: how many queues and partitions they have, and messages."""
        sums: dict[str, list[int]] = {}
        for row in await self._queue_stats():
            if row[kind]:
                own = sums.setdefault(row[kind], [0, 0, 0, 0])
                for place, value in enumerate((1, row["partitions"], row["stored"], row["pending"])):
                    own[place] += value
        return [
            (label, queues, partitions, LabelCounters(stored, pending))
            for label, (queues, partitions, stored, pending) in sorted(sums.items())
        ]

    async def counts(self) -> dict[str, int]:
        """How many `queues`, `partitions`, `namespaces` and `tasks` there are."""
        (row,) = await self._database.fetch("count_everything")
        return dict(row)

    async def check_exists(self, name: str) -> None:
        """Raises `NotFound` when there is no queue of that name."""
        await self._queue(name)

    async def queue_status(self, name: str, limit: int = 1000, offset: int = 0, after: str = "") -> QueueStatus:
        """One queue in detail: its configuration, and the counters of a page of its partitions (0: none of them)."""
        queue, rows, more = await self._queue_and_partitions(name, limit, offset, after)
        partitions = await chunked_map(self._partition_status, rows)
        whole = bool(limit) and not more and not after and not offset
        totals = await self._totals(queue["id"], [partition.stats for partition in partitions], whole=whole)
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
            more,
        )

    async def _queue_and_partitions(
        self, name: str, limit: int, offset: int, after: str
    ) -> tuple[Record, list[Record], str | None]:
        """A queue, a page of its partitions, and the name after which the next page begins, if there is one."""
        queue = await self._queue(name)
        if not limit:
            return queue, [], None
        page = await self._database.fetch("queue_partitions_after", queue["id"], limit + 1, offset, after)
        more = page[limit - 1]["name"] if len(page) > limit else None
        return queue, await self._database.fetch("partition_list", [row["id"] for row in page[:limit]]), more

    async def _totals(self, queue_id: int, shown: Sequence[Counters], *, whole: bool) -> Counters:
        """Counts of a queue: the sum over the partitions shown, if these are the `whole` queue."""
        if whole:
            return _total(shown)
        if (row := (await self._queue_stats.large()).get(queue_id)) is not None:
            completed = max(0, row["finished"] - row["dead_letters"])
            return Counters(row["stored"], row["pending"], row["processing"], completed, 0, row["dead_letters"])
        (row,) = await self._database.fetch("queue_totals", queue_id)
        return Counters(row["total"], row["pending"], row["processing"], row["completed"], 0, row["dead_letter"])

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
            partition_uuid(row["id"]),
            row["name"],
            iso_millis(row["created_at"]),
            Counters(row["total"], row["pending"], row["processing"], row["completed"], 0, row["dead_letter"]),
            iso_millis(row["oldest"]),
            iso_millis(row["newest"]),
        )


def _total(counters: Iterable[Counters]) -> Counters:
    sums = [sum(column) for column in zip(*map(msgspec.structs.astuple, counters), strict=True)]
    return Counters(*sums) if sums else Counters(0, 0, 0, 0, 0, 0)


def _listed(row: Record, counted: Record | None, *, with_processing: bool) -> QueueInList:
    """A queue in a list; `counted` are its counters, if they are not in the row."""
    held = counted or row
    return QueueInList(
        str(row["public_id"]),
        row["name"],
        row["namespace"],
        row["task"],
        iso_millis(row["created_at"]),
        held["partitions"],
        ShortCounters(
            held["total" if counted is None else "stored"],
            max(0, held["pending"] - (0 if with_processing else held["processing"])),
            held["processing"],
        ),
        row["paused"],
        iso_millis(counted["at"]) if counted is not None and counted["partitions"] >= LARGE else UNSET,
    )

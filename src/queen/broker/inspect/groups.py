"""Administration of consumer groups: where they are, forgetting them.

A group knows a partition when it has a cursor there, or when a subscription of its covers it; in the second case it is
where the first message after its subscription time is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

from queen.broker.change_log import log_group_change
from queen.broker.events import Event, EventKind, named
from queen.concurrency import chunked_map
from queen.errors import NotFound
from queen.log.catalog import QUEUE_MODE, Catalog
from queen.log.segments import TimeSearch, offsets_after
from queen.single_flight import SharedResult
from queen.storage.database import Database, Fetcher, Record
from queen.wire.api.resources.groups import (
    GroupOnPartition,
    GroupOnQueue,
    GroupSummary,
    LaggingPartition,
)
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis

Starts: TypeAlias = tuple[list[int], list[int], list[int]]
"""(group, partition, offset), column by column: where groups are to start on partitions they have not met."""

Pair: TypeAlias = tuple[int, int]
"""A group and a queue."""


class OldestUnconsumed:
    """Times of the oldest messages that groups have not consumed: read from segments, and kept while a group stays.

    `places` of a pair is a hash of the partitions where the group is behind, and of where it is on each: as long as it
    is the same, so is the oldest message, for the time of a stored message never changes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[Pair, tuple[int, datetime]] = {}

    async def of(self, rows: Sequence[Record], starts: Starts) -> dict[Pair, datetime]:
        """The times for those of the rows (`group_id`, `queue_id`, `places`) that have a backlog."""
        behind = {(row["group_id"], row["queue_id"]): row["places"] for row in rows if row["places"] is not None}
        known = {pair: kept for pair in behind if (kept := self._known.get(pair)) and kept[0] == behind[pair]}
        moved = [pair for pair in behind if pair not in known]
        if moved:
            groups, queues = zip(*moved, strict=True)
            for row in await self._database.fetch("oldest_unconsumed", groups, queues, *starts):
                # With the places of this very look: the group may have gone on since the rows were read.
                known[row["group_id"], row["queue_id"]] = (row["places"], row["oldest"])
        self._known = known
        return {pair: oldest for pair, (_, oldest) in known.items()}


_LAGGING_SECONDS: Final = 300
MOST_COUNTED: Final = 10_000
MOST_FURTHEST: Final = 1000
MOST_RANKED: Final = 1000
"""How many partitions are ranked at once, for all pages that show them."""
_MOST_RANKINGS: Final = 100


class Groups:
    """Shows where consumer groups are, forgets them, and has every worker know of it."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        publish: Callable[[Sequence[Event]], None],
        rank_cache_seconds: float = 0.0,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._publish = publish
        self._oldest = OldestUnconsumed(database)
        self._rank_cache_seconds = rank_cache_seconds
        self._rankings: dict[tuple[int, int, str, bool], SharedResult[list[int]]] = {}

    async def summaries(self) -> list[GroupSummary]:
        """Every group with every queue it knows a partition of, by name. Lags are exact."""
        groups = [row["id"] for row in await self._database.fetch("all_groups")]
        starts = await self.starts(groups)
        rows = await self._database.fetch("group_list", groups, *starts)
        oldest = await self._oldest.of(rows, starts)
        return [_summary(row, oldest.get((row["group_id"], row["queue_id"]))) for row in rows]

    async def lags(self) -> Sequence[Record]:
        """How many messages (`behind`) each group has before it on each queue, exactly."""
        groups = [row["id"] for row in await self._database.fetch("all_groups")]
        return await self._database.fetch("group_lags", *await self.starts(groups))

    async def furthest(self) -> list[LaggingPartition]:
        """The partitions on which a group is furthest behind; `MOST_FURTHEST` of them."""
        return await self.lagging(0, MOST_FURTHEST, 0)

    async def lagging(self, min_seconds: int, limit: int, offset: int) -> list[LaggingPartition]:
        """The partitions on which a group is more than `min_seconds` behind, the furthest first."""
        groups = [row["id"] for row in await self._database.fetch("all_groups")]
        rows = await self._positions(groups, float(min_seconds), limit, offset)
        return [
            LaggingPartition(
                row["group_name"],
                row["queue_name"],
                row["partition_name"],
                partition_uuid(row["partition_id"]),
                row["lease_id"],
                row["behind"],
                int(row["seconds"]),
                round(row["seconds"] / 3600, 2),
                iso_millis(row["oldest"]),
                iso_millis(row["last_consumed_at"]),
            )
            for row in rows
        ]

    async def detail(self, group: str) -> dict[str, GroupOnQueue]:
        """Positions of a group on its partitions, by queue; empty for an unknown group."""
        group_id = await self.group(group)
        rows = [] if group_id is None else await self._positions([group_id], None, None, 0)
        queues: dict[str, GroupOnQueue] = {}
        for row, place in zip(rows, await chunked_map(_place, rows), strict=True):
            queues.setdefault(row["queue_name"], GroupOnQueue([])).partitions.append(place)
        return queues

    async def partitions(
        self, group: str, queue: str, search: str, sort: str, descending: bool, limit: int, offset: int
    ) -> tuple[list[GroupOnPartition], int]:
        """Positions of a group on a page of the partitions of a queue that it knows; and how many those are.

        More than `MOST_COUNTED` are not counted, unless there is something to search for: `summaries` has their number.
        """
        records = await self._database.fetch("queue_by_name", queue)
        if not records:
            raise NotFound("Queue not found")
        queue_id, group_id = records[0]["id"], await self.group(group)
        if group_id is None:
            return [], 0
        ask = partial(self._ranked, group_id, queue_id, search, sort, descending, queue)
        if search or sort == "name" or offset + limit > MOST_RANKED:
            page = await ask(limit, offset)
        else:
            ranking = self._ranking((group_id, queue_id, sort, descending), partial(ask, MOST_RANKED, 0))
            page = (await ranking.get())[offset : offset + limit]
        most = None if search else MOST_COUNTED
        (count,) = await self._database.fetch("count_group_partitions", group_id, queue_id, search, queue, most)
        rows = await self._database.fetch("group_places", group_id, page, queue)
        unmet = [row for row in rows if row["position"] is None]
        starts = await offsets_after(
            self._database,
            [TimeSearch(row["id"], row["floor_offset"], row["next_offset"], row["since"]) for row in unmet],
        )
        started = dict(zip((row["id"] for row in unmet), starts, strict=True))
        positions = [row["position"] if row["position"] is not None else started[row["id"]] for row in rows]
        behind = [(row["id"], at) for row, at in zip(rows, positions, strict=True) if row["next_offset"] > at]
        times = await self._database.fetch("stored_times", [one[0] for one in behind], [one[1] for one in behind])
        oldest = {row["partition_id"]: row["created_at"] for row in times}
        listed = [
            GroupOnPartition(
                row["name"],
                row["lease_id"],
                iso_millis(row["last_consumed_at"]),
                row["total_consumed"],
                max(0, row["next_offset"] - at),
                max(0, int((row["at"] - oldest[row["id"]]).total_seconds())) if row["id"] in oldest else 0,
                row["leased"],
            )
            for row, at in zip(rows, positions, strict=True)
        ]
        if sort == "behind":
            # A ranking may be older than these positions.
            listed.sort(key=lambda one: one.offset_lag, reverse=descending)
        return listed, count["found"]

    async def _ranked(
        self, group_id: int, queue_id: int, search: str, sort: str, descending: bool, queue: str, *page: int
    ) -> list[int]:
        """The partitions of a page (limit, offset) in an order."""
        rows = await self._database.fetch(
            "group_partition_page", group_id, queue_id, search, sort, descending, *page, queue
        )
        return [row["id"] for row in rows]

    def _ranking(
        self, key: tuple[int, int, str, bool], rank: Callable[[], Awaitable[list[int]]]
    ) -> SharedResult[list[int]]:
        """The first partitions in an order; those last asked for are kept."""
        found = self._rankings.pop(key, None) or SharedResult(rank, self._rank_cache_seconds)
        self._rankings[key] = found
        if len(self._rankings) > _MOST_RANKINGS:
            del self._rankings[next(iter(self._rankings))]
        return found

    async def delete(self, group: str, queue: str | None, *, with_subscriptions: bool) -> int:
        """Forget where a group is, on one queue or on all; returns on how many partitions.

        With its subscriptions gone it starts again at its next pop, else again where they say. Dead letters stay, and
        it is not paused any more. A group that has no dead letters, and no place on any other queue, is then gone.
        """
        group_id = await self.group(group)
        forgotten: Sequence[Record] = ()
        partitions = 0
        async with self._database.transaction() as transaction:
            if group_id is not None:
                if with_subscriptions:
                    forgotten = await transaction.fetch("forget_subscriptions", group_id, queue)
                (row,) = await transaction.fetch("forget_cursors", group_id, queue)
                partitions = row["partitions"]
            gone = group_id is not None and with_subscriptions and await self._forget(transaction, group, group_id)
            resumed = await transaction.fetch("forget_pauses", group, queue)
            changes = [await log_group_change(transaction, group)] if forgotten or partitions or gone else []
        for one in resumed:
            self._catalog.refresh_queue(one["name"])
            changes.append(named(EventKind.QUEUE_CHANGED, one["name"]))
        self._publish(changes)
        return partitions

    async def _forget(self, transaction: Fetcher, group: str, group_id: int) -> bool:
        """Remove the group itself, if it has nothing left anywhere; whether it is gone."""
        if group == QUEUE_MODE:
            return False
        return bool(await transaction.fetch("forget_group", group_id))

    async def move_subscriptions(self, group: str, since: datetime) -> int:
        """Have a group start after `since` on partitions it has not met; returns how many subscriptions it has."""
        group_id = await self.group(group)
        if group_id is None:
            return 0
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch("move_subscriptions", group_id, since)
            changes = [await log_group_change(transaction, group)] if rows else []
        self._publish(changes)
        return len(rows)

    async def current_lease(self, group: str, queue: str, partition: str) -> tuple[int, str]:
        """The partition's number, and the id of the live lease that a group has there. Raises `NotFound` for none."""
        partition_id = await self.partition(queue, partition)
        group_id = await self.group(group)
        rows = await self._database.fetch("live_lease", partition_id, group_id) if group_id is not None else []
        if not rows:
            raise NotFound(f"The group has no lease on partition {partition!r}")
        return partition_id, rows[0]["lease_id"]

    async def partition(self, queue: str, partition: str) -> int:
        """The number of a partition. Raises `NotFound` for none."""
        records = await self._database.fetch("queue_by_name", queue)
        found = await self._database.fetch("partitions_by_names", [records[0]["id"]], [partition]) if records else []
        if not found:
            raise NotFound("Partition not found")
        partition_id: int = found[0]["id"]
        return partition_id

    async def group(self, name: str) -> int | None:
        """The number of a group; None for an unknown one."""
        return await self._catalog.existing_group(name)

    async def _positions(
        self, groups: Sequence[int], min_seconds: float | None, limit: int | None, offset: int
    ) -> Sequence[Record]:
        starts = await self.starts(groups)
        return await self._database.fetch("group_positions", groups, *starts, min_seconds, limit, offset)

    async def starts(self, groups: Sequence[int]) -> Starts:
        """Where groups are to start on partitions that they have not met, although messages came."""
        rows = await self._database.fetch("unmet_news", groups)
        offsets = await offsets_after(
            self._database,
            [TimeSearch(row["id"], row["floor_offset"], row["next_offset"], row["since"]) for row in rows],
        )
        return [row["group_id"] for row in rows], [row["id"] for row in rows], offsets


def _place(row: Record) -> GroupOnPartition:
    return GroupOnPartition(
        row["partition_name"],
        row["lease_id"],
        iso_millis(row["last_consumed_at"]),
        row["total_consumed"],
        row["behind"],
        int(row["seconds"]),
        row["leased"],
    )


def _summary(row: Record, oldest: datetime | None) -> GroupSummary:
    seconds = 0 if oldest is None else max(0, int((row["at"] - oldest).total_seconds()))
    calm = "Stable" if row["consumed"] else "Dead"
    return GroupSummary(
        row["group_name"],
        [row["queue_name"]],
        row["queue_name"],
        row["members"],
        row["lagging"],
        row["behind"],
        seconds,
        "Lagging" if seconds > _LAGGING_SECONDS else calm,
        row["mode"],
        iso_millis(row["since"]),
        iso_millis(row["subscribed_at"]),
        row["paused"],
        row["queue_paused"],
        row["leases"],
        row["consumed"],
        row["namespace"],
        row["task"],
    )

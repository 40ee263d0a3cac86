"""Leases this worker gave out: which offset each transaction id of a delivery has."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

from queen.broker.batcher import Batcher, fail_request
from queen.errors import NotFound
from queen.log.segments import find_message, leased_offsets
from queen.storage.database import Database, Fetcher, Link
from queen.wire.envelope import Envelope
from queen.wire.ids import is_uuid, parse_lease
from queen.wire.segment import Segment, transaction_hash

_MOST_MESSAGES = 300_000
_MOST_BYTES = 48 << 20

OnFreed: TypeAlias = Callable[[Sequence[tuple[int, int, int, int]]], None]
"""Called with (queue, partition, group, available) for every lease that ended."""


class Lease:
    """One partition's span of one delivery."""

    __slots__ = ("_offsets", "_slices", "acked", "count", "group_id", "nbytes", "partition_id")

    def __init__(self, partition_id: int, group_id: int, start: int, end: int, segments: Sequence[Segment]) -> None:
        self.partition_id = partition_id
        self.group_id = group_id
        self.count = end - start
        # The id columns are kept as stored and read only when an ack comes.
        self._slices = [
            (
                segment.transactions_json,
                max(start, segment.base_offset) - segment.base_offset,
                segment.base_offset,
                min(end, segment.end_offset) - segment.base_offset,
            )
            for segment in segments
            # A lease ends before the deleted messages at the end of what was read, which may be whole segments.
            if segment.base_offset < end and segment.end_offset > start
        ]
        self.nbytes = sum([len(column) for column, _, _, _ in self._slices])
        self._offsets: dict[str, int] | None = None
        self.acked = 0
        """Up to which offset acknowledgments that came to this worker have consumed."""

    def offsets(self) -> dict[str, int]:
        """Offset of each transaction id in the span."""
        if self._offsets is None:
            self._offsets = {}
            for column, first, base, last in self._slices:
                ids = Segment.decode_transactions(column)
                self._offsets.update(zip(ids[first:last], range(base + first, base + last), strict=True))
        return self._offsets


class LeaseBook:
    """The leases of this worker by (lease id, partition); forgets the oldest beyond a number of messages, or of bytes.

    Only a help: what it does not know is read from PostgreSQL.
    """

    def __init__(self) -> None:
        self._leases: OrderedDict[tuple[str, int], Lease] = OrderedDict()
        self._by_cursor: dict[tuple[int, int], Lease] = {}
        self._messages = 0
        self._nbytes = 0

    def add(self, lease_id: str, lease: Lease) -> None:
        self._leases[lease_id, lease.partition_id] = lease
        self._by_cursor[lease.partition_id, lease.group_id] = lease
        self._messages += lease.count
        self._nbytes += lease.nbytes
        while (self._messages > _MOST_MESSAGES or self._nbytes > _MOST_BYTES) and len(self._leases) > 1:
            self._drop(next(iter(self._leases)))

    def get(self, lease_id: str, partition_id: int) -> Lease | None:
        return self._leases.get((lease_id, partition_id))

    def of_cursor(self, partition_id: int, group_id: int) -> Lease | None:
        """The newest delivery of a partition to a group, for acks that name no lease."""
        return self._by_cursor.get((partition_id, group_id))

    def finish(self, lease_id: str, partition_id: int) -> None:
        if (lease_id, partition_id) in self._leases:
            self._drop((lease_id, partition_id))

    def _drop(self, key: tuple[str, int]) -> None:
        lease = self._leases.pop(key)
        self._messages -= lease.count
        self._nbytes -= lease.nbytes
        cursor = (lease.partition_id, lease.group_id)
        if self._by_cursor.get(cursor) is lease:
            del self._by_cursor[cursor]


@dataclass(slots=True, eq=False)
class Renewal:
    lease_id: str
    seconds: float
    answer: asyncio.Future[Renewed]


class Renewed(NamedTuple):
    """A lease that was renewed: the earliest time at which it now ends, and of how many partitions."""

    until: datetime
    partitions: int


class Renewer:
    """Makes leases last longer, each with all the partitions it holds."""

    def __init__(self, database: Database) -> None:
        self._link: Link = database.link()
        self.batcher: Batcher[Renewal] = Batcher(self._run, limit=500)

    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[Renewed]:
        """The future raises `NotFound` when the lease is not live."""
        renewal = Renewal(lease_id, seconds, asyncio.get_running_loop().create_future())
        self.batcher.submit(renewal)
        return renewal.answer

    async def _run(self, batch: list[Renewal]) -> None:
        rows: list[tuple[int, Renewal]] = []
        for renewal in batch:
            place = parse_lease(renewal.lease_id) if is_uuid(renewal.lease_id) else None
            if place is None:
                continue
            partition_id, several = place
            held = [partition_id]
            if several:
                found = await self._link.fetch("lease_partitions", partition_id, renewal.lease_id)
                held = [row["partition_id"] for row in found]
            rows += [(id, renewal) for id in held]
        rows.sort(key=lambda row: row[0])
        ends: dict[int, Renewed] = {}
        if rows:
            renewed = await self._link.fetch(
                "renew",
                [id for id, _ in rows],
                [renewal.lease_id for _, renewal in rows],
                [renewal.seconds for _, renewal in rows],
            )
            for row in renewed:
                key, until = id(rows[row["slot"] - 1][1]), row["lease_until"]
                before = ends.get(key)
                ends[key] = Renewed(min(before.until, until), before.partitions + 1) if before else Renewed(until, 1)
        for renewal in batch:
            end = ends.get(id(renewal))
            if end is None:
                fail_request(renewal, NotFound("Lease not found"))
            elif not renewal.answer.done():
                renewal.answer.set_result(end)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease and every partition it was given out for."""

    lease_id: str
    partition_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Release:
    leases: Sequence[HeldLease]
    answer: asyncio.Future[int]


class Releaser:
    """Ends leases early. What they hold goes to the next consumer as it would have when they ran out, only sooner."""

    def __init__(self, database: Database, leases: LeaseBook, on_freed: OnFreed) -> None:
        self._link: Link = database.link()
        self._leases = leases
        self._on_freed = on_freed
        self.batcher: Batcher[_Release] = Batcher(self._run, weigh=lambda release: len(release.leases), limit=1000)

    def release(self, leases: Sequence[HeldLease]) -> asyncio.Future[int]:
        """The future gives how many partitions came free; those whose lease had ended before are none of them."""
        release = _Release(leases, asyncio.get_running_loop().create_future())
        self.batcher.submit(release)
        return release.answer

    async def _run(self, batch: list[_Release]) -> None:
        # Cursors are always locked in this order, so two workers cannot wait for each other.
        rows = sorted(
            (partition_id, lease.lease_id)
            for release in batch
            for lease in release.leases
            for partition_id in lease.partition_ids
        )
        released = await self._link.fetch(
            "release_leases", [partition_id for partition_id, _ in rows], [lease_id for _, lease_id in rows]
        )
        for row in released:
            self._leases.finish(row["lease_id"], row["partition_id"])
        self._on_freed([(row["queue_id"], row["partition_id"], row["group_id"], row["available"]) for row in released])
        freed = {(row["partition_id"], row["lease_id"]) for row in released}
        for release in batch:
            if not release.answer.done():
                release.answer.set_result(
                    sum((id, lease.lease_id) in freed for lease in release.leases for id in lease.partition_ids)
                )


async def find_offset(
    fetcher: Fetcher,
    envelope: Envelope,
    leases: LeaseBook,
    partition_id: int,
    group_id: int | None,
    transaction_id: str,
) -> int | None:
    """The offset of a message that a group works on, or has: as leased by this worker, by any worker, then anywhere."""
    if group_id is not None:
        lease = leases.of_cursor(partition_id, group_id)
        offset = lease.offsets().get(transaction_id) if lease is not None else None
        if offset is not None:
            return offset
        spans = await leased_offsets(fetcher, [(partition_id, group_id)])
        offset = spans.get((partition_id, group_id), {}).get(transaction_hash(transaction_id, partition_id))
        if offset is not None:
            return offset
    found = await find_message(fetcher, envelope, partition_id, transaction_id)
    return found.offset if found is not None else None

"""Leases this worker gave out: which offset each transaction id of a delivery has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from queen.wire.segment import Segment

_MOST_MESSAGES = 300_000


class Lease:
    """One partition's span of one delivery."""

    __slots__ = ("_offsets", "_slices", "count", "group_id", "partition_id")

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
        ]
        self._offsets: dict[str, int] | None = None

    def offsets(self) -> dict[str, int]:
        """Offset of each transaction id in the span."""
        if self._offsets is None:
            self._offsets = {}
            for column, first, base, last in self._slices:
                ids = Segment.decode_transactions(column)
                self._offsets.update(zip(ids[first:last], range(base + first, base + last), strict=True))
        return self._offsets


class LeaseBook:
    """The leases of this worker by (lease id, partition); forgets the oldest beyond a number of messages.

    Only a help: what it does not know is read from PostgreSQL.
    """

    def __init__(self) -> None:
        self._leases: OrderedDict[tuple[str, int], Lease] = OrderedDict()
        self._by_cursor: dict[tuple[int, int], Lease] = {}
        self._messages = 0

    def add(self, lease_id: str, lease: Lease) -> None:
        self._leases[lease_id, lease.partition_id] = lease
        self._by_cursor[lease.partition_id, lease.group_id] = lease
        self._messages += lease.count
        while self._messages > _MOST_MESSAGES and len(self._leases) > 1:
            self._drop(next(iter(self._leases)))

    def get(self, lease_id: str, partition_id: int) -> Lease | None:
        return self._leases.get((lease_id, partition_id))

    def of_cursor(self, partition_id: int, group_id: int) -> Lease | None:
        """The newest delivery of a partition to a group, for acks that name no lease."""
        return self._by_cursor.get((partition_id, group_id))

    def partitions(self, lease_id: str, first_partition_id: int) -> list[int]:
        """The partitions of a lease that are known here."""
        return [first_partition_id] if (lease_id, first_partition_id) in self._leases else []

    def finish(self, lease_id: str, partition_id: int) -> None:
        if (lease_id, partition_id) in self._leases:
            self._drop((lease_id, partition_id))

    def _drop(self, key: tuple[str, int]) -> None:
        lease = self._leases.pop(key)
        self._messages -= lease.count
        cursor = (lease.partition_id, lease.group_id)
        if self._by_cursor.get(cursor) is lease:
            del self._by_cursor[cursor]

"""Finding a message by its transaction id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from queen.broker.leases import LeaseBook
from queen.broker.seen import transaction_hash
from queen.broker.segments import read_segment
from queen.errors import Conflict
from queen.storage.database import Fetcher
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.segment import MalformedSegment, Segment

_PAGE = 500


class UnreadableSegment(Conflict):
    """A stored message cannot be read, for want of its key or because it was damaged; it stays where it is."""


async def leased_offsets(
    fetcher: Fetcher, cursors: Collection[tuple[int, int]]
) -> dict[tuple[int, int], dict[int, int]]:
    """For (partition, group) pairs: hash of transaction id -> offset, over the span they lease."""
    rows = await fetcher.fetch("leased_ids", [pid for pid, _ in cursors], [gid for _, gid in cursors])
    spans: dict[tuple[int, int], dict[int, int]] = {}
    for row in rows:
        hashes = np.frombuffer(row["ids"], dtype="<u8", offset=16).tolist()
        base, start, end = row["base_offset"], row["lease_start"], row["lease_end"]
        span = spans.setdefault((row["partition_id"], row["group_id"]), {})
        for offset, value in enumerate(hashes, base):
            if start <= offset < end:
                span[value] = offset
    return spans


async def locate(fetcher: Fetcher, partition_id: int, transaction_ids: Collection[str]) -> dict[str, int]:
    """Offsets of messages by transaction id, searched from the newest; those not found are absent."""
    wanted = {transaction_hash(id, partition_id): id for id in transaction_ids}
    targets = np.fromiter(wanted, dtype=np.uint64, count=len(wanted))
    found: dict[str, int] = {}
    before = 1 << 62
    while True:
        page = await fetcher.fetch("segment_ids_before", partition_id, before, _PAGE, 0.0)
        for row in page:
            hashes = np.frombuffer(row["ids"], dtype="<u8", offset=16)
            for index in np.flatnonzero(np.isin(hashes, targets)):
                found.setdefault(wanted[int(hashes[index])], row["base_offset"] + int(index))
        if len(page) < _PAGE or len(found) == len(wanted):
            return found
        before = page[-1]["base_offset"]


@dataclass(frozen=True, slots=True)
class Located:
    """A message: the segment it lies in, and its place there."""

    segment: Segment
    index: int
    encrypted: bool

    @property
    def offset(self) -> int:
        return self.segment.base_offset + self.index


async def find_message(
    fetcher: Fetcher, envelope: Envelope, partition_id: int, transaction_id: str, floor_offset: int = 0
) -> Located | None:
    """The newest message at or above `floor_offset` that has this transaction id and was not deleted."""
    wanted = transaction_hash(transaction_id, partition_id)
    before = 1 << 62
    while True:
        rows = await fetcher.fetch(
            "newest_segment_with", partition_id, before, floor_offset, wanted.to_bytes(8, "little")
        )
        if not rows:
            return None
        try:
            segment = read_segment(envelope, rows[0])
        except (EnvelopeError, MalformedSegment) as error:
            raise UnreadableSegment(f"the message cannot be read: {error}") from error
        # Equal hashes are not yet equal ids, and the id may be that of a message that was deleted and pushed again.
        ids = segment.transaction_ids()
        lowest = max(0, floor_offset - segment.base_offset)
        for index in range(segment.count - 1, lowest - 1, -1):
            if ids[index] == transaction_id and not segment.is_deleted(index):
                return Located(segment, index, envelope.is_encrypted(rows[0]["body"]))
        before = segment.base_offset


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

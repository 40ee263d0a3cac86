"""Reading messages where they lie: whole segments at a time, and never many bytes at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from queen.broker.segments import read_segment
from queen.storage.database import Fetcher, Record
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment, Segment

Place: TypeAlias = tuple[int, int]
"""(partition, offset) of a message, or of the start of a segment."""

_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored. When it cannot be read, `unreadable` says why and the rest is empty."""

    id: str
    created_at: datetime
    transaction_id: str | None = None
    trace_id: str | None = None
    producer: str | None = None
    payload: bytes = b"null"
    unreadable: str | None = None


class StoredMessages:
    """Reads messages of one shard by their places."""

    def __init__(self, fetcher: Fetcher, envelope: Envelope) -> None:
        self._fetcher = fetcher
        self._envelope = envelope

    async def read(self, places: Collection[Place], *, payloads: bool) -> dict[Place, StoredMessage]:
        """The messages at these places; those deleted or gone are absent."""
        wanted: dict[Place, list[int]] = {}
        sizes: dict[Place, int] = {}
        ordered = list(places)
        rows = await self._fetcher.fetch("segments_of", [pid for pid, _ in ordered], [offset for _, offset in ordered])
        for row in rows:
            partition_id, offset = ordered[row["slot"] - 1]
            start = (partition_id, row["base_offset"])
            wanted.setdefault(start, []).append(offset)
            sizes[start] = row["nbytes"]
        found: dict[Place, StoredMessage] = {}
        for some in _portions(sizes):
            rows = await self._fetcher.fetch("segments_at", [pid for pid, _ in some], [base for _, base in some])
            for row in rows:
                start = (row["partition_id"], row["base_offset"])
                for offset, message in self._messages(row, wanted[start], payloads):
                    found[start[0], offset] = message
        return found

    def _messages(self, row: Record, offsets: list[int], payloads: bool) -> Iterator[tuple[int, StoredMessage]]:
        base = row["base_offset"]
        try:
            segment = read_segment(self._envelope, row)
        except (EnvelopeError, MalformedSegment) as error:
            block = IdBlock.parse(row["ids"][:16])
            for offset in offsets:
                yield offset, StoredMessage(block.text(offset - base), row["created_at"], unreadable=str(error))
            return
        ids = segment.transaction_ids()
        for offset in offsets:
            index = offset - base
            if index < segment.count and not segment.is_deleted(index):
                yield offset, stored_message(segment, index, ids[index], payload=payloads)


def stored_message(segment: Segment, index: int, transaction_id: str, *, payload: bool = True) -> StoredMessage:
    """One message of a segment that has been read."""
    return StoredMessage(
        segment.block.text(index),
        segment.created_at,
        transaction_id,
        segment.trace_id(index),
        segment.producer(index),
        segment.payload(index) if payload else b"null",
    )


def _portions(sizes: dict[Place, int]) -> Iterator[list[Place]]:
    """Segments in groups that are small enough to be held in memory together."""
    some: list[Place] = []
    nbytes = 0
    for start, size in sizes.items():
        if some and nbytes + size > _MOST_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(start)
        nbytes += size
    if some:
        yield some

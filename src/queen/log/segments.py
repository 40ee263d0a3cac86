"""Segments this worker has in memory: what it just stored and what it just read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import numpy as np

from queen.errors import Conflict
from queen.storage.database import Fetcher, Record
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment, Segment, transaction_hash


def read_segment(envelope: Envelope, row: Record) -> Segment:
    """A segment from a row with `base_offset`, `created_at`, `ids` and `body`."""
    segment = Segment(row["base_offset"], row["created_at"], IdBlock.parse(row["ids"][:16]), envelope.open(row["body"]))
    segment.check()
    return segment


_MOST_BEHIND = 128


class SegmentCache:
    """Keeps the contiguous newest segments of recently used partitions, up to a number of bytes in all."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        # Of partitions with a backlog, the segment that was read last: small batches take it in several bites.
        self._behind: OrderedDict[int, Segment] = OrderedDict()
        self._nbytes = 0
        self.hits = 0
        self.misses = 0
        # Counts how often something was forgotten, for callers that read and then put.
        self.version = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def put(self, partition_id: int, segments: Sequence[Segment]) -> None:
        """Add segments, in order. A gap before them starts the partition's run over."""
        if not segments or self._capacity <= 0:
            return
        run = self._runs.get(partition_id)
        if run is None:
            run = self._runs[partition_id] = _Run()
        else:
            self._runs.move_to_end(partition_id)
        for segment in segments:
            self._nbytes += run.append(segment)
        while self._nbytes > self._capacity and self._runs:
            self._shrink()

    def put_read(self, partition_id: int, segments: Sequence[Segment]) -> None:
        """Add segments that were read: at the newest end they join the run, further back only the last is kept."""
        if not segments or self._capacity <= 0:
            return
        run = self._runs.get(partition_id)
        if run is None or segments[-1].base_offset >= run.segments[0].base_offset:
            self._behind.pop(partition_id, None)
            self.put(partition_id, segments)
            return
        self._behind[partition_id] = segments[-1]
        self._behind.move_to_end(partition_id)
        if len(self._behind) > _MOST_BEHIND:
            self._behind.popitem(last=False)

    def span(self, partition_id: int) -> tuple[int, int]:
        """The offsets held of a partition, [from, to), where it was last read; (0, 0) when none."""
        behind = self._behind.get(partition_id)
        if behind is not None:
            return behind.base_offset, behind.end_offset
        run = self._runs.get(partition_id)
        return (run.segments[0].base_offset, run.segments[-1].end_offset) if run else (0, 0)

    def get(self, partition_id: int, start: int, end: int) -> list[Segment] | None:
        """The segments that overlap [start, end), or None when one of them is not here."""
        behind = self._behind.get(partition_id)
        if behind is not None and behind.base_offset <= start and end <= behind.end_offset:
            self.hits += 1
            return [behind]
        run = self._runs.get(partition_id)
        if run is None or start < run.segments[0].base_offset or end > run.segments[-1].end_offset:
            self.misses += 1
            return None
        self.hits += 1
        self._runs.move_to_end(partition_id)
        first = bisect_right(run.bases, start) - 1
        last = first
        while last < len(run.segments) and run.bases[last] < end:
            last += 1
        return run.segments[first:last]

    def forget(self, partition_id: int) -> None:
        """Messages of a partition were removed: what is held of it is not true any more."""
        self.version += 1
        self._behind.pop(partition_id, None)
        run = self._runs.pop(partition_id, None)
        if run is not None:
            self._nbytes -= run.nbytes

    def forget_everything(self) -> None:
        self.version += 1
        self._behind.clear()
        self._runs.clear()
        self._nbytes = 0

    def _shrink(self) -> None:
        """Take from the partition that was not used for longest: its oldest segment first."""
        partition_id, run = next(iter(self._runs.items()))
        self._nbytes -= run.pop_oldest()
        if not run.segments:
            del self._runs[partition_id]


class _Run:
    __slots__ = ("bases", "nbytes", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.bases: list[int] = []
        self.nbytes = 0

    def append(self, segment: Segment) -> int:
        """Add a segment at the end; returns by how many bytes the run grew (or shrank)."""
        before = self.nbytes
        if self.segments and segment.base_offset < self.segments[-1].end_offset:
            return 0
        if self.segments and segment.base_offset != self.segments[-1].end_offset:
            self.segments.clear()
            self.bases.clear()
            self.nbytes = 0
        self.segments.append(segment)
        self.bases.append(segment.base_offset)
        self.nbytes += segment.nbytes
        return self.nbytes - before

    def pop_oldest(self) -> int:
        nbytes = self.segments.pop(0).nbytes
        self.bases.pop(0)
        self.nbytes -= nbytes
        return nbytes


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


@dataclass(frozen=True, slots=True)
class TimeSearch:
    """A time, looked for among the offsets `low` to `high` of a partition."""

    partition_id: int
    low: int
    high: int
    time: datetime


async def offsets_after(fetcher: Fetcher, searches: Sequence[TimeSearch]) -> list[int]:
    """For each moment the first offset whose message was stored after it; `high` when there is none.

    PostgreSQL bisects: the cost grows with the logarithm of what the partition holds.
    """
    if not searches:
        return []
    rows = await fetcher.fetch(
        "offsets_after",
        [search.partition_id for search in searches],
        [search.low for search in searches],
        [search.high for search in searches],
        [search.time for search in searches],
    )
    offsets = [search.high for search in searches]
    for row in rows:
        offsets[row["slot"] - 1] = row["first_offset"]
    return offsets

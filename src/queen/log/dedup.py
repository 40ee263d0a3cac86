"""One message per transaction id and partition, inside the queue's window.

A worker knows the ids of a partition up to `Partition.known_to`: they are in its filter. What the filter does not hold
was certainly not pushed; what it may hold is looked up. A push is stored only if the partition still ends at
`known_to`, so what others appended meanwhile is learnt first, under the partition's lock if need be.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from queen.chunks import chunks
from queen.log.catalog import Partition
from queen.log.dedup_filter import DedupFilter, Hashes
from queen.log.segments import TimeSearch, offsets_after, read_segment
from queen.storage.database import Fetcher, Record
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment

_PAGE = 500
_LOAD_PAGE = 2000
_FIRST_PAGE = 16
_LOADED_TOGETHER = 256
_CLOCK_SKEW = 60.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """A stored message that already has the transaction id, and the ids of the segment it lies in."""

    message_id: str
    block: bytes


class Dedup:
    """What this worker knows of transaction ids."""

    def __init__(self, envelope: Envelope, filter: DedupFilter) -> None:
        self._envelope = envelope
        self.filter = filter
        self.lookups = 0
        self._longest_window = 0.0

    def learn(self, hashes: Hashes | list[int], spans: Iterable[tuple[Partition | None, int, int]]) -> None:
        """These ids were stored; `spans` says where: (partition, first offset, number)."""
        self.filter.add(hashes)
        self.filter.drop_before(time.time() - self._longest_window - _CLOCK_SKEW)
        for partition, base, count in spans:
            # Only what joins on to what is known makes more known; another push may have caught up meanwhile.
            if partition is not None and partition.known_to == base:
                partition.known_to = base + count

    async def load_windows(self, fetcher: Fetcher, partitions: Iterable[Partition], window: dict[int, float]) -> None:
        """Load the ids inside the window of partitions that this worker does not know yet."""
        unknown = [partition for partition in partitions if partition.known_to is None]
        for group in chunks(unknown, _LOADED_TOGETHER):
            await self._load_windows(fetcher, group, [float(window[partition.queue_id]) for partition in group])

    async def _load_windows(self, fetcher: Fetcher, unknown: Sequence[Partition], windows: Sequence[float]) -> None:
        """One statement reads the whole window of most partitions, and the first page of the others."""
        rows = await fetcher.fetch("partition_histories", [each.id for each in unknown], windows, _FIRST_PAGE)
        ends: dict[int, int] = {}
        pages: dict[int, list[Record]] = {}
        for row in rows:
            ends[row["id"]] = row["next_offset"]
            if row["base_offset"] is not None:
                pages.setdefault(row["id"], []).append(row)
        self._learn_rows([row for page in pages.values() for row in page])
        for partition, window in zip(unknown, windows, strict=True):
            end, page = ends.get(partition.id, 0), pages.get(partition.id, ())
            if end == 0:
                partition.started_empty_at, partition.known_since = time.time(), 0.0
            else:
                partition.known_since = time.time() - window
                if len(page) == _FIRST_PAGE:
                    await self._load(fetcher, partition, min(row["base_offset"] for row in page), window)
            partition.known_to = end

    async def catch_up(self, fetcher: Fetcher, partitions: Sequence[Partition], ends: dict[int, int]) -> None:
        """Learn what others appended to partitions since."""
        behind = [p for p in partitions if p.known_to is not None and p.known_to != ends.get(p.id, p.known_to)]
        if not behind:
            return
        rows = await fetcher.fetch("segment_ids_from", [p.id for p in behind], [p.known_to for p in behind])
        self._learn_rows(rows)
        for partition in behind:
            partition.known_to = ends[partition.id]

    def covers_window(self, partition: Partition, window: float) -> bool:
        """Whether the filter still holds the whole window of a partition."""
        if self.covers_windows(window):
            return True
        since = self.filter.complete_since + _CLOCK_SKEW
        return partition.started_empty_at is not None and partition.started_empty_at > since

    def covers_windows(self, window: float) -> bool:
        """Whether the filter still holds the whole window of every partition this worker knows."""
        self._longest_window = max(self._longest_window, window)
        return self.filter.complete_since + _CLOCK_SKEW <= time.time() - window

    async def find(
        self, fetcher: Fetcher, partition: Partition, wanted: dict[int, str], window: float
    ) -> dict[str, Earlier]:
        """The stored messages of a partition, inside the window, that have one of the ids (by hash)."""
        found: dict[str, Earlier] = {}
        async for row, hits in self._holders(fetcher, partition, list(wanted), window):
            await self._confirm(fetcher, partition, row, {index: wanted[value] for index, value in hits}, found)
        return found

    async def holds_any(self, fetcher: Fetcher, partition: Partition, hashes: Hashes, window: float) -> bool:
        """Whether a partition, known to its end, holds a message inside the window whose id has one of the hashes."""
        values: list[int] = hashes.tolist()
        if not self.covers_window(partition, window):
            suspects = values
        else:
            suspects = [values[place] for place in self.filter.may_contain(values)]
        if suspects:
            async for _ in self._holders(fetcher, partition, suspects, window):
                return True
        return False

    async def _holders(
        self, fetcher: Fetcher, partition: Partition, wanted: Sequence[int], window: float
    ) -> AsyncIterator[tuple[Record, list[tuple[int, int]]]]:
        """Segments of a partition, inside the window, that hold one of the hashes; with (index, hash) of each."""
        self.lookups += 1
        targets = np.fromiter(wanted, dtype=np.uint64, count=len(wanted))
        oldest, newest = self._stretch(partition, wanted, window)
        before = await self._offset_after(fetcher, partition, newest)
        while True:
            page = await fetcher.fetch("segment_ids_before", partition.id, before, _PAGE, float(window))
            inside = [row for row in page if row["recent"] and row["created_at"].timestamp() >= oldest]
            for row, hits in _hits(inside, targets):
                yield row, hits
            if len(inside) < _PAGE:
                return
            before = page[-1]["base_offset"]

    async def find_in(
        self, fetcher: Fetcher, partition: Partition, blocks: set[bytes], ids: set[str], window: float
    ) -> dict[str, Earlier]:
        """The messages with one of the ids in segments that are known by their first message id, if they are stored."""
        found: dict[str, Earlier] = {}
        before = 1 << 62
        while True:
            page = await fetcher.fetch("segment_ids_before", partition.id, before, _PAGE, window)
            for row in page:
                if row["ids"][:16] in blocks:
                    (stored,) = await fetcher.fetch("segment_at", partition.id, row["base_offset"])
                    segment = read_segment(self._envelope, stored)
                    for index, id in enumerate(segment.transaction_ids()):
                        if id in ids:
                            found.setdefault(id, Earlier(segment.block.text(index), row["ids"][:16]))
            if len(page) < _PAGE or not page[-1]["recent"]:
                return found
            before = page[-1]["base_offset"]

    def _stretch(self, partition: Partition, wanted: Iterable[int], window: float) -> tuple[float, float]:
        """From when to when the filter got any of the hashes; all of time when it does not hold the window."""
        if not self.covers_window(partition, window):
            return 0.0, float("inf")
        times = [stretch for value in wanted for stretch in self.filter.when(value)]
        return min((oldest for oldest, _ in times), default=0.0) - _CLOCK_SKEW, max(
            (newest for _, newest in times), default=0.0
        ) + _CLOCK_SKEW

    async def _offset_after(self, fetcher: Fetcher, partition: Partition, until: float) -> int:
        """The offset from which to search backwards for messages stored up to a time."""
        if partition.known_to is None or until > time.time():
            return 1 << 62
        at = TimeSearch(partition.id, 0, partition.known_to, datetime.fromtimestamp(until, UTC))
        return (await offsets_after(fetcher, [at]))[0]

    async def _confirm(
        self, fetcher: Fetcher, partition: Partition, row: Record, wanted: dict[int, str], found: dict[str, Earlier]
    ) -> None:
        """Equal hashes are not yet equal ids: compare the texts at these indexes."""
        base, packed = row["base_offset"], row["ids"][:16]
        rows = await fetcher.fetch("segment_at", partition.id, base)
        if not rows or rows[0]["base_offset"] != base:
            # Retention removed it meanwhile.
            return
        try:
            segment = read_segment(self._envelope, rows[0])
        except (EnvelopeError, MalformedSegment):
            # Its key is missing, for example. Then equal hashes count as equal ids: 64 bits rarely collide.
            block = IdBlock.parse(packed)
            for index, id in wanted.items():
                found.setdefault(id, Earlier(block.text(index), packed))
            return
        ids = segment.transaction_ids()
        for index, id in wanted.items():
            if ids[index] == id and not segment.is_deleted(index):
                found.setdefault(id, Earlier(segment.block.text(index), packed))

    async def _load(self, fetcher: Fetcher, partition: Partition, before: int, window: float) -> None:
        """Learn the ids inside the window that a partition has below an offset."""
        while True:
            page = await fetcher.fetch("segment_ids_before", partition.id, before, _LOAD_PAGE, float(window))
            recent = [row for row in page if row["recent"]]
            self._learn_rows(recent)
            if len(recent) < _LOAD_PAGE:
                return
            before = page[-1]["base_offset"]

    def _learn_rows(self, rows: Sequence[Record]) -> None:
        """Put the ids of segments into the filter, all at once: for each alone it would take as many times longer."""
        if rows:
            hashes = np.frombuffer(b"".join([row["ids"][16:] for row in rows]), dtype="<u8")
            times = [row["created_at"] for row in rows]
            self.filter.add(hashes, min(times).timestamp(), max(times).timestamp())


def _hits(rows: Sequence[Record], targets: Hashes) -> Iterator[tuple[Record, list[tuple[int, int]]]]:
    """The rows that hold any of the targets, each with the (index, hash) pairs found in it."""
    if not rows:
        return
    columns = [_hashes(row["ids"]) for row in rows]
    ends = np.cumsum([len(column) for column in columns])
    # All rows at once: looking for the targets in each alone would sort them as often.
    positions = np.flatnonzero(np.isin(np.concatenate(columns), targets))
    owners = np.searchsorted(ends, positions, side="right")
    for owner in np.unique(owners):
        column, start = columns[owner], int(ends[owner]) - len(columns[owner])
        indexes = [int(position) - start for position in positions[owners == owner]]
        yield rows[owner], [(index, int(column[index])) for index in indexes]


def _hashes(ids: bytes) -> Hashes:
    return np.frombuffer(ids, dtype="<u8", offset=16)

"""Segments this worker has in memory: what it just stored and what it just read."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from queen.storage.database import Record
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock
from queen.wire.segment import Segment


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
        # Counts how often something was forgotten, for those who read and then put.
        self.version = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def put(self, partition_id: int, segments: Sequence[Segment]) -> None:
        """Add segments, in order. A gap before them starts the partition's run anew."""
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

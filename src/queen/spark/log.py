"""What every way to the messages offers: where logs begin and end, and the segments of a span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """A partition and the offsets that its log holds: [first, next)."""

    queue: str
    partition: str
    shard: int
    id: int
    first: int
    next: int


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets [start, end) of one partition."""

    queue: str
    partition: str
    shard: int
    id: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


class StoredSegment(NamedTuple):
    """A segment as it is stored, and which of the wanted spans it is for."""

    slot: int
    base_offset: int
    messages: int
    created_micros: int
    first_id: bytes
    body: bytes


class Log(Protocol):
    """A way to the messages."""

    def positions(self, queues: Sequence[str]) -> list[Position]:
        """Every partition of the queues, by queue and name. Raises `NotFound` for a queue that is not there."""

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        """For each partition the first offset whose message was stored at the moment or later; else where it ends."""

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        """The segments that overlap the spans; those of one span in order. `slot` is the number of the span."""

"""Ids of topic items: 64 bits that sort by time and never clash.

41 bits of milliseconds since 2024, 10 bits of node, 12 bits of sequence. A node number belongs to whoever reserved it,
for a stretch of time. Stretches of one node never overlap: clocks that disagree or step back cannot make an id twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

EPOCH_MS: Final = 1_704_067_200_000
NODES: Final = 1024
_SEQUENCES: Final = 4096
LARGEST_ID: Final = (1 << 63) - 1


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class SnowflakeSource:
    """Makes the ids of one worker out of stretches of time that it was given."""

    __slots__ = ("_last", "_node", "_now", "_upto")

    def __init__(self, now_ms: Callable[[], int] = _wall_ms) -> None:
        self._now = now_ms
        self._node = 0
        # The last millisecond and sequence as one number; counting it up is what runs over into the next millisecond.
        self._last = -1
        self._upto = 0

    def now_ms(self) -> int:
        """The millisecond that the next ids belong to, were there a stretch for it."""
        return max(self._now(), EPOCH_MS)

    def grant(self, node: int, from_ms: int, upto_ms: int) -> None:
        """Ids may be made of `node` for the milliseconds from `from_ms` to before `upto_ms`."""
        self._node = node
        self._last = (from_ms - EPOCH_MS) * _SEQUENCES - 1
        self._upto = (upto_ms - EPOCH_MS) * _SEQUENCES

    def take(self, count: int, *, keep_ms: int = 0) -> list[int] | None:
        """So many new ids, each larger than the one before; None when the stretch, but for its end, has no room."""
        first = max(self._last + 1, (self.now_ms() - EPOCH_MS) * _SEQUENCES)
        return self._give(first, first + count) if first + count <= self._upto - keep_ms * _SEQUENCES else None

    def take_kept(self, count: int, *, keep_ms: int) -> list[int] | None:
        """So many of the ids that were kept at the end of the stretch, whatever the time is."""
        first = max(self._last + 1, self._upto - keep_ms * _SEQUENCES)
        return self._give(first, first + count) if first + count <= self._upto else None

    def _give(self, first: int, end: int) -> list[int]:
        self._last = end - 1
        node = self._node
        return [(tick // _SEQUENCES) << 22 | node << 12 | tick % _SEQUENCES for tick in range(first, end)]


def time_of_id(id: int) -> int:
    """The millisecond since 1970 in which an id was made."""
    return (id >> 22) + EPOCH_MS

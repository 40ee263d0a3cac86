"""Counts of the last minute in memory."""

from __future__ import annotations

import time
from typing import Final

from queen.hot.interfaces import Counted

MINUTE: Final = 60
_SWEEP_AT_LEAST: Final = 1000


class MemoryCounters:
    """By name, what was counted in each second of the last minute."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._sweep_at = _SWEEP_AT_LEAST

    async def add(self, name: str, count: int, limit: int) -> Counted:
        second = int(time.monotonic())
        counts = self._counts.setdefault(name, {})
        for old in [at for at in counts if at <= second - MINUTE]:
            del counts[old]
        used = sum(counts.values())
        if used + count > limit:
            return Counted(False, max(0, limit - used), _wait(counts, second, used + count - limit))
        counts[second] = counts.get(second, 0) + count
        self._sweep(second)
        return Counted(True, limit - used - count, 0)

    def _sweep(self, second: int) -> None:
        """Let names go that were not used for a minute, whenever their number has doubled."""
        if len(self._counts) > self._sweep_at:
            self._counts = {name: c for name, c in self._counts.items() if c and max(c) > second - MINUTE}
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._counts))


def _wait(counts: dict[int, int], second: int, too_many: int) -> int:
    """Seconds until so many are older than a minute."""
    for at in sorted(counts):
        too_many -= counts[at]
        if too_many <= 0:
            return max(1, at + MINUTE - second)
    return MINUTE

"""A histogram with fixed buckets: cheap enough to be fed once per request."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import msgspec

LATENCY_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_SIZES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """How many values fell into each bucket (the last one has no upper bound), and what they sum up to."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Take in what another one with the same buckets has counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """Each upper bound, and how many values were at most that; the last bound is infinite."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return buckets

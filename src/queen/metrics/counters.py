"""Counters: tallies, gauges, durations and histograms."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Self

import msgspec


class Durations(msgspec.Struct, array_like=True, gc=False):
    """A count, and the sum of seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, other: Durations) -> None:
        """Add another one's counts."""
        self.count += other.count
        self.seconds += other.seconds


class Gauge(msgspec.Struct, array_like=True, gc=False):
    """Samples: count, sum, minimum, maximum and last."""

    samples: int = 0
    total: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    last: float = 0.0

    def sample(self, value: float) -> None:
        self.lowest = min(self.lowest, value) if self.samples else value
        self.highest = max(self.highest, value) if self.samples else value
        self.samples += 1
        self.total += value
        self.last = value

    @property
    def mean(self) -> float:
        return self.total / self.samples if self.samples else 0.0

    def row(self) -> list[float]:
        """Mean, minimum, maximum and last, as stored in history."""
        return [self.mean, self.lowest, self.highest, self.last]


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
        """Add another one with the same buckets."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket up to which that share of the values is; None without values, or beyond all."""
        seen, wanted = 0, sum(self.counts) * share
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return None

    def cumulative(self) -> list[tuple[str, float]]:
        """Each upper bound, and how many values were at most that; the last bound is infinite."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return buckets


class Tally(msgspec.Struct, array_like=True, gc=False):
    """Numbers that only grow, but for `lag_max_ms`, which is the largest since the last flush."""

    push_requests: int = 0
    push_messages: int = 0
    """Messages stored, whether by a push, a transaction or a redrive."""
    pop_requests: int = 0
    pop_messages: int = 0
    pop_empty: int = 0
    auto_acked: int = 0
    """Popped messages that were acknowledged on delivery (autoAck)."""
    ack_requests: int = 0
    ack_success: int = 0
    """Acknowledgments that completed a message."""
    ack_failed: int = 0
    """Acknowledgments that reported a failure, or were refused."""
    transactions: int = 0
    dead_letters: int = 0
    partitions_created: int = 0
    partitions_deleted: int = 0
    lag_ms: float = 0.0
    """Time from push to pop, summed up over the popped messages."""
    lag_max_ms: float = 0.0

    def lagged(self, messages: int, lag_ms: float) -> None:
        """So many messages were popped, each that long after it was pushed."""
        self.lag_ms += messages * lag_ms
        if lag_ms > self.lag_max_ms:
            self.lag_max_ms = lag_ms

    def since(self, base: Self) -> Self:
        """What was counted after `base` was copied from this tally."""
        grown = {name: getattr(self, name) - getattr(base, name) for name in self.__struct_fields__}
        return type(self)(**grown | {"lag_max_ms": self.lag_max_ms})

    def add(self, other: Tally) -> None:
        """Add another tally."""
        for name in other.__struct_fields__:
            if name == "lag_max_ms":
                self.lag_max_ms = max(self.lag_max_ms, other.lag_max_ms)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def copy(self) -> Self:
        return type(self)(*(getattr(self, name) for name in self.__struct_fields__))

    def row(self) -> dict[str, int | float]:
        """The numbers by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class WorkerTally(Tally, array_like=True, gc=False):
    """What is counted for a worker as a whole, on top of what is counted for each queue."""

    db_errors: int = 0
    """Statements that failed because PostgreSQL was unavailable or too busy."""
    batches: int = 0
    """Batches: database round trips that serve several requests."""
    http_responses: int = 0

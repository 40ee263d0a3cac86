"""A number that goes up and down, sampled now and then."""

from __future__ import annotations

import msgspec


class Gauge(msgspec.Struct, array_like=True, gc=False):
    """What the samples were: how many, their sum, lowest, highest and last."""

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
        """Mean, lowest, highest, last: how history keeps it."""
        return [self.mean, self.lowest, self.highest, self.last]

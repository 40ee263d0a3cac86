"""How often something was done and how long it took in all: small enough to be kept for each topic."""

from __future__ import annotations

import msgspec


class Durations(msgspec.Struct, array_like=True, gc=False):
    """A count, and the sum of seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, other: Durations) -> None:
        """Take in what another one has counted."""
        self.count += other.count
        self.seconds += other.seconds

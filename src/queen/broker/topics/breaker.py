"""A circuit breaker: after a few failures in a row nothing is tried for a while, then once."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Final

_FAILURES: Final = 3
_OPEN_SECONDS: Final = 10.0


class BreakerState(IntEnum):
    """What a breaker lets through: everything, one attempt, nothing."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after three failures in a row; ten seconds later one attempt decides whether it closes."""

    def __init__(self, on_change: Callable[[BreakerState], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._failures = 0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED

    def allows(self) -> bool:
        """Whether something may be tried now."""
        if self.state is BreakerState.OPEN and self._clock() - self._opened_at >= _OPEN_SECONDS:
            self._become(BreakerState.HALF_OPEN)
        return self.state is not BreakerState.OPEN

    def invite(self) -> None:
        """There is reason to believe that it works again: the next attempt need not wait."""
        if self.state is BreakerState.OPEN:
            self._become(BreakerState.HALF_OPEN)

    def succeeded(self) -> None:
        self._failures = 0
        self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES or self.state is BreakerState.HALF_OPEN:
            self._opened_at = self._clock()
            self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(state)

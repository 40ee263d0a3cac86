"""One timer for all holds: it rings when the next of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from queen.broker.lanes import Holds, Lane

# Timers may ring a little early.
_SLACK_SECONDS = 0.001


class HoldTimer:
    """Ends holds in time, and tells of each lane that got a ready partition by it."""

    def __init__(self, holds: Holds, on_ready: Callable[[Lane], None]) -> None:
        self._holds = holds
        self._on_ready = on_ready
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Holds were added: one of them may be the next to end."""
        at = self._holds.next_at()
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for lane in self._holds.expire(asyncio.get_running_loop().time() + _SLACK_SECONDS):
            self._on_ready(lane)
        self.arm()

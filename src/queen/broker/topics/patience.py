"""Those who wait for items go on waiting while PostgreSQL is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from queen.errors import DatabaseAway
from queen.storage.database import Presence

_PARKED_SECONDS: Final = 0.5
"""A dequeue that has waited for longer outlives an outage; a younger one is answered 503."""
_LOOK_SECONDS: Final = 0.1


class Patience:
    """Tells who is spared an error, and calls `on_return` when PostgreSQL may be back."""

    def __init__(self, presence: Presence, on_return: Callable[[], None]) -> None:
        self._presence = presence
        self._on_return = on_return
        self._timer: asyncio.TimerHandle | None = None

    def spares(self, wait: bool, since: float, error: Exception) -> bool:
        """Whether a request that began to wait at a time goes on waiting in spite of an error."""
        loop = asyncio.get_running_loop()
        if not wait or not isinstance(error, DatabaseAway) or loop.time() - since < _PARKED_SECONDS:
            return False
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look)
        return True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._presence.away:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
            return
        self._timer = None
        self._on_return()

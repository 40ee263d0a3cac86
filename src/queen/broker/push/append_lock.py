"""The append lock: the workers of one host append one after the other.

Two workers that push to the same partitions would each find that the other has moved them, and would have to learn
what was added under the partitions' locks. The lock costs nothing (PostgreSQL would make them wait anyway) and lets
each receive what the other added before it appends itself. Nothing depends on it but speed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from queen.files import try_lock

log = logging.getLogger(__name__)

_LONGEST_WAIT = 0.25
_POLL = 0.005
"""How long to wait for a notification of the other worker; it is missing only when that worker has died."""


class AppendLock:
    """An `async with` lock over the processes that share a directory. The kernel frees it when its holder dies."""

    def __init__(self, directory: Path, *, wanted: Callable[[], None], released: Callable[[], None]) -> None:
        """`wanted` and `released` notify the other workers, which call `peer_wants` and `peer_released`."""
        self._path = directory / "turn.lock"
        self._notify_wanted = wanted
        self._notify_released = released
        self._file: int | None = None
        self._freed: asyncio.Future[bool] | None = None
        self._peer_waits = False
        self._asked = False

    async def __aenter__(self) -> None:
        if self._file is None and not self._open():
            return
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _LONGEST_WAIT
        # A peer that asked before us is first.
        while self._peer_waits or not self._try():
            self._notify_wanted()
            self._asked = True
            # A release makes the lock ours, also when the peer has asked for it again meanwhile.
            if (await self._is_freed() and self._try()) or loop.time() > give_up:
                return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        fcntl.flock(self._file, fcntl.LOCK_UN)
        # The others let a worker that asked go first, and wait for its release.
        if self._peer_waits or self._asked:
            self._asked = False
            self._notify_released()

    def peer_wants(self) -> None:
        self._peer_waits = True

    def peer_released(self) -> None:
        self._peer_waits = False
        self._wake(True)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> bool:
        """False where there is no descriptor left for it: pushes are then stored without the lock."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            log.error("append lock %s cannot be opened (%s): workers append without it", self._path, error.strerror)
            return False
        return True

    def _try(self) -> bool:
        assert self._file is not None
        return try_lock(self._file)

    async def _is_freed(self) -> bool:
        """Wait for the release by a peer; False when none came, and it counts as dead."""
        loop = asyncio.get_running_loop()
        self._freed = loop.create_future()
        timer = loop.call_later(_POLL, self._wake, False)
        freed = await self._freed
        timer.cancel()
        if not freed:
            self._peer_waits = False
        return freed

    def _wake(self, freed: bool) -> None:
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(freed)

"""Workers of one host take turns at appending.

Two workers that push to the same partitions would each find that the other has moved them, and would have to learn
what was added under the partitions' locks. Taking turns costs nothing (PostgreSQL would make them wait anyway) and lets
each hear from the other what it added before it appends itself. It is a courtesy: nothing depends on it but speed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_LONGEST_WAIT = 0.25
_POLL = 0.005
"""How long a word from the other worker is waited for; it does not come only when that worker has died."""


class AppendLock:
    """An `async with` lock over the processes that share a directory. The kernel frees it when its holder dies."""

    def __init__(self, directory: Path, *, wanted: Callable[[], None], passed_on: Callable[[], None]) -> None:
        """`wanted` and `passed_on` tell the other workers; what they tell comes in by `peer_wants` and `peer_done`."""
        self._path = directory / "turn.lock"
        self._tell_wanted = wanted
        self._tell_passed_on = passed_on
        self._file: int | None = None
        self._freed: asyncio.Future[bool] | None = None
        self._peer_waits = False
        self._asked = False

    async def __aenter__(self) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _LONGEST_WAIT
        # A peer that asked before us has its turn first.
        while self._peer_waits or not self._try():
            self._tell_wanted()
            self._asked = True
            # Word that a turn is over makes this one ours, also when the peer has asked for the next meanwhile.
            if (await self._is_freed() and self._try()) or loop.time() > give_up:
                return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_UN)
        # Who asked for this turn was let go first by the others, and they wait for word that it is over.
        if self._peer_waits or self._asked:
            self._asked = False
            self._tell_passed_on()

    def peer_wants(self) -> None:
        self._peer_waits = True

    def peer_released(self) -> None:
        self._peer_waits = False
        self._wake(True)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _try(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    async def _is_freed(self) -> bool:
        """Wait for word from a peer; False when none came, and it counts as gone."""
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

"""SIGINT and SIGTERM end a client gently: the first asks, the second does what it always did."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopSignals:
    """Watches while somebody consumes or buffers, where the program has no handlers of its own."""

    def __init__(self, stop: Callable[[], bool], last: Callable[[], Awaitable[None]]) -> None:
        """`stop` ends consumers, and says whether there were any. If not, `last` comes before the usual end."""
        self._stop = stop
        self._last = last
        self._before: dict[signal.Signals, _Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin, unless it has begun; only the main thread can."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        for number in _WATCHED:
            handler = signal.getsignal(number)
            if not _is_default(handler):
                continue
            try:
                self._loop.add_signal_handler(number, self._received, number)
            except NotImplementedError:
                # Event loops on Windows cannot.
                return
            self._before[number] = handler

    def leave(self) -> None:
        """Put back what was there."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            assert self._loop is not None
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _received(self, number: signal.Signals) -> None:
        # The next one takes its usual course: whoever sends it twice means it.
        self.leave()
        if not self._stop():
            self._ending = asyncio.ensure_future(self._end(number))

    async def _end(self, number: signal.Signals) -> None:
        await self._last()
        signal.raise_signal(number)


def _is_default(handler: _Handler) -> bool:
    """Whether nobody has asked for the signal; `asyncio.run` takes SIGINT for itself, by a partial of its own."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return getattr(getattr(handler, "func", None), "__module__", "") == "asyncio.runners"

"""Helpers for asyncio: background tasks, timers, eager futures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar


class BackgroundTask:
    """One task that runs until it is stopped."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)

    async def stop(self) -> None:
        """Cancel the task, and wait until it has ended; does nothing where none was started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None


class BackgroundTasks:
    """Tasks that are not awaited: the event loop keeps no reference to them, so they are kept here."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait for the tasks that are running, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class DeadlineTimer:
    """Calls back once, at the earliest of the times it was set to (loop time)."""

    __slots__ = ("_at", "_callback", "_handle")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self._handle: asyncio.Handle | None = None
        # The handle cannot be asked: for a time that has passed uvloop gives one without it.
        self._at = 0.0

    def set(self, at: float) -> None:
        """Call back at `at`, unless a call is due before."""
        if self._handle is not None:
            if self._at <= at:
                return
            self._handle.cancel()
        self._at = at
        self._handle = asyncio.get_running_loop().call_at(at, self._ring)

    def cancel(self) -> None:
        """Cancel the call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._callback()


T = TypeVar("T")

log = logging.getLogger(__name__)


class EagerFuture(asyncio.Future[T]):
    """A future that calls its `listener` inside `set_result`, before the event loop goes on.

    A listener may only pass the result on: the code that sets it is in the middle of something else.
    """

    listener: Callable[[EagerFuture[T]], None] | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        self._notify()

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        super().set_exception(exception)
        self._notify()

    def cancel(self, msg: object | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._notify()
        return cancelled

    def _notify(self) -> None:
        listener, self.listener = self.listener, None
        if listener is None:
            return
        try:
            listener(self)
        except Exception:
            # The code that sets the result has others to set.
            log.exception("listener of a future failed")


R = TypeVar("R")

_AT_ONCE: Final = 500


async def chunked_map(make: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """Map `make` over rows in chunks, with a turn of the event loop between chunks."""
    made: list[R] = []
    for start in range(0, len(rows), _AT_ONCE):
        if start:
            await asyncio.sleep(0)
        made += map(make, rows[start : start + _AT_ONCE])
    return made

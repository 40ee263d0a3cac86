"""Work beside the requests: what goes on until it is stopped, and errands that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Generic, TypeVar


class BackgroundTask:
    """Something that goes on until it is stopped."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)

    async def stop(self) -> None:
        """End it, and wait until it has ended; nothing happens where nothing was started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None


class BackgroundTasks:
    """Tasks that nobody awaits: they are remembered here, as the event loop itself would let go of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait for those that are under way, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class DeadlineTimer:
    """Calls back once, at the earliest of the moments it was set to (loop time)."""

    __slots__ = ("_at", "_callback", "_handle")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self._handle: asyncio.Handle | None = None
        # The handle cannot be asked: for a moment that has passed uvloop gives one that does not know it.
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
        """Call back no more, until it is set again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._callback()


T = TypeVar("T")

log = logging.getLogger(__name__)


class EagerFuture(asyncio.Future[T]):
    """Like any future, but `listener` hears of its end in the midst of whoever ends it, before the loop goes on.

    A listener must do nothing but pass the answer on: to make it find the world in order is not the giver's duty.
    """

    listener: Callable[[EagerFuture[T]], None] | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        self._tell()

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        super().set_exception(exception)
        self._tell()

    def cancel(self, msg: object | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._tell()
        return cancelled

    def _tell(self) -> None:
        listener, self.listener = self.listener, None
        if listener is None:
            return
        try:
            listener(self)
        except Exception:
            # The giver has others to answer.
            log.exception("an answer could not be passed on")


R = TypeVar("R")

_AT_ONCE: Final = 500


async def chunked_map(make: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """`make` of every row; others have their turn in between."""
    made: list[R] = []
    for start in range(0, len(rows), _AT_ONCE):
        if start:
            await asyncio.sleep(0)
        made += map(make, rows[start : start + _AT_ONCE])
    return made


_QUICK_SECONDS: Final = 0.005
_TIMES_AS_LONG: Final = 100
_LEAST_TIMES: Final = 10


def cache_seconds(took: float, most_seconds: float) -> float:
    """How many seconds what was found in `took` seconds is given again; 0: it is found anew each time.

    A hundred times as long, at most `most_seconds` (0: never), unless even that is too often: finding takes no more
    than a tenth of the time however many ask. What is found quickly is found anew each time.
    """
    if not most_seconds or took <= _QUICK_SECONDS:
        return 0.0
    return max(min(most_seconds, _TIMES_AS_LONG * took), _LEAST_TIMES * took)


class SingleFlightCache(Generic[T]):
    """Finds one thing for all who ask while it is being found, and gives it again for a while."""

    def __init__(
        self,
        find: Callable[[], Coroutine[Any, Any, T]],
        most_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._most_seconds = most_seconds
        self._clock = clock
        self._finding: asyncio.Task[T] | None = None
        self._good_until = 0.0

    async def get(self) -> T:
        if self._finding is None or (self._finding.done() and self._clock() >= self._good_until):
            self._finding = asyncio.create_task(self._find_anew())
        # Whoever goes away must not take it from the others.
        return await asyncio.shield(self._finding)

    async def _find_anew(self) -> T:
        self._good_until = 0.0
        began = self._clock()
        found = await self._find()
        now = self._clock()
        self._good_until = now + cache_seconds(now - began, self._most_seconds)
        return found

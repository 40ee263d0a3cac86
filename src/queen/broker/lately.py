"""What takes long to find, found once for all who ask within a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_QUICK_SECONDS: Final = 0.005
_TIMES_AS_LONG: Final = 100
_LEAST_TIMES: Final = 10


def good_for(took: float, most_seconds: float) -> float:
    """How many seconds what was found in `took` seconds is given again; 0: it is found anew each time.

    A hundred times as long, at most `most_seconds` (0: never), unless even that is too often: finding takes no more
    than a tenth of the time however many ask. What is found quickly is found anew each time.
    """
    if not most_seconds or took <= _QUICK_SECONDS:
        return 0.0
    return max(min(most_seconds, _TIMES_AS_LONG * took), _LEAST_TIMES * took)


class Lately(Generic[T]):
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
        self._good_until = now + good_for(now - began, self._most_seconds)
        return found

"""Answers that many ask for at once: found once, given to all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from queen.http.message import Request, Response

Find: TypeAlias = Callable[[Request], Awaitable[Response]]
_Key: TypeAlias = tuple[str, frozenset[tuple[str, str]]]

_MOST_KEPT: Final = 100
_QUICK_SECONDS: Final = 0.02


@dataclass(slots=True, eq=False)
class _Shared:
    finding: asyncio.Task[Response]
    good_until: float = 0.0


class SharedAnswers:
    """Finds each answer for all who ask while it is being found, and gives it again for a while.

    That while grows with what finding it took, so that finding takes no more than a tenth of the time however many
    ask: at most `seconds`, unless even that is too often. What is found quickly is found anew each time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: dict[_Key, _Shared] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def of(self, find: Find) -> Find:
        """A handler that gives what `find` gives for the same path and query."""

        async def answer(request: Request) -> Response:
            key = (request.path, frozenset(request.query.items()))
            shared = self._answers.get(key)
            if shared is None or (shared.finding.done() and time.monotonic() >= shared.good_until):
                shared = self._answers[key] = _Shared(asyncio.create_task(self._find(find, request, key)))
            # Whoever goes away must not take the answer from the others.
            return await asyncio.shield(shared.finding)

        return answer

    async def _find(self, find: Find, request: Request, key: _Key) -> Response:
        began = time.monotonic()
        try:
            response = await find(request)
        except BaseException:
            self._answers.pop(key, None)
            raise
        took = time.monotonic() - began
        if self._seconds and took > _QUICK_SECONDS:
            self._answers[key].good_until = began + took + max(min(self._seconds, 20 * took), 10 * took)
        self._tidy()
        return response

    def _tidy(self) -> None:
        if len(self._answers) <= _MOST_KEPT:
            return
        now = time.monotonic()
        self._answers = {
            key: shared for key, shared in self._answers.items() if not shared.finding.done() or shared.good_until > now
        }

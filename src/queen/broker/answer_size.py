"""Size limits of answers with payloads, and how many large ones may be built at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from queen.errors import BadRequest

_SMALL: Final = 1 << 20
# The rest of the connections to PostgreSQL, and of the memory, stays free for other requests.
_LARGE_AT_A_TIME: Final = 2

T = TypeVar("T")


class TooLarge(BadRequest):
    """An answer would exceed its size limit."""


class AnswerSize:
    """Counts the bytes of an answer while it is built, up to `most`; its first entry always fits."""

    def __init__(self, most: int, *, is_first_try: bool = False) -> None:
        """`is_first_try`: what does not fit may yet, so that nothing is left out."""
        self.most = most
        self._is_first_try = is_first_try
        self._nbytes = 0

    @property
    def exceeded(self) -> TooLarge:
        """The error for a request whose answer cannot be cut."""
        return TooLarge(f"the answer would have more than {self.most} bytes: ask for fewer entries at a time")

    def add(self, nbytes: int | None) -> None:
        """Count an entry, or (None) one whose payload was left out. Raises `TooLarge` where it is one too many."""
        if not self.fits(nbytes):
            raise self.exceeded

    def fits(self, nbytes: int | None) -> bool:
        """Count an entry, if there is room for it."""
        if nbytes is None or (self._nbytes and self._nbytes + nbytes > self.most):
            if self._is_first_try:
                raise self.exceeded
            return False
        # Entries without a payload take room, too.
        self._nbytes += max(1, nbytes)
        return True


NewSize = Callable[[], AnswerSize]


class Answers:
    """Builds answers with payloads: small ones at once, and only a few large ones at a time."""

    def __init__(self, most_bytes: int, turns: asyncio.Semaphore | None = None) -> None:
        """`turns` may be shared by several of them."""
        self.most_bytes = most_bytes
        self.turns = turns if turns is not None else asyncio.Semaphore(_LARGE_AT_A_TIME)

    async def make(self, make: Callable[[NewSize], Awaitable[T]]) -> T:
        """The answer. `make` changes nothing where it raises `TooLarge`, for it is called once more then."""
        small = min(_SMALL, self.most_bytes)
        try:
            return await make(lambda: AnswerSize(small, is_first_try=small < self.most_bytes))
        except TooLarge:
            if small == self.most_bytes:
                raise
        async with self.turns:
            return await make(lambda: AnswerSize(self.most_bytes))

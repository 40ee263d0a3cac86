"""A lane of requests about topics: gathered into few statements, and one bad request never fails its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import asyncpg

from queen.broker.fusion import Fusion
from queen.errors import QueenError


class Asked(Protocol):
    """A request that waits for its answer."""

    @property
    def answer(self) -> asyncio.Future[Any]: ...


T = TypeVar("T", bound=Asked)


class Lane(Generic[T]):
    """Runs requests together; when PostgreSQL refuses a batch, each of it runs alone.

    `spare` is asked, when PostgreSQL is away, whether a request goes on waiting rather than being failed.
    """

    def __init__(
        self,
        run: Callable[[list[T]], Awaitable[None]],
        *,
        weigh: Callable[[T], int],
        limit: int,
        most: int = 100_000,
        spare: Callable[[T, Exception], bool] = lambda request, error: False,
    ) -> None:
        self._run_together = run
        self._spare = spare
        self.fusion: Fusion[T] = Fusion(self._run, _fail, weigh=weigh, limit=limit, most=most)

    def submit(self, request: T) -> None:
        self.fusion.submit(request)

    async def _run(self, batch: list[T]) -> None:
        try:
            await self._run_together(batch)
        except QueenError as error:
            # PostgreSQL is away or too busy: that is nobody's fault, and holds for all of them.
            for request in batch:
                if request.answer.done() or not self._spare(request, error):
                    _fail(request, error)
        except asyncpg.PostgresError as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for request in batch:
                await self._run([request])


def _fail(request: Asked, error: Exception) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)

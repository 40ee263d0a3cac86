"""A lane of requests about topics: gathered into few statements, and one bad request never fails its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import asyncpg

from queen.broker.topics.courtesy import Courtesy
from queen.broker.topics.fair import FairFusion
from queen.errors import QueenError

_SHARE: Final = 1000
"""Items of one tenant in a batch: so many that few more would go together cheaper, and nobody waits long for them."""


class Asked(Protocol):
    """A request that waits for its answer."""

    @property
    def answer(self) -> asyncio.Future[Any]: ...


T = TypeVar("T", bound=Asked)


class Lane(Generic[T]):
    """Runs requests together; when PostgreSQL refuses a batch, each of it runs alone.

    `tenant` says whose a request is: tenants take turns, none has to wait for the work of another, and `courtesy` says
    how far they hold back. `spare` is asked, when PostgreSQL is away, whether a request goes on waiting rather than
    being failed.
    """

    def __init__(
        self,
        run: Callable[[list[T]], Awaitable[None]],
        *,
        weigh: Callable[[T], int],
        limit: int,
        most: int = 100_000,
        tenant: Callable[[T], str] = lambda request: "",
        spare: Callable[[T, Exception], bool] = lambda request, error: False,
        courtesy: Courtesy | None = None,
    ) -> None:
        self._run_together = run
        self._spare = spare
        self.fusion: FairFusion[T] = FairFusion(
            self._run,
            _fail,
            tenant=tenant,
            weigh=weigh,
            limit=limit,
            share=min(limit, _SHARE),
            most=most,
            courtesy=courtesy,
        )

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

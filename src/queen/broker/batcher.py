"""Group commit: requests that arrive while a statement runs go together in the next one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar

from queen.errors import Overloaded
from queen.metrics.counters import BATCH_SIZES, Histogram

log = logging.getLogger(__name__)

T = TypeVar("T")


class Batcher(Generic[T]):
    """Runs `run(batch)` for everything submitted, one batch at a time.

    There is no timer: an idle lane starts at once, a busy one gathers. `weigh` says how much of a batch an item takes,
    `limit` how much a batch may hold, `most` how much may wait for its batch. With a `turn`, each batch is taken and
    run inside it, and what `run` returns is called when it is over. `run` answers its items itself; should it raise,
    `fail(item, error)` is called for each. `sizes` is told how many items batches have. While a turn is waited for,
    `meanwhile` is given what will most likely be the batch.
    """

    def __init__(
        self,
        run: Callable[[list[T]], Awaitable[Callable[[], None] | None]],
        fail: Callable[[T, Exception], None],
        *,
        weigh: Callable[[T], int] = lambda item: 1,
        limit: int = 1000,
        most: int = 100_000,
        turn: AbstractAsyncContextManager[None] | None = None,
        meanwhile: Callable[[Sequence[T]], None] | None = None,
        sizes: Histogram | None = None,
    ) -> None:
        self._run = run
        self._fail = fail
        self._weigh = weigh
        self._limit = limit
        self._most = most
        self._turn = turn if turn is not None else nullcontext()
        self._has_turn = False
        self._meanwhile = meanwhile
        self._waiting: deque[T] = deque()
        self._weight = 0
        self._task: asyncio.Task[None] | None = None
        self._sizes = sizes if sizes is not None else Histogram.of(BATCH_SIZES)
        self.batches = 0
        self.items = 0

    def submit(self, item: T) -> None:
        """Have the item run with the next batch. Raises `Overloaded` when too much waits already."""
        weight = self._weigh(item)
        if self._waiting and self._weight + weight > self._most:
            raise overloaded()
        self._weight += weight
        self._waiting.append(item)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def __len__(self) -> int:
        return len(self._waiting)

    async def join(self) -> None:
        """Wait until everything submitted so far is answered."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                self._has_turn = False
                if self._meanwhile is not None:
                    # When the requests that are on the wire just now have come in, too.
                    asyncio.get_running_loop().call_soon(self._use_the_wait, self._meanwhile)
                async with self._turn:
                    self._has_turn = True
                    batch = self._take()
                    afterwards = await self._run_safely(batch)
                if afterwards is not None:
                    self._finish(batch, afterwards)
        finally:
            self._task = None

    def _use_the_wait(self, meanwhile: Callable[[Sequence[T]], None]) -> None:
        if not self._has_turn and self._weight <= self._limit:
            meanwhile(tuple(self._waiting))

    async def _run_safely(self, batch: list[T]) -> Callable[[], None] | None:
        self.batches += 1
        self.items += len(batch)
        self._sizes.observe(len(batch))
        try:
            return await self._run(batch)
        except Exception as error:
            fail_batch(batch, self._fail, error)
            return None

    def _finish(self, batch: list[T], afterwards: Callable[[], None]) -> None:
        try:
            afterwards()
        except Exception as error:
            fail_batch(batch, self._fail, error)

    def _take(self) -> list[T]:
        waiting, taken = self._waiting, 0
        batch: list[T] = []
        while waiting and taken < self._limit:
            taken += self._weigh(waiting[0])
            batch.append(waiting.popleft())
        self._weight -= taken
        return batch


def overloaded() -> Overloaded:
    """What is raised when too much waits already."""
    return Overloaded("the server has more work waiting than it can do at once; nothing was done, try again soon")


def fail_batch(batch: Sequence[T], fail: Callable[[T, Exception], None], error: Exception) -> None:
    """A lane must outlive any one batch; whoever waits for it is told. To be called while the error is handled."""
    log.exception("a fused batch of %d failed", len(batch))
    for item in batch:
        fail(item, error)

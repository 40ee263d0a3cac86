"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Generic, TypeVar

from queen.errors import Overloaded

log = logging.getLogger(__name__)

T = TypeVar("T")

STREAMS: Final = 2
"""Batches that run at the same time; a tenant is in one of them at most."""


class FairFusion(Generic[T]):
    """Runs `run(batch)` for everything submitted; requests of a tenant go together and in order.

    As in `Fusion` there is no timer. `weigh` says how much of a batch an item takes, `limit` how much a batch may hold,
    `share` how much of it may be one tenant's, `most` how much may wait. Tenants are taken in turn. While a batch runs,
    those who are not in it need not wait for it: another may run beside it. `run` answers its items itself; should it
    raise, `fail(item, error)` is called for each.
    """

    def __init__(
        self,
        run: Callable[[list[T]], Awaitable[None]],
        fail: Callable[[T, Exception], None],
        *,
        tenant: Callable[[T], str],
        weigh: Callable[[T], int],
        limit: int,
        share: int,
        most: int,
    ) -> None:
        self._run = run
        self._fail = fail
        self._tenant = tenant
        self._weigh = weigh
        self._limit = limit
        self._share = share
        self._most = most
        self._waiting: dict[str, deque[T]] = {}
        """By tenant; who has been served goes to the end."""
        self._weight = 0
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = False

    def submit(self, item: T) -> None:
        """Have the item run with the next batch of its tenant. Raises `Overloaded` when too much waits already."""
        weight = self._weigh(item)
        if self._waiting and self._weight + weight > self._most:
            raise Overloaded(
                "the server has more work waiting than it can do at once; nothing was done, try again soon"
            )
        self._weight += weight
        self._waiting.setdefault(self._tenant(item), deque()).append(item)
        if not self._starting and len(self._tasks) < STREAMS:
            # Not at once: what arrives in the same breath goes along.
            self._starting = True
            asyncio.get_running_loop().call_soon(self._start)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def join(self) -> None:
        """Wait until everything submitted so far is answered."""
        while self._waiting or self._tasks:
            await (asyncio.wait(self._tasks) if self._tasks else asyncio.sleep(0))

    def _start(self) -> None:
        self._starting = False
        while len(self._tasks) < STREAMS:
            tenants, batch = self.take()
            if not batch:
                return
            self._busy |= tenants
            task = asyncio.get_running_loop().create_task(self._run_safely(batch))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, tenants))

    def _ended(self, tenants: set[str], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._busy -= tenants
        self._start()

    async def _run_safely(self, batch: list[T]) -> None:
        try:
            await self._run(batch)
        except Exception as error:
            # The lane must outlive any one batch; whoever waits for it is told.
            log.exception("a fused batch of %d failed", len(batch))
            for item in batch:
                self._fail(item, error)

    def take(self) -> tuple[set[str], list[T]]:
        """The next batch, and whose it is: of everybody who waits and is not being served, as much as of the others."""
        tenants = [tenant for tenant in self._waiting if tenant not in self._busy]
        if not tenants:
            return set(), []
        share = min(self._share, max(1, self._limit // len(tenants)))
        taken: set[str] = set()
        batch: list[T] = []
        total = 0
        for tenant in tenants:
            if total >= self._limit:
                break
            waiting, own = self._waiting.pop(tenant), 0
            while waiting and own < share:
                own += self._weigh(waiting[0])
                batch.append(waiting.popleft())
            if waiting:
                self._waiting[tenant] = waiting
            taken.add(tenant)
            total += own
        self._weight -= total
        return taken, batch

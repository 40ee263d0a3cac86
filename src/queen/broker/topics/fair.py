"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Generic, TypeVar

from queen.broker.fusion import fail_batch, overloaded

T = TypeVar("T")

LIGHT: Final = 64
"""A tenant with no more than this waiting is served quickly."""


class FairFusion(Generic[T]):
    """Runs `run(batch)` for everything submitted; requests of a tenant go together and in order.

    As in `Fusion` there is no timer. `weigh` says how much of a batch an item takes, `limit` how much a batch may hold,
    `share` how much of it may be one tenant's, `most` how much may wait. Tenants are taken in turn. Two batches run at
    a time: one of tenants that have little to do, one of those that have much, so that the former never wait for the
    latter. `run` answers its items itself; should it raise, `fail(item, error)` is called for each.
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
        self._waiting: dict[str, _Waiting[T]] = {}
        """By tenant; who has been served goes to the end."""
        self._weight = 0
        self._busy: set[str] = set()
        self._running: dict[bool, asyncio.Task[None]] = {}
        """The batch of those that have little (False), and of those that have much (True)."""
        self._starting = False

    def submit(self, item: T) -> None:
        """Have the item run with the next batch of its tenant. Raises `Overloaded` when too much waits already."""
        weight = self._weigh(item)
        if self._waiting and self._weight + weight > self._most:
            raise overloaded()
        self._weight += weight
        tenant = self._tenant(item)
        waiting = self._waiting.get(tenant)
        if waiting is None:
            waiting = self._waiting[tenant] = _Waiting()
        waiting.items.append(item)
        waiting.weight += weight
        if not self._starting and len(self._running) < 2:
            # Not at once: what arrives in the same breath goes along.
            self._starting = True
            asyncio.get_running_loop().call_soon(self._start)

    def __len__(self) -> int:
        return sum(len(waiting.items) for waiting in self._waiting.values())

    async def join(self) -> None:
        """Wait until everything submitted so far is answered."""
        while self._waiting or self._running:
            await (asyncio.wait(self._running.values()) if self._running else asyncio.sleep(0))

    def _start(self) -> None:
        self._starting = False
        for much in (False, True):
            if much in self._running:
                continue
            tenants, batch = self.take(much)
            if batch:
                self._busy |= tenants
                task = self._running[much] = asyncio.get_running_loop().create_task(self._run_safely(batch))
                task.add_done_callback(partial(self._ended, much, tenants))

    def _ended(self, much: bool, tenants: set[str], task: asyncio.Task[None]) -> None:
        del self._running[much]
        self._busy -= tenants
        self._start()

    async def _run_safely(self, batch: list[T]) -> None:
        try:
            await self._run(batch)
        except Exception as error:
            fail_batch(batch, self._fail, error)

    def take(self, much: bool) -> tuple[set[str], list[T]]:
        """The next batch of tenants that have much to do, or little, and whose it is: as much of each as of others."""
        tenants = [
            tenant
            for tenant, waiting in self._waiting.items()
            if (waiting.weight > LIGHT) is much and tenant not in self._busy
        ]
        taken: set[str] = set()
        batch: list[T] = []
        total = 0
        for tenant in tenants:
            if total >= self._limit:
                break
            waiting, own = self._waiting.pop(tenant), 0
            share = min(self._share, max(1, self._limit // len(tenants)))
            while waiting.items and own < share:
                own += self._weigh(waiting.items[0])
                batch.append(waiting.items.popleft())
            if waiting.items:
                waiting.weight -= own
                self._waiting[tenant] = waiting
            taken.add(tenant)
            total += own
        self._weight -= total
        return taken, batch


class _Waiting(Generic[T]):
    """What waits of one tenant, and how much that is."""

    __slots__ = ("items", "weight")

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.weight = 0

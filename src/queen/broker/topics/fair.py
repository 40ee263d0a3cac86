"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Generic, TypeVar

from queen.broker.fusion import fail_batch, overloaded
from queen.broker.topics.courtesy import Courtesy
from queen.metrics.meter import clock

T = TypeVar("T")

LIGHT: Final = 64
"""A tenant with no more than this waiting is served quickly."""
_POLITE_SHARE: Final = 100
"""What a tenant that is to hold back does in one go: so little that others find a gap soon."""


class FairFusion(Generic[T]):
    """Runs `run(batch)` for everything submitted; requests of a tenant go together and in order.

    As in `Fusion` there is no timer. `weigh` says how much of a batch an item takes, `limit` how much a batch may hold,
    `share` how much of it may be one tenant's, `most` how much may wait. Tenants are taken in turn. Two batches run at
    a time: one of tenants that have little to do, one of those that have much, so that the former never wait for the
    latter; and the latter hold back as far as `courtesy` asks them to. `run` answers its items itself; should it
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
        courtesy: Courtesy | None = None,
    ) -> None:
        self._run = run
        self._fail = fail
        self._tenant = tenant
        self._weigh = weigh
        self._limit = limit
        self._share = share
        self._most = most
        self._courtesy = courtesy
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
            waiting = self._waiting[tenant] = _Waiting(clock())
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
            await (asyncio.wait(self._running.values()) if self._running else asyncio.sleep(0.001))

    def _start(self) -> None:
        self._starting = False
        for much in (False, True):
            if much in self._running:
                continue
            pause = self._pause() if much else 0.0
            if pause and self._courtesy is not None and not self._courtesy.enter(self._start):
                continue
            began = clock()
            tenants, batch, since = self.take(much, min(self._share, _POLITE_SHARE) if pause else self._share)
            self._busy |= tenants
            if batch:
                if much and self._courtesy is not None:
                    self._courtesy.has_much()
                task = self._running[much] = asyncio.get_running_loop().create_task(self._run_safely(batch))
                task.add_done_callback(partial(self._ended, much, tenants, began if much else since, pause))

    def _pause(self) -> float:
        """For how many times as long as their next batch takes tenants with much to do are to pause."""
        if self._courtesy is None:
            return 0.0
        tenants = self._candidates(True)
        return max(map(self._courtesy.pause_of, tenants), default=0.0)

    def _ended(self, much: bool, tenants: set[str], since: float, pause: float, task: asyncio.Task[None]) -> None:
        del self._running[much]
        self._busy -= tenants
        if self._courtesy is not None:
            seconds = clock() - since
            if not much:
                self._courtesy.served(tenants, seconds)
            else:
                self._courtesy.has_much()
                if pause:
                    self._courtesy.leave(seconds * pause)
        self._start()

    async def _run_safely(self, batch: list[T]) -> None:
        try:
            await self._run(batch)
        except Exception as error:
            fail_batch(batch, self._fail, error)

    def _candidates(self, much: bool) -> list[str]:
        """The tenants that have much to do, or little, and of which no batch runs."""
        return [
            tenant
            for tenant, waiting in self._waiting.items()
            if (waiting.weight > LIGHT) is much and tenant not in self._busy
        ]

    def take(self, much: bool, most_of_one: int) -> tuple[set[str], list[T], float]:
        """The next batch of tenants that have much to do, or little: as much of each as of others.

        Returns whose it is, the batch, and since when the first of them has waited.
        """
        tenants = self._candidates(much)
        taken: set[str] = set()
        batch: list[T] = []
        total, since = 0, float("inf")
        for tenant in tenants:
            if total >= self._limit:
                break
            waiting, own = self._waiting.pop(tenant), 0
            since = min(since, waiting.since)
            share = min(most_of_one, max(1, self._limit // len(tenants)))
            while waiting.items and own < share:
                own += self._weigh(waiting.items[0])
                batch.append(waiting.items.popleft())
            if waiting.items:
                waiting.weight -= own
                self._waiting[tenant] = waiting
            taken.add(tenant)
            total += own
        self._weight -= total
        return taken, batch, since


class _Waiting(Generic[T]):
    """What waits of one tenant, how much that is, and since when there is something."""

    __slots__ = ("items", "since", "weight")

    def __init__(self, since: float) -> None:
        self.items: deque[T] = deque()
        self.weight = 0
        self.since = since

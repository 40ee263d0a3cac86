"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import asyncpg

from queen.broker.batcher import fail_batch, overloaded
from queen.broker.topics.throttle import TenantThrottle
from queen.errors import QueenError
from queen.metrics.meter import clock
from queen.storage.database import Database, Link, Record

T = TypeVar("T")

LIGHT: Final = 64
"""A tenant with no more than this waiting is served quickly."""
_POLITE_SHARE: Final = 100
"""What a tenant that is to hold back does in one go: so little that others find a gap soon."""


class FairBatcher(Generic[T]):
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
        courtesy: TenantThrottle | None = None,
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


_SHARE: Final = 1000
"""Items of one tenant in a batch: so many that few more would go together cheaper, and nobody waits long for them."""


class BatchedRequest(Protocol):
    """A request that waits for its answer."""

    @property
    def answer(self) -> asyncio.Future[Any]: ...


AskedT = TypeVar("AskedT", bound=BatchedRequest)


class RequestBatcher(Generic[AskedT]):
    """Runs requests together; when PostgreSQL refuses a batch, each of it runs alone.

    `tenant` says whose a request is: tenants take turns, none has to wait for the work of another, and `courtesy` says
    how far they hold back. `spare` is asked, when PostgreSQL is away, whether a request goes on waiting rather than
    being failed.
    """

    def __init__(
        self,
        run: Callable[[list[AskedT]], Awaitable[None]],
        *,
        weigh: Callable[[AskedT], int],
        limit: int,
        most: int = 100_000,
        tenant: Callable[[AskedT], str] = lambda request: "",
        spare: Callable[[AskedT, Exception], bool] = lambda request, error: False,
        courtesy: TenantThrottle | None = None,
    ) -> None:
        self._run_together = run
        self._spare = spare
        self.batcher: FairBatcher[AskedT] = FairBatcher(
            self._run,
            _fail,
            tenant=tenant,
            weigh=weigh,
            limit=limit,
            share=min(limit, _SHARE),
            most=most,
            courtesy=courtesy,
        )

    def submit(self, request: AskedT) -> None:
        self.batcher.submit(request)

    async def _run(self, batch: list[AskedT]) -> None:
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


def _fail(request: BatchedRequest, error: Exception) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)


class Links:
    """As many links as are in use at the same time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: list[Link] = []

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        """Run a named statement on a link that nobody uses."""
        link = self._idle.pop() if self._idle else self._database.link()
        try:
            return await link.fetch(name, *args)
        finally:
            self._idle.append(link)

"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from queen.broker.batcher import BatchedRequest, Batcher, fail_request
from queen.metrics.meter import clock
from queen.storage.database import Database, Link, Record

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=BatchedRequest)

LIGHT: Final = 64
"""A tenant with no more than this waiting is served quickly."""
_SHARE: Final = 1000
"""Items of one tenant in a batch: larger batches are hardly cheaper per item, and others would wait longer for them."""

LIGHT_SLOT: Final = 0
HEAVY_SLOT: Final = 1


class FairShare(Generic[T]):
    """A backlog in which tenants take turns, and requests of a tenant go together and in order.

    Two batches run at a time: one of tenants that have little waiting, one of those that have much, so that the former
    never wait for the latter. `limit` is how much a batch may hold, `share` how much of it may be one tenant's. A
    tenant is in one batch at a time.
    """

    slots = 2

    def __init__(self, tenant: Callable[[T], str], weigh: Callable[[T], int], *, limit: int, share: int) -> None:
        self._tenant = tenant
        self._weigh = weigh
        self._limit = limit
        self._share = share
        self._tenants: dict[str, _Waiting[T]] = {}
        """By tenant; one that has been served goes to the end."""
        self._busy: set[str] = set()
        self._running: dict[int, set[str]] = {}
        self.since = 0.0
        """Since when the first tenant of the last batch had waited."""

    def add(self, item: T, weight: int) -> int:
        tenant = self._tenant(item)
        waiting = self._tenants.get(tenant)
        if waiting is None:
            waiting = self._tenants[tenant] = _Waiting(clock())
        waiting.items.append(item)
        waiting.weight += weight
        return HEAVY_SLOT if waiting.weight > LIGHT else LIGHT_SLOT

    def waits(self, slot: int) -> bool:
        return bool(self.candidates(slot))

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        return bool(self.candidates(slot))

    def take(self, slot: int) -> tuple[list[T], int]:
        """The same amount of each tenant of the slot."""
        return self.take_shares(slot, self._share)

    def take_shares(self, slot: int, most: int) -> tuple[list[T], int]:
        """The same amount of each tenant of the slot, at most `most` of one."""
        candidates = self.candidates(slot)
        share = min(most, max(1, self._limit // max(1, len(candidates))))
        taken: set[str] = set()
        batch: list[T] = []
        total, since = 0, math.inf
        for tenant in candidates:
            if total >= self._limit:
                break
            waiting, own = self._tenants.pop(tenant), 0
            since = min(since, waiting.since)
            while waiting.items and own < share:
                own += self._weigh(waiting.items[0])
                batch.append(waiting.items.popleft())
            if waiting.items:
                waiting.weight -= own
                self._tenants[tenant] = waiting
            taken.add(tenant)
            total += own
        self._busy |= taken
        self._running[slot] = taken
        self.since = since
        return batch, total

    def done(self, slot: int) -> None:
        self._busy -= self._running.pop(slot)

    def waiting(self) -> Sequence[T]:
        return [item for waiting in self._tenants.values() for item in waiting.items]

    def __len__(self) -> int:
        return sum(len(waiting.items) for waiting in self._tenants.values())

    def candidates(self, slot: int) -> list[str]:
        """The tenants with a large backlog (or a small one, by the slot) of which no batch runs."""
        heavy = slot == HEAVY_SLOT
        return [
            tenant
            for tenant, waiting in self._tenants.items()
            if (waiting.weight > LIGHT) is heavy and tenant not in self._busy
        ]


class _Waiting(Generic[T]):
    """The backlog of one tenant: its requests, their weight, and since when there are any."""

    __slots__ = ("items", "since", "weight")

    def __init__(self, since: float) -> None:
        self.items: deque[T] = deque()
        self.weight = 0
        self.since = since


class FairShareMaker(Protocol):
    """Makes the backlog of a batcher: `FairShare`, or one that throttles heavy tenants."""

    def __call__(
        self, tenant: Callable[[Any], str], weigh: Callable[[Any], int], *, limit: int, share: int
    ) -> FairShare[Any]: ...


class RequestBatcher(Batcher[RequestT]):
    """A batcher of topics: `tenant` gives the tenant of a request.

    When PostgreSQL is unavailable, `spare` says of a request whether it goes on waiting rather than being failed.
    """

    def __init__(
        self,
        run: Callable[[list[RequestT]], Awaitable[None]],
        *,
        weigh: Callable[[RequestT], int],
        limit: int,
        most: int = 100_000,
        tenant: Callable[[RequestT], str] = lambda request: "",
        spare: Callable[[RequestT, Exception], bool] = lambda request, error: False,
        fair_share: FairShareMaker = FairShare,
    ) -> None:
        def fail(request: RequestT, error: Exception) -> None:
            if request.answer.done() or not spare(request, error):
                fail_request(request, error)

        super().__init__(
            run,
            weigh=weigh,
            limit=limit,
            most=most,
            backlog=fair_share(tenant, weigh, limit=limit, share=min(limit, _SHARE)),
            fail=fail,
        )


class Links:
    """A pool of links that grows to the number in use at the same time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: list[Link] = []

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        """Run a named statement on a link that nothing else uses."""
        link = self._idle.pop() if self._idle else self._database.link()
        try:
            return await link.fetch(name, *args)
        finally:
            self._idle.append(link)

"""Group commit that is fair among tenants: a busy one fills its own batches, and others do not wait behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from queen.broker.batcher import BatchedRequest, Batcher, fail_request
from queen.metrics.meter import clock
from queen.storage.database import Database, Link, Record

if TYPE_CHECKING:
    from queen.broker.topics.throttle import TenantThrottle

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=BatchedRequest)

LIGHT: Final = 64
"""A tenant with no more than this waiting is served quickly."""
_SHARE: Final = 1000
"""Items of one tenant in a batch: so many that few more would go together cheaper, and no other waits long for them."""
_THROTTLED_SHARE: Final = 100
"""What a throttled tenant does in one go: so little that others find a gap soon."""

_LIGHT_SLOT: Final = 0
_HEAVY_SLOT: Final = 1


class FairShare(Generic[T]):
    """A backlog in which tenants take turns, and requests of a tenant go together and in order.

    Two batches run at a time: one of tenants that have little waiting, one of those that have much, so that the former
    never wait for the latter; and the latter pause as far as `throttle` asks them to. `limit` is how much a batch may
    hold, `share` how much of it may be one tenant's. A tenant is in one batch at a time.
    """

    slots = 2

    def __init__(
        self,
        tenant: Callable[[T], str],
        weigh: Callable[[T], int],
        *,
        limit: int,
        share: int,
        throttle: TenantThrottle | None = None,
    ) -> None:
        self._tenant = tenant
        self._weigh = weigh
        self._limit = limit
        self._share = share
        self._throttle = throttle
        self._tenants: dict[str, _Waiting[T]] = {}
        """By tenant; one that has been served goes to the end."""
        self._busy: set[str] = set()
        self._running: dict[int, _Running] = {}
        self._pause = 0.0

    def add(self, item: T, weight: int) -> int:
        tenant = self._tenant(item)
        waiting = self._tenants.get(tenant)
        if waiting is None:
            waiting = self._tenants[tenant] = _Waiting(clock())
        waiting.items.append(item)
        waiting.weight += weight
        return _HEAVY_SLOT if waiting.weight > LIGHT else _LIGHT_SLOT

    def waits(self, slot: int) -> bool:
        return bool(self._candidates(slot))

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        candidates = self._candidates(slot)
        if slot != _HEAVY_SLOT or self._throttle is None or not candidates:
            return bool(candidates)
        self._pause = max(map(self._throttle.pause_of, candidates))
        return not self._pause or self._throttle.enter(resume)

    def take(self, slot: int) -> tuple[list[T], int]:
        """As much of each tenant of the slot as of others."""
        pause = self._pause if slot == _HEAVY_SLOT else 0.0
        most_of_one = min(self._share, _THROTTLED_SHARE) if pause else self._share
        candidates = self._candidates(slot)
        share = min(most_of_one, max(1, self._limit // max(1, len(candidates))))
        taken: set[str] = set()
        batch: list[T] = []
        total, began = 0, clock()
        since = began
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
        self._running[slot] = _Running(taken, began if slot == _HEAVY_SLOT else since, pause)
        if slot == _HEAVY_SLOT and self._throttle is not None:
            self._throttle.heavy_batch()
        return batch, total

    def done(self, slot: int) -> None:
        running = self._running.pop(slot)
        self._busy -= running.tenants
        if self._throttle is None:
            return
        seconds = clock() - running.since
        if slot == _LIGHT_SLOT:
            self._throttle.served(running.tenants, seconds)
            return
        self._throttle.heavy_batch()
        if running.pause:
            self._throttle.leave(seconds * running.pause)

    def waiting(self) -> Sequence[T]:
        return [item for waiting in self._tenants.values() for item in waiting.items]

    def __len__(self) -> int:
        return sum(len(waiting.items) for waiting in self._tenants.values())

    def _candidates(self, slot: int) -> list[str]:
        """The tenants that have much waiting, or little, and of which no batch runs."""
        heavy = slot == _HEAVY_SLOT
        return [
            tenant
            for tenant, waiting in self._tenants.items()
            if (waiting.weight > LIGHT) is heavy and tenant not in self._busy
        ]


class _Waiting(Generic[T]):
    """What waits of one tenant, how much that is, and since when there is something."""

    __slots__ = ("items", "since", "weight")

    def __init__(self, since: float) -> None:
        self.items: deque[T] = deque()
        self.weight = 0
        self.since = since


class _Running:
    """Whose batch runs, since when it counts, and for how many times as long its tenants pause after it."""

    __slots__ = ("pause", "since", "tenants")

    def __init__(self, tenants: set[str], since: float, pause: float) -> None:
        self.tenants = tenants
        self.since = since
        self.pause = pause


class RequestBatcher(Batcher[RequestT]):
    """A batcher of topics: `tenant` is whose a request is.

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
        throttle: TenantThrottle | None = None,
    ) -> None:
        def fail(request: RequestT, error: Exception) -> None:
            if request.answer.done() or not spare(request, error):
                fail_request(request, error)

        super().__init__(
            run,
            weigh=weigh,
            limit=limit,
            most=most,
            backlog=FairShare(tenant, weigh, limit=limit, share=min(limit, _SHARE), throttle=throttle),
            fail=fail,
        )


class Links:
    """As many links as are in use at the same time."""

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

"""Acknowledging, failing and extending: what a consumer says about items it has leased."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, TypeVar

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.enqueue import OnFed
from queen.broker.topics.throttle import TenantThrottle
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.topics import TopicCatalog, TopicKey, lock_keys
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, storable
from queen.wire.topics import ExtendRef, ItemRef, NackRef

NOT_LEASED = "Item not found or not leased"
_LONGEST_ERROR = 10_000
_DEFAULT_ERROR = "Failed without an error message"

Ref = TypeVar("Ref", bound=ItemRef)
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Settlement(Generic[Ref, R]):
    """What one request says, and for each item what came of it; None: it is not there, or not leased."""

    refs: Sequence[Ref]
    answer: asyncio.Future[list[R | None]]


@dataclass(frozen=True, slots=True)
class Nacked:
    """What became of an item that failed: a dead letter, or ready again after so many seconds."""

    dead: bool
    seconds: float


class Settler:
    """Acks, nacks, extensions and releases, each kind fused."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        on_fed: OnFed,
        on_leased: Callable[[float], None],
        meter: Meter,
        courtesy: TenantThrottle,
    ) -> None:
        self._catalog = catalog
        self._on_fed = on_fed
        self._on_leased = on_leased
        self._meter = meter
        self._links = Links(database)
        self._acks: RequestBatcher[Settlement[ItemRef, bool]] = RequestBatcher(
            self._run_acks, weigh=_weigh, limit=5000, tenant=_tenant, courtesy=courtesy
        )
        self._nacks: RequestBatcher[Settlement[NackRef, Nacked]] = RequestBatcher(
            self._run_nacks, weigh=_weigh, limit=2000, tenant=_tenant, courtesy=courtesy
        )
        self._extensions: RequestBatcher[Settlement[ExtendRef, datetime]] = RequestBatcher(
            self._run_extensions, weigh=_weigh, limit=2000, tenant=_tenant
        )
        self._releases: RequestBatcher[Settlement[ItemRef, bool]] = RequestBatcher(
            self._run_releases, weigh=_weigh, limit=2000, tenant=_tenant
        )

    def ack(self, refs: Sequence[ItemRef]) -> asyncio.Future[list[bool | None]]:
        """The items are done and go for good."""
        return _submit(self._acks, refs)

    def nack(self, refs: Sequence[NackRef]) -> asyncio.Future[list[Nacked | None]]:
        """The items failed: they are retried later, or become dead letters."""
        return _submit(self._nacks, refs)

    def extend(self, refs: Sequence[ExtendRef]) -> asyncio.Future[list[datetime | None]]:
        """The leases of the items last longer; gives until when."""
        return _submit(self._extensions, refs)

    def release(self, refs: Sequence[ItemRef]) -> asyncio.Future[list[bool | None]]:
        """The leases of the items end early: they are ready as before, and have not failed."""
        return _submit(self._releases, refs)

    async def stop(self) -> None:
        for lane in (self._acks, self._nacks, self._extensions, self._releases):
            await lane.join()

    async def _run_acks(self, batch: list[Settlement[ItemRef, bool]]) -> None:
        places = await self._places([ref for request in batch for ref in request.refs])
        done = await ack_in(self._links, places)
        self._count("acked", [place.ref for place in done])
        _answer(batch, {place.index: True for place in done})

    async def _run_nacks(self, batch: list[Settlement[NackRef, Nacked]]) -> None:
        places = await self._places([ref for request in batch for ref in request.refs])
        outcomes: dict[int, Nacked] = {}
        fed: dict[TopicKey, float] = {}
        if places:
            await settle_handouts(self._links, places)
            rows = await self._links.fetch(
                "topic_nack",
                lock_keys({place.topic_id for place in places}),
                [place.ref.number for place in places],
                [place.topic_id for place in places],
                [place.ref.lease_owner for place in places],
                [_error_text(place.ref.error) for place in places],
            )
            for row in rows:
                place = places[row["slot"] - 1]
                outcome = outcomes[place.index] = Nacked(row["dead"], row["seconds"])
                if not outcome.dead:
                    key = (place.ref.namespace, place.ref.topic)
                    fed[key] = min(fed.get(key, outcome.seconds), outcome.seconds)
        refs = {place.index: place.ref for place in places}
        self._count("nacked", [refs[index] for index in outcomes])
        self._count("dead", [refs[index] for index, outcome in outcomes.items() if outcome.dead])
        _answer(batch, outcomes)
        if fed:
            self._on_fed(list(fed.items()))

    async def _run_extensions(self, batch: list[Settlement[ExtendRef, datetime]]) -> None:
        places = await self._places([ref for request in batch for ref in request.refs])
        ends: dict[int, datetime] = {}
        if places:
            await settle_handouts(self._links, places)
            seconds = [place.ref.seconds or float(place.lease_seconds) for place in places]
            rows = await self._links.fetch(
                "topic_extend",
                [place.ref.number for place in places],
                [place.topic_id for place in places],
                [place.ref.lease_owner for place in places],
                seconds,
            )
            for row in rows:
                ends[places[row["slot"] - 1].index] = row["leased_until"]
                self._on_leased(seconds[row["slot"] - 1])
        _answer(batch, ends)

    async def _run_releases(self, batch: list[Settlement[ItemRef, bool]]) -> None:
        places = await self._places([ref for request in batch for ref in request.refs])
        released: list[Place[ItemRef]] = []
        if places:
            await settle_handouts(self._links, places)
            rows = await self._links.fetch(
                "topic_release",
                lock_keys({place.topic_id for place in places}),
                [place.ref.number for place in places],
                [place.topic_id for place in places],
                [place.ref.lease_owner for place in places],
            )
            released = [places[row["slot"] - 1] for row in rows]
        _answer(batch, {place.index: True for place in released})
        if released:
            self._on_fed([(key, 0.0) for key in {(place.ref.namespace, place.ref.topic) for place in released}])

    def _count(self, done: str, refs: Sequence[ItemRef]) -> None:
        for key, items in Counter((ref.namespace, ref.topic) for ref in refs).items():
            self._meter.topic_items(done, *key, items)

    async def _places(self, refs: Sequence[Ref]) -> list[Place[Ref]]:
        return await find_places(self._catalog, refs)


@dataclass(frozen=True, slots=True)
class Place(Generic[Ref]):
    """An item that a request names: where in the request, and on which topic."""

    index: int
    ref: Ref
    topic_id: int
    lease_seconds: int


async def find_places(catalog: TopicCatalog, refs: Sequence[Ref]) -> list[Place[Ref]]:
    """Those whose topics exist, in the order of their ids, in which everybody locks items; each item once."""
    topics = await catalog.find({(ref.namespace, ref.topic) for ref in refs})
    places: dict[int, Place[Ref]] = {}
    for index, ref in enumerate(refs):
        topic = topics.get((ref.namespace, ref.topic))
        if topic is not None:
            places.setdefault(ref.number, Place(index, ref, topic.id, topic.lease_seconds))
    return sorted(places.values(), key=lambda place: place.ref.number)


async def settle_handouts(fetcher: Fetcher, places: Sequence[Place[Any]]) -> None:
    """Have the leases of items that were handed out of a ready queue a moment ago written to them."""
    await fetcher.fetch(
        "topic_settle_handouts",
        0.0,
        sorted({place.topic_id for place in places}),
        [place.ref.number for place in places],
    )


async def ack_in(fetcher: Fetcher, places: Sequence[Place[ItemRef]]) -> list[Place[ItemRef]]:
    """Remove leased items; returns those that were."""
    if not places:
        return []
    rows = await fetcher.fetch(
        "topic_ack",
        [place.ref.number for place in places],
        [place.topic_id for place in places],
        [place.ref.lease_owner for place in places],
    )
    return [places[row["slot"] - 1] for row in rows]


def _submit(lane: RequestBatcher[Settlement[Ref, R]], refs: Sequence[Ref]) -> asyncio.Future[list[R | None]]:
    request: Settlement[Ref, R] = Settlement(refs, asyncio.get_running_loop().create_future())
    lane.submit(request)
    return request.answer


def _weigh(request: Settlement[Any, Any]) -> int:
    return len(request.refs)


def _tenant(request: Settlement[Any, Any]) -> str:
    namespace: str = request.refs[0].namespace
    return namespace


def _answer(batch: Sequence[Settlement[Any, R]], outcomes: dict[int, R]) -> None:
    start = 0
    for request in batch:
        end = start + len(request.refs)
        if not request.answer.done():
            request.answer.set_result([outcomes.get(index) for index in range(start, end)])
        start = end


def _error_text(error: str | None) -> str:
    return storable(error)[:_LONGEST_ERROR] if error else _DEFAULT_ERROR


log = logging.getLogger(__name__)

LAPSED: Final = "The lease ended before the item was acknowledged"
SETTLED_SECONDS: Final = 3.0
"""Items that were handed out of a ready queue longer ago have their leases written to them."""
_AT_ONCE: Final = 1000
_FINE_SECONDS: Final = 0.05
_COARSE_SECONDS: Final = 1.0
_LONG_LEASE_SECONDS: Final = 60.0
# A lease may become visible a little after its time was read; what is older was looked at before.
_OVERLAP: Final = timedelta(seconds=5)
_EVER: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LeaseExpiry:
    """Looks when a lease that this worker has given may end, and now and then for those of workers that died."""

    def __init__(self, database: Database, on_fed: OnFed) -> None:
        self._link = database.link()
        self._on_fed = on_fed
        self._due: list[float] = []
        self._known: set[float] = set()
        self._looked_at = _EVER
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    def note(self, seconds: float) -> None:
        """A lease that has just begun, or was extended, lasts so long; those that end together are seen together."""
        grain = _FINE_SECONDS if seconds <= _LONG_LEASE_SECONDS else _COARSE_SECONDS
        at = math.ceil((asyncio.get_running_loop().time() + seconds) / grain) * grain
        if at in self._known:
            return
        self._known.add(at)
        heapq.heappush(self._due, at)
        if self._due[0] == at:
            self._wake.set()

    async def look(self, *, everywhere: bool = False) -> None:
        """Free what has lapsed since the last look; `everywhere`: whenever it did."""
        async with self._looking:
            await self._look(_EVER if everywhere else self._looked_at - _OVERLAP)

    async def _look(self, since: datetime) -> None:
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        while True:
            (row,) = await self._link.fetch("topic_lapsed", since, _AT_ONCE)
            if row["ids"]:
                topics = await self._link.fetch("topic_lapse", lock_keys(row["topic_ids"]), sorted(row["ids"]), LAPSED)
                self._on_fed([((topic["namespace"], topic["topic"]), 0.0) for topic in topics])
            if len(row["ids"] or ()) < _AT_ONCE:
                self._looked_at = row["at"]
                return
            since = row["last"]

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            wait = self._due[0] - loop.time() if self._due else None
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                continue
            except TimeoutError:
                pass
            while self._due and self._due[0] <= loop.time():
                self._known.discard(heapq.heappop(self._due))
            try:
                await self.look()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("lapsed leases could not be looked for; the slow poll does it: %s", error)

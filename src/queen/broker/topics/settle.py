"""Acks, nacks, lease extensions and releases of items; and the expiry of leases."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.context import OnItemsDue, TopicContext
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.topics import TopicCatalog, TopicKey, lock_keys
from queen.storage.database import Database, Fetcher, storable
from queen.wire.topics.requests import ExtendRef, ItemRef, NackRef

NOT_LEASED: Final = "Item not found or not leased"
_LONGEST_ERROR: Final = 10_000
_DEFAULT_ERROR: Final = "Failed without an error message"

Ref = TypeVar("Ref", bound=ItemRef)
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Settlement(Generic[Ref, R]):
    """A request about leased items, answered with an outcome for each: None where the item is not leased."""

    refs: Sequence[Ref]
    answer: asyncio.Future[list[R | None]]


@dataclass(frozen=True, slots=True)
class Nacked:
    """The outcome of a nack: a dead letter, or ready again after some seconds."""

    dead: bool
    seconds: float


@dataclass(slots=True, eq=False)
class Place(Generic[Ref]):
    """An item that a request names: its index in the batch, its id, and its topic."""

    index: int
    ref: Ref
    number: int
    topic_id: int
    lease_seconds: int

    @property
    def item(self) -> tuple[int, int]:
        return self.number, self.topic_id


async def find_places(catalog: TopicCatalog, refs: Sequence[Ref]) -> list[Place[Ref]]:
    """The references whose topics exist, ordered by item id, the order in which items are locked.

    A reference is id, topic and lease owner; each appears once. An item may appear several times, with other owners.
    """
    topics = await catalog.find({(ref.namespace, ref.topic) for ref in refs})
    places: dict[tuple[int, int, str | None], Place[Ref]] = {}
    for index, ref in enumerate(refs):
        topic = topics.get((ref.namespace, ref.topic))
        if topic is not None:
            number = ref.number
            key = (number, topic.id, ref.lease_owner)
            if key not in places:
                places[key] = Place(index, ref, number, topic.id, topic.lease_seconds)
    return sorted(places.values(), key=attrgetter("number"))


async def ack_in(fetcher: Fetcher, places: Sequence[Place[ItemRef]]) -> list[Place[ItemRef]]:
    """Remove leased items; returns those that were."""
    # The statement for distinct ids takes half the time; an item that is named twice is rare.
    distinct: dict[int, Place[ItemRef]] = {}
    repeated: list[Place[ItemRef]] = []
    for place in places:
        if distinct.setdefault(place.number, place) is not place:
            repeated.append(place)
    done = await _ack(fetcher, "topic_ack", list(distinct.values()))
    if repeated:
        done += await _ack(fetcher, "topic_ack_repeated", repeated)
    return done


async def _ack(fetcher: Fetcher, statement: str, places: Sequence[Place[ItemRef]]) -> list[Place[ItemRef]]:
    if not places:
        return []
    rows = await fetcher.fetch(statement, *_columns(places))
    return [places[row["slot"] - 1] for row in rows]


def _columns(places: Sequence[Place[Any]]) -> tuple[list[int], list[int], list[str | None]]:
    """What identifies leased items in statements: ids, topics, lease owners."""
    return (
        [place.number for place in places],
        [place.topic_id for place in places],
        [place.ref.lease_owner for place in places],
    )


class Settler:
    """Acks, nacks, extensions and releases; concurrent requests of a kind share a statement."""

    def __init__(self, context: TopicContext) -> None:
        self._catalog = context.catalog
        self._on_items_due = context.on_items_due
        self._on_leased = context.on_leased
        self._meter = context.meter
        self._links = Links(context.database)
        self._acks: RequestBatcher[Settlement[ItemRef, bool]] = RequestBatcher(
            self._run_acks, weigh=_weigh, limit=5000, tenant=_tenant, fair_share=context.fair_share
        )
        self._nacks: RequestBatcher[Settlement[NackRef, Nacked]] = RequestBatcher(
            self._run_nacks, weigh=_weigh, limit=2000, tenant=_tenant, fair_share=context.fair_share
        )
        self._extensions: RequestBatcher[Settlement[ExtendRef, datetime]] = RequestBatcher(
            self._run_extensions, weigh=_weigh, limit=2000, tenant=_tenant
        )
        self._releases: RequestBatcher[Settlement[ItemRef, bool]] = RequestBatcher(
            self._run_releases, weigh=_weigh, limit=2000, tenant=_tenant
        )

    def ack(self, refs: Sequence[ItemRef]) -> asyncio.Future[list[bool | None]]:
        """Remove items that were processed."""
        return _submit(self._acks, refs)

    def nack(self, refs: Sequence[NackRef]) -> asyncio.Future[list[Nacked | None]]:
        """Retry failed items later, or make them dead letters."""
        return _submit(self._nacks, refs)

    def extend(self, refs: Sequence[ExtendRef]) -> asyncio.Future[list[datetime | None]]:
        """Extend leases; returns their new ends."""
        return _submit(self._extensions, refs)

    def release(self, refs: Sequence[ItemRef]) -> asyncio.Future[list[bool | None]]:
        """End leases early: the items are ready again, without a failure being counted."""
        return _submit(self._releases, refs)

    async def set_lease(self, refs: Sequence[ItemRef], seconds: Sequence[float]) -> list[bool | None]:
        """Have leases expire `seconds` from now, sooner or later than they would."""
        wanted = {id(ref): lasting for ref, lasting in zip(refs, seconds, strict=True)}
        places = await self.places_to_change(refs)
        outcomes: list[bool | None] = [None] * len(refs)
        if places:
            lasting = [wanted[id(place.ref)] for place in places]
            for row in await self._links.fetch("topic_set_lease", *_columns(places), lasting):
                outcomes[places[row["slot"] - 1].index] = True
                self._on_leased(lasting[row["slot"] - 1])
        return outcomes

    async def stop(self) -> None:
        for batcher in (self._acks, self._nacks, self._extensions, self._releases):
            await batcher.join()

    async def places_to_change(self, refs: Sequence[Ref]) -> list[Place[Ref]]:
        """The references of requests that change the lease stored with an item."""
        return await find_places(self._catalog, refs)

    async def _run_acks(self, batch: list[Settlement[ItemRef, bool]]) -> None:
        done = await ack_in(self._links, await find_places(self._catalog, _refs(batch)))
        self._count("acked", [place.ref for place in done])
        _answer(batch, {place.index: True for place in done})

    async def _run_nacks(self, batch: list[Settlement[NackRef, Nacked]]) -> None:
        places = await self.places_to_change(_refs(batch))
        outcomes: dict[int, Nacked] = {}
        dead: list[ItemRef] = []
        due: dict[TopicKey, float] = {}
        if places:
            errors = [_error_text(place.ref.error) for place in places]
            at_once = [place.ref.dlq for place in places]
            for row in await self._links.fetch("topic_nack", _locks(places), *_columns(places), errors, at_once):
                place, seconds = places[row["slot"] - 1], row["seconds"]
                outcomes[place.index] = Nacked(row["dead"], seconds)
                if row["dead"]:
                    dead.append(place.ref)
                else:
                    key = (place.ref.namespace, place.ref.topic)
                    due[key] = min(due.get(key, seconds), seconds)
        self._count("nacked", [place.ref for place in places if place.index in outcomes])
        self._count("dead", dead)
        _answer(batch, outcomes)
        if due:
            self._on_items_due(list(due.items()))

    async def _run_extensions(self, batch: list[Settlement[ExtendRef, datetime]]) -> None:
        places = await self.places_to_change(_refs(batch))
        ends: dict[int, datetime] = {}
        if places:
            seconds = [place.ref.seconds or float(place.lease_seconds) for place in places]
            extended = {}
            for row in await self._links.fetch("topic_extend", *_columns(places), seconds):
                extended[places[row["slot"] - 1].item] = row
                self._on_leased(seconds[row["slot"] - 1])
            for place in places:
                lease = extended.get(place.item)
                if lease is not None and place.ref.lease_owner in (None, lease["lease_owner"]):
                    ends[place.index] = lease["leased_until"]
        _answer(batch, ends)

    async def _run_releases(self, batch: list[Settlement[ItemRef, bool]]) -> None:
        places = await self.places_to_change(_refs(batch))
        released: list[Place[ItemRef]] = []
        if places:
            rows = await self._links.fetch("topic_release", _locks(places), *_columns(places))
            released = [places[row["slot"] - 1] for row in rows]
        _answer(batch, {place.index: True for place in released})
        if released:
            self._on_items_due([(key, 0.0) for key in {(place.ref.namespace, place.ref.topic) for place in released}])

    def _count(self, done: str, refs: Sequence[ItemRef]) -> None:
        for key, items in Counter((ref.namespace, ref.topic) for ref in refs).items():
            self._meter.topic_items(done, *key, items)


def _submit(batcher: RequestBatcher[Settlement[Ref, R]], refs: Sequence[Ref]) -> asyncio.Future[list[R | None]]:
    request: Settlement[Ref, R] = Settlement(refs, asyncio.get_running_loop().create_future())
    batcher.submit(request)
    return request.answer


def _weigh(request: Settlement[Any, Any]) -> int:
    return len(request.refs)


def _tenant(request: Settlement[Any, Any]) -> str:
    namespace: str = request.refs[0].namespace
    return namespace


def _refs(batch: Sequence[Settlement[Ref, Any]]) -> list[Ref]:
    return [ref for request in batch for ref in request.refs]


def _locks(places: Sequence[Place[Any]]) -> list[int]:
    return lock_keys({place.topic_id for place in places})


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

LEASE_EXPIRED: Final = "The lease ended before the item was acknowledged"
_BATCH: Final = 1000
# Leases that end within the same grain are searched for together; long ones need no precision.
_GRAIN_SECONDS: Final = 0.05
_COARSE_GRAIN_SECONDS: Final = 1.0
_LONG_LEASE_SECONDS: Final = 60.0
# A lease may become visible a little after its time was read, so each search overlaps the one before.
_OVERLAP: Final = timedelta(seconds=5)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LeaseExpiry:
    """Frees items whose leases expired: of this worker when one is due, of dead workers now and then."""

    def __init__(self, database: Database, on_items_due: OnItemsDue) -> None:
        self._link = database.link()
        self._on_items_due = on_items_due
        self._due: list[float] = []
        self._known: set[float] = set()
        self._searched_to = _EPOCH
        self._searching = asyncio.Lock()
        self._wake = asyncio.Event()
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    def note(self, seconds: float) -> None:
        """A lease that has just begun, or was extended, lasts `seconds`."""
        grain = _GRAIN_SECONDS if seconds <= _LONG_LEASE_SECONDS else _COARSE_GRAIN_SECONDS
        at = math.ceil((asyncio.get_running_loop().time() + seconds) / grain) * grain
        if at in self._known:
            return
        self._known.add(at)
        heapq.heappush(self._due, at)
        if self._due[0] == at:
            self._wake.set()

    async def search(self, *, everywhere: bool = False) -> None:
        """Free what has expired since the last search; `everywhere`: whenever it did."""
        async with self._searching:
            await self._search(_EPOCH if everywhere else self._searched_to - _OVERLAP)

    async def _search(self, since: datetime) -> None:
        while True:
            (row,) = await self._link.fetch("topic_expired_leases", since, _BATCH)
            if row["ids"]:
                locks = lock_keys(row["topic_ids"])
                topics = await self._link.fetch("topic_expire_leases", locks, sorted(row["ids"]), LEASE_EXPIRED)
                self._on_items_due([((topic["namespace"], topic["topic"]), 0.0) for topic in topics])
            if len(row["ids"] or ()) < _BATCH:
                self._searched_to = row["at"]
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
                await self.search()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("expired leases of topic items not freed, left to the safety poll: %s", error)

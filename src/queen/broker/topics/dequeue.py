"""Dequeueing: the requests of all topics lease together; who finds nothing may wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.prefetch import NotReady, PrefetchBuffer, Prefetcher, PrefetchRequest
from queen.broker.topics.throttle import TenantThrottle
from queen.concurrency import BackgroundTasks, DeadlineTimer
from queen.errors import DatabaseUnavailable, QueenError
from queen.log.topics import LOCKS, Topic, TopicCatalog, TopicKey, lock_keys
from queen.metrics.meter import Meter
from queen.storage.database import Availability, Database, Fetcher, Record
from queen.wire.ids import IdSource
from queen.wire.topic_items import Row

log = logging.getLogger(__name__)

_EVERY: Final = 1000
"""Items that are leased between two moves of a topic's heads."""
_MOST_PRIORITIES: Final = 1000


class Heads:
    """Moves the heads of topics that are being consumed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._leased: Counter[int] = Counter()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def note(self, topic_id: int, count: int) -> None:
        """So many items of a topic were leased."""
        self._leased[topic_id] += count
        if self._leased[topic_id] >= _EVERY and topic_id not in self._tasks:
            del self._leased[topic_id]
            task = self._tasks[topic_id] = asyncio.get_running_loop().create_task(self._advance(topic_id))
            task.add_done_callback(lambda _: self._tasks.pop(topic_id, None))

    async def stop(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _advance(self, topic_id: int) -> None:
        try:
            await self.advance(topic_id)
        except (QueenError, asyncpg.PostgresError) as error:
            # It is tried again after as many items; until then dequeues have a longer way.
            log.debug("the heads of topic %d could not be moved: %s", topic_id, error)

    async def advance(self, topic_id: int) -> None:
        """Move the heads of a topic to its first ready items."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("topic_lock_alone", topic_id % LOCKS)
            await transaction.fetch("topic_advance_heads", topic_id, _MOST_PRIORITIES)


_PARKED_SECONDS: Final = 0.5
"""A dequeue that has waited for longer outlives an outage; a younger one is answered 503."""
_LOOK_SECONDS: Final = 0.1


class OutageGrace:
    """Tells who is spared an error, and calls `on_return` when PostgreSQL may be back."""

    def __init__(self, availability: Availability, on_return: Callable[[], None]) -> None:
        self._availability = availability
        self._on_return = on_return
        self._timer: asyncio.TimerHandle | None = None

    def spares(self, wait: bool, since: float, error: Exception) -> bool:
        """Whether a request that began to wait at a time goes on waiting in spite of an error."""
        loop = asyncio.get_running_loop()
        if not wait or not isinstance(error, DatabaseUnavailable) or loop.time() - since < _PARKED_SECONDS:
            return False
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look)
        return True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._availability.down:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
            return
        self._timer = None
        self._on_return()


_MOST_AT_ONCE: Final = 5000
_MOST_WAITING: Final = 1_000_000
_LONGEST_TIMER: Final = 3600.0


@dataclass(slots=True, eq=False)
class Dequeue:
    """A request for items. `busy`: a statement is leasing for it, so that its time may be up but not answered yet."""

    key: TopicKey
    limit: int
    lease_seconds: float | None
    wait: bool
    answer: asyncio.Future[Sequence[Row]]
    busy: bool = True
    expired: bool = False
    timer: asyncio.TimerHandle | None = None
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    woken_at: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has taken: where it waited, since it was woken."""
        return asyncio.get_running_loop().time() - (self.woken_at or self.since)

    def expire(self) -> None:
        self.expired = True
        if not self.busy:
            self.finish([])

    def finish(self, items: Sequence[Row]) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(items)


@dataclass(slots=True)
class _Bench:
    """Those who wait for one topic, and when the next of its items is due."""

    waiting: deque[Dequeue] = field(default_factory=deque)
    timer: DeadlineTimer | None = None


class Dequeuer:
    """Leases items in the order of service."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        heads: Heads,
        ids: IdSource,
        on_leased: Callable[[float], None],
        meter: Meter,
        desk: PrefetchBuffer,
        prefetcher: Prefetcher,
        courtesy: TenantThrottle,
    ) -> None:
        """`on_leased` is told how many seconds a lease lasts that has just begun."""
        self._database = database
        self._link = Links(database)
        self._catalog = catalog
        self._heads = heads
        self._ids = ids
        self._on_leased = on_leased
        self._meter = meter
        self._desk = desk
        self._prefetcher = prefetcher
        self._courtesy = courtesy
        self._benches: dict[TopicKey, _Bench] = {}
        self._closing = False
        self._claiming: Counter[TopicKey] = Counter()
        self._missed: set[TopicKey] = set()
        self._errands = BackgroundTasks()
        self._patience = OutageGrace(database.availability, self.wake_all)
        self.lane = self._make_lane(self._serve)
        self._ready_lanes: dict[TopicKey, RequestBatcher[Dequeue]] = {}

    def dequeue(
        self, key: TopicKey, limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> asyncio.Future[Sequence[Row]]:
        """Lease up to `limit` items; with `wait_seconds`, wait so long for the first of them."""
        loop = asyncio.get_running_loop()
        request = Dequeue(key, limit, lease_seconds, wait_seconds > 0, loop.create_future())
        self._submit(request)
        if request.wait:
            request.timer = loop.call_later(wait_seconds, request.expire)
        return request.answer

    def fed(self, key: TopicKey, seconds: float) -> None:
        """A topic has items that are due in so many seconds."""
        topic = self._catalog.cached(key)
        if topic is not None:
            self._prefetcher.fed(topic.id)
        if seconds > 0:
            bench = self._benches.get(key)
            if bench is not None:
                self._arm(key, bench, seconds)
            elif key in self._claiming:
                self._missed.add(key)
            return
        if key in self._claiming:
            self._missed.add(key)
        self._wake(key)

    def wake_all(self) -> None:
        """Let everybody who waits look again."""
        for key in list(self._benches):
            self._wake(key)

    def release_parked(self) -> None:
        """Answer everybody who waits with nothing, and let nobody wait from now on."""
        self._closing = True
        for bench in self._benches.values():
            for request in list(bench.waiting):
                request.expire()

    @property
    def parked(self) -> int:
        return sum(not request.answer.done() for bench in self._benches.values() for request in bench.waiting)

    async def stop(self) -> None:
        self.release_parked()
        self._patience.stop()
        for lane in [self.lane, *self._ready_lanes.values()]:
            await lane.join()
        await self._errands.finish()

    def _make_lane(self, serve: Callable[[list[Dequeue]], Awaitable[None]]) -> RequestBatcher[Dequeue]:
        async def run(batch: list[Dequeue]) -> None:
            batch = [request for request in batch if not request.answer.done()]
            # Another batch may run beside this one.
            claiming = Counter(request.key for request in batch)
            self._missed -= claiming.keys()
            self._claiming += claiming
            try:
                await serve(batch)
            finally:
                self._claiming -= claiming

        return RequestBatcher(
            run,
            weigh=lambda request: min(request.limit, _MOST_AT_ONCE),
            limit=_MOST_AT_ONCE,
            most=_MOST_WAITING,
            tenant=lambda request: request.key[0],
            spare=self._spare,
            courtesy=self._courtesy,
        )

    def _submit(self, request: Dequeue) -> None:
        topic = self._catalog.cached(request.key)
        if topic is None or not self._desk.serves(topic.id):
            self.lane.submit(request)
            return
        lane = self._ready_lanes.get(request.key)
        if lane is None:
            lane = self._ready_lanes[request.key] = self._make_lane(self._serve_ready)
        lane.submit(request)

    async def _serve(self, batch: list[Dequeue]) -> None:
        topics = await self._catalog.find({request.key for request in batch})
        requests = sorted(
            (request for request in batch if request.key in topics), key=lambda request: topics[request.key].id
        )
        items = await self._claim(requests, topics) if requests else []
        given = {id(request): some for request, some in zip(requests, items, strict=True)}
        if not all(items):
            batch = await self._leave_to_ready_queues(batch, topics, given)
        await self._answer(batch, topics, given)

    async def _leave_to_ready_queues(
        self, batch: list[Dequeue], topics: dict[TopicKey, Topic], given: Mapping[int, Sequence[Row]]
    ) -> list[Dequeue]:
        """Nothing may be leased past a ready queue: requests of topics that have one go there. Returns the others."""
        found = {request.key for request in batch if given.get(id(request))}
        unfound = [topics[key] for key in {request.key for request in batch} - found if key in topics]
        served = await self._desk.adopt(unfound) if unfound else set()
        for request in batch:
            if request.key in served:
                self._submit(request)
        return [request for request in batch if request.key not in served]

    async def _serve_ready(self, batch: list[Dequeue]) -> None:
        """Serve requests of one topic from its ready queue."""
        topic = await self._catalog.one(batch[0].key) if batch else None
        if topic is None:
            for request in batch:
                self.lane.submit(request)
            return
        leases = [_lease_seconds(request, topic) for request in batch]
        asked = [PrefetchRequest(self._ids.uuid(), one.limit, lease) for one, lease in zip(batch, leases, strict=True)]
        try:
            items = await self._desk.take(topic, asked)
        except NotReady:
            for request in batch:
                self.lane.submit(request)
            return
        topics = {topic.key: topic}
        await self._give_up_leases(batch, topics, items)
        for some, lease in zip(items, leases, strict=True):
            if some:
                self._on_leased(lease)
        self._heads.note(topic.id, sum(map(len, items)))
        self._prefetcher.look(topic.id)
        await self._answer(batch, topics, {id(request): some for request, some in zip(batch, items, strict=True)})

    async def _answer(
        self, batch: Sequence[Dequeue], topics: dict[TopicKey, Topic], given: Mapping[int, Sequence[Row]]
    ) -> None:
        hungry = []
        for request in batch:
            some = given.get(id(request), ())
            if some or request.expired or self._closing or not request.wait:
                self._hand_over(request, some)
            elif not request.answer.done():
                hungry.append(request)
        if hungry:
            await self._park(hungry, topics)

    async def _claim(self, requests: Sequence[Dequeue], topics: dict[TopicKey, Topic]) -> list[list[Record]]:
        """Lease for the requests, which are sorted by topic; those that came first are served first."""
        starts = [0, *itertools.accumulate(request.limit for request in requests)]
        wanted: Counter[int] = Counter()
        bases: dict[int, int] = {}
        for request, start in zip(requests, starts, strict=False):
            topic_id = topics[request.key].id
            wanted[topic_id] += request.limit
            bases.setdefault(topic_id, start)
        seconds = [_lease_seconds(request, topics[request.key]) for request in requests]
        owners = [self._ids.uuid() for _ in requests]
        rows = await self._link.fetch(
            "topic_claim", list(wanted), list(wanted.values()), list(bases.values()), starts[:-1], seconds, owners
        )
        items: list[list[Record]] = [[] for _ in requests]
        for row in rows:
            items[row["slot"] - 1].append(row)
        await self._give_up_leases(requests, topics, items)
        leased: Counter[int] = Counter()
        for request, some, lease in zip(requests, items, seconds, strict=True):
            if some:
                some.sort(key=service_order)
                leased[topics[request.key].id] += len(some)
                self._on_leased(lease)
                self._prefetcher.note(topics[request.key])
        for topic_id, count in leased.items():
            self._heads.note(topic_id, count)
        return items

    async def _give_up_leases(
        self, requests: Sequence[Dequeue], topics: dict[TopicKey, Topic], items: Sequence[Sequence[Row]]
    ) -> None:
        """Items that are delivered at most once are gone before anybody is told of them."""
        rows = [
            row
            for request, some in zip(requests, items, strict=True)
            if some and topics[request.key].at_most_once and not request.answer.done()
            for row in some
        ]
        await remove_leased(self._link, rows)

    def _hand_over(self, request: Dequeue, items: Sequence[Row]) -> None:
        self._meter.topic_request("dequeue", [request.key], request.seconds)
        if items and request.answer.done():
            # Its client has gone away meanwhile.
            self._errands.spawn(self._give_back(request.key, items))
            return
        if items:
            self._meter.topic_items("dequeued", *request.key, len(items))
        request.finish(items)

    async def _give_back(self, key: TopicKey, items: Sequence[Row]) -> None:
        rows = sorted(items, key=lambda row: int(row["id"]))
        ids = [row["id"] for row in rows]
        try:
            await self._database.fetch("topic_settle_handouts", 0.0, [row["topic_id"] for row in rows[:1]], ids)
            await self._database.fetch(
                "topic_give_back",
                lock_keys({row["topic_id"] for row in rows}),
                ids,
                [row["lease_owner"] for row in rows],
            )
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("%d items of %s could not be given back; their leases have to lapse: %s", len(rows), key, error)
            return
        self.fed(key, 0.0)

    async def _park(self, hungry: Sequence[Dequeue], topics: dict[TopicKey, Topic]) -> None:
        """Have requests wait for what happens next: something is enqueued or given back, or becomes due."""
        keys = set()
        for request in hungry:
            request.busy = False
            self._benches.setdefault(request.key, _Bench()).waiting.append(request)
            keys.add(request.key)
        by_id = {topics[key].id: key for key in keys if key in topics}
        if by_id:
            for row in await self._link.fetch("topic_next_due", list(by_id)):
                key = by_id[row["topic_id"]]
                bench = self._benches.get(key)
                if bench is not None:
                    self._arm(key, bench, row["seconds"])
        for key in keys & self._missed:
            self._wake(key)

    def _spare(self, request: Dequeue, error: Exception) -> bool:
        if not self._patience.spares(request.wait, request.since, error):
            return False
        if request.expired:
            request.finish([])
        elif request.busy:
            request.busy = False
            self._benches.setdefault(request.key, _Bench()).waiting.append(request)
        return True

    def _arm(self, key: TopicKey, bench: _Bench, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        # A millisecond later than told, as PostgreSQL counts finer than timers do.
        at = loop.time() + min(max(seconds, 0.0) + 0.001, _LONGEST_TIMER)
        if bench.timer is None:
            bench.timer = DeadlineTimer(partial(self._wake, key))
        bench.timer.set(at)

    def _wake(self, key: TopicKey) -> None:
        bench = self._benches.pop(key, None)
        if bench is None:
            return
        if bench.timer is not None:
            bench.timer.cancel()
        for request in bench.waiting:
            if not request.answer.done():
                request.busy = True
                request.woken_at = asyncio.get_running_loop().time()
                self._submit(request)


def _lease_seconds(request: Dequeue, topic: Topic) -> float:
    return request.lease_seconds if request.lease_seconds is not None else float(topic.lease_seconds)


def service_order(row: Record) -> tuple[int, datetime, int]:
    return row["priority"], row["deliver_after"], row["id"]


async def remove_leased(fetcher: Fetcher, rows: Iterable[Row]) -> None:
    """Remove items that have just been leased, in the order in which everybody locks them."""
    ordered = sorted(rows, key=lambda row: int(row["id"]))
    if ordered:
        await fetcher.fetch(
            "topic_ack",
            [row["id"] for row in ordered],
            [row["topic_id"] for row in ordered],
            [row["lease_owner"] for row in ordered],
        )

"""Dequeues: concurrent requests of all topics lease in one statement; long polls wait for the first item."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Generic, TypeVar

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.context import TopicContext
from queen.concurrency import BackgroundTasks, DeadlineTimer
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.topics import LOCKS, Topic, TopicKey, lock_keys
from queen.storage.database import Availability, Database, Fetcher, Record
from queen.wire.topics.items import Row

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
            # Tried again after as many items; until then dequeues read more of the index.
            log.debug("heads of topic %d not advanced: %s", topic_id, error)

    async def advance(self, topic_id: int) -> None:
        """Move the heads of a topic to its first ready items."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("topic_lock_alone", topic_id % LOCKS)
            await transaction.fetch("topic_advance_heads", topic_id, _MOST_PRIORITIES)


FLOODED: Final = "clients leave too many answers unread; nothing was leased, try again soon"
_MOST_AT_ONCE: Final = 5000
_MOST_WAITING: Final = 1_000_000


_NEVER: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True, eq=False)
class Dequeue:
    """A request for items. `busy`: a statement is leasing for it, so a timeout must not answer it yet."""

    key: TopicKey
    limit: int
    lease_seconds: float | None
    wait: bool
    answer: asyncio.Future[Sequence[Row]]
    busy: bool = True
    expired: bool = False
    missed: bool = False
    """Its topic got items while a statement was leasing for it, which may not have seen them."""
    again: bool = False
    """There may be items for it: a statement leases no more than fit in memory."""
    looked_at: datetime = _NEVER
    """Of the items that were due by then, none was left for it."""
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


_PARKED_SECONDS: Final = 0.5
"""A dequeue that has waited for longer survives an outage; a newer one is answered 503."""
_POLL_SECONDS: Final = 0.1
_LONGEST_TIMER: Final = 3600.0

K = TypeVar("K", bound=Hashable)
RequestT = TypeVar("RequestT", bound=Dequeue)


class _WaitList(Generic[RequestT]):
    """Requests that wait for the same, and a timer for the next due item."""

    __slots__ = ("requests", "timer")

    def __init__(self, on_due: Callable[[], None]) -> None:
        self.requests: list[RequestT] = []
        self.timer = DeadlineTimer(on_due)


class WaitLists(Generic[K, RequestT]):
    """The waiting requests of a worker, by topic or topic set. They go on waiting through an outage of PostgreSQL."""

    def __init__(
        self, availability: Availability, submit: Callable[[RequestT], None], on_available: Callable[[], None]
    ) -> None:
        """`on_available` is called when PostgreSQL is available again."""
        self._availability = availability
        self._submit = submit
        self._on_available = on_available
        self._lists: dict[K, _WaitList[RequestT]] = {}
        self._outage_timer: asyncio.TimerHandle | None = None
        self.closed = False

    def __contains__(self, key: K) -> bool:
        return key in self._lists

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._lists))

    def __len__(self) -> int:
        return sum(not request.answer.done() for waiting in self._lists.values() for request in waiting.requests)

    def park(self, key: K, request: RequestT) -> None:
        request.busy = False
        waiting = self._lists.get(key)
        if waiting is None:
            waiting = self._lists[key] = _WaitList(partial(self.wake, key))
        waiting.requests.append(request)

    def wake_at(self, key: K, at: float) -> None:
        """Wake the requests when an item is due (loop time)."""
        waiting = self._lists.get(key)
        if waiting is not None:
            waiting.timer.set(min(at, asyncio.get_running_loop().time() + _LONGEST_TIMER))

    def wake(self, key: K) -> None:
        """Submit the requests again."""
        waiting = self._lists.pop(key, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        for request in waiting.requests:
            if not request.answer.done():
                request.busy = True
                request.woken_at = asyncio.get_running_loop().time()
                self._submit(request)

    def keep(self, key: K, request: RequestT, error: Exception) -> bool:
        """Whether a request that failed goes on waiting: one that has waited already, in an outage."""
        loop = asyncio.get_running_loop()
        waited = loop.time() - request.since
        if not request.wait or not isinstance(error, DatabaseUnavailable) or waited < _PARKED_SECONDS:
            return False
        if self._outage_timer is None:
            self._outage_timer = loop.call_later(_POLL_SECONDS, self._poll)
        if request.expired:
            request.finish([])
        elif request.busy:
            self.park(key, request)
        return True

    def release(self) -> None:
        """Answer all requests with nothing; none may wait from now on."""
        self.closed = True
        for waiting in self._lists.values():
            for request in list(waiting.requests):
                request.expire()

    def stop(self) -> None:
        self.release()
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None
        for waiting in self._lists.values():
            waiting.timer.cancel()

    def _poll(self) -> None:
        self._outage_timer = None
        if self._availability.down:
            self._outage_timer = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._poll)
        else:
            self._on_available()


class _Batch:
    """Requests for which a statement is leasing, by topic."""

    def __init__(self, requests: Sequence[Dequeue]) -> None:
        self._by_key: dict[TopicKey, list[Dequeue]] = {}
        for request in requests:
            request.missed = False
            self._by_key.setdefault(request.key, []).append(request)

    def miss(self, key: TopicKey) -> None:
        """A topic has items that this statement may not see."""
        for request in self._by_key.get(key, ()):
            request.missed = True

    def miss_all(self) -> None:
        for key in self._by_key:
            self.miss(key)


class Dequeuer:
    """Leases items in the order of service."""

    skips_buffered = False
    """Whether topics with a prefetch buffer are left out of claims."""

    def __init__(self, context: TopicContext, heads: Heads) -> None:
        self._database = context.database
        self._link = Links(context.database)
        self._catalog = context.catalog
        self._heads = heads
        self._ids = context.ids
        self._on_leased = context.on_leased
        self._meter = context.meter
        self._fair_share = context.fair_share
        self.waiting: WaitLists[TopicKey, Dequeue] = WaitLists(
            context.database.availability, self.submit, self.wake_all
        )
        self._most_bytes = context.most_bytes
        self.is_flooded: Callable[[], bool] = lambda: False
        """Whether so many answers wait to be read by clients that there is no memory for more."""
        self._running: list[_Batch] = []
        self._tasks = BackgroundTasks()
        self.batcher = self.make_batcher(self._serve)

    def dequeue(
        self, key: TopicKey, limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> asyncio.Future[Sequence[Row]]:
        """Lease up to `limit` items; wait up to `wait_seconds` for the first of them."""
        return self.begin(key, limit, lease_seconds, wait_seconds).answer

    def begin(self, key: TopicKey, limit: int, lease_seconds: float | None, wait_seconds: float) -> Dequeue:
        """The same, as a request that the caller can expire."""
        loop = asyncio.get_running_loop()
        request = Dequeue(key, limit, lease_seconds, wait_seconds > 0, loop.create_future())
        self.submit(request)
        if request.wait:
            request.timer = loop.call_later(wait_seconds, request.expire)
        return request

    def items_due(self, key: TopicKey, seconds: float) -> None:
        """A topic has items that are due in `seconds`."""
        for batch in self._running:
            batch.miss(key)
        if seconds > 0:
            self.waiting.wake_at(key, _due(seconds))
        else:
            self.waiting.wake(key)

    def wake_all(self) -> None:
        """Have every waiting request try again."""
        for batch in self._running:
            batch.miss_all()
        for key in self.waiting:
            self.waiting.wake(key)

    def release_parked(self) -> None:
        """Answer waiting requests with nothing; none waits from now on."""
        self.waiting.release()

    async def stop(self) -> None:
        self.waiting.stop()
        await self.batcher.join()
        await self._tasks.finish()

    def make_batcher(self, serve: Callable[[list[Dequeue]], Awaitable[None]]) -> RequestBatcher[Dequeue]:
        async def run(batch: list[Dequeue]) -> None:
            batch = [request for request in batch if not request.answer.done()]
            if self.is_flooded():
                raise Overloaded(FLOODED)
            # Another batch may run beside this one.
            running = _Batch(batch)
            self._running.append(running)
            try:
                await serve(batch)
            finally:
                self._running.remove(running)

        return RequestBatcher(
            run,
            weigh=lambda request: min(request.limit, _MOST_AT_ONCE),
            limit=_MOST_AT_ONCE,
            most=_MOST_WAITING,
            tenant=lambda request: request.key[0],
            spare=lambda request, error: self.waiting.keep(request.key, request, error),
            fair_share=self._fair_share,
        )

    def submit(self, request: Dequeue) -> None:
        self.batcher.submit(request)

    async def _serve(self, batch: list[Dequeue]) -> None:
        topics = await self._catalog.find({request.key for request in batch})
        requests = sorted(
            (request for request in batch if request.key in topics and not topics[request.key].paused),
            key=lambda request: topics[request.key].id,
        )
        items = await self.claim(requests, topics) if requests else []
        given = {id(request): some for request, some in zip(requests, items, strict=True)}
        await self.answer(batch, topics, given)

    async def answer(
        self, batch: Sequence[Dequeue], topics: dict[TopicKey, Topic], given: Mapping[int, Sequence[Row]]
    ) -> None:
        """Answer requests with the items they were given (by the request's `id()`); the others wait, if they may."""
        unserved = []
        for request in batch:
            some = given.get(id(request), ())
            if request.again and not some and not request.expired and not request.answer.done():
                request.again = False
                self.submit(request)
            elif some or request.expired or self.waiting.closed or not request.wait:
                self._hand_over(request, some, exists=request.key in topics)
            elif not request.answer.done():
                unserved.append(request)
        if unserved:
            await self._park(unserved, topics)

    async def claim(self, requests: Sequence[Dequeue], topics: dict[TopicKey, Topic]) -> list[list[Record]]:
        """Lease for requests, which are sorted by topic; within a topic they are served in order."""
        starts = [0, *itertools.accumulate(request.limit for request in requests)]
        wanted: Counter[int] = Counter()
        bases: dict[int, int] = {}
        for request, start in zip(requests, starts, strict=False):
            topic_id = topics[request.key].id
            wanted[topic_id] += request.limit
            bases.setdefault(topic_id, start)
        seconds = [lease_seconds_of(request, topics[request.key]) for request in requests]
        owners = [self._ids.uuid() for _ in requests]
        rows = await self._link.fetch(
            "topic_claim",
            list(wanted),
            list(wanted.values()),
            list(bases.values()),
            starts[:-1],
            seconds,
            owners,
            self.skips_buffered,
            self._most_bytes,
        )
        items: list[list[Record]] = [[] for _ in requests]
        for row in rows:
            items[row["slot"] - 1].append(row)
        if is_cut(rows, self._most_bytes):
            for request in requests:
                request.again = True
        await self.remove_unacknowledged(requests, topics, items)
        leased: Counter[int] = Counter()
        for request, some, lease in zip(requests, items, seconds, strict=True):
            if some:
                some.sort(key=service_order)
                leased[topics[request.key].id] += len(some)
                self._on_leased(lease)
        for topic_id, count in leased.items():
            self._heads.note(topic_id, count)
        return items

    async def remove_unacknowledged(
        self, requests: Sequence[Dequeue], topics: dict[TopicKey, Topic], items: Sequence[list[Any]]
    ) -> None:
        """Remove items of `at_most_once` topics before their delivery; those gone by then are not delivered."""
        given = [
            some
            for request, some in zip(requests, items, strict=True)
            if some and topics[request.key].at_most_once and not request.answer.done()
        ]
        gone = await remove_leased(self._link, itertools.chain.from_iterable(given))
        if gone:
            for some in given:
                some[:] = [row for row in some if row["id"] not in gone]

    def _hand_over(self, request: Dequeue, items: Sequence[Row], *, exists: bool) -> None:
        # Names that were made up are no metrics.
        self._meter.topic_request("dequeue", [request.key] if exists else [], request.seconds)
        if items and request.answer.done():
            # Its client disconnected.
            self._tasks.spawn(self._give_back(request.key, items))
            return
        if items:
            self._meter.topic_items("dequeued", *request.key, len(items))
        request.finish(items)

    async def _give_back(self, key: TopicKey, items: Sequence[Row]) -> None:
        rows = sorted(items, key=lambda row: int(row["id"]))
        try:
            await self.end_leases(rows)
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("%d undelivered items of topic %s/%s stay leased until expiry: %s", len(rows), *key, error)
            return
        self.items_due(key, 0.0)

    async def end_leases(self, rows: Sequence[Row]) -> None:
        """Make leased items ready again, as if they had not been leased."""
        await self._database.fetch(
            "topic_give_back",
            lock_keys({row["topic_id"] for row in rows}),
            [row["id"] for row in rows],
            [row["lease_owner"] for row in rows],
        )

    async def _park(self, unserved: Sequence[Dequeue], topics: dict[TopicKey, Topic]) -> None:
        """Have requests wait until something is enqueued, given back, or becomes due."""
        looked: dict[TopicKey, datetime] = {}
        for request in unserved:
            looked[request.key] = min(request.looked_at, looked.get(request.key, request.looked_at))
        # When a topic is resumed, its requests are woken.
        by_id = {topics[key].id: key for key in looked if key in topics and not topics[key].paused}
        next_due: dict[TopicKey, Record] = {}
        if by_id:
            rows = await self._link.fetch("topic_next_due", list(by_id), [looked[key] for key in by_id.values()])
            next_due = {by_id[row["topic_id"]]: row for row in rows}
        for request in unserved:
            row = next_due.get(request.key)
            if request.answer.done():
                continue
            if request.expired or self.waiting.closed:
                self._hand_over(request, (), exists=request.key in topics)
            elif row is not None and row["seconds"] is not None and row["seconds"] <= 0:
                # It became due after the search, or others had it. What is due by now is searched for once more.
                request.looked_at = row["at"]
                self.submit(request)
            else:
                self.waiting.park(request.key, request)
        for key, row in next_due.items():
            if row["seconds"] is not None and row["seconds"] > 0:
                self.waiting.wake_at(key, _due(row["seconds"]))
        for key in {request.key for request in unserved if request.missed}:
            self.waiting.wake(key)


def _due(seconds: float) -> float:
    # A millisecond later, as PostgreSQL's clock is finer than timers are.
    return asyncio.get_running_loop().time() + max(seconds, 0.0) + 0.001


def lease_seconds_of(request: Dequeue, topic: Topic) -> float:
    return request.lease_seconds if request.lease_seconds is not None else float(topic.lease_seconds)


def is_cut(rows: Sequence[Record], most_bytes: int) -> bool:
    """Whether a statement may have leased fewer items than were wanted, because those had enough bytes."""
    return sum([400 + len(row["payload"] or b"") + len(row["metadata"] or b"") for row in rows]) >= most_bytes


def service_order(row: Record) -> tuple[int, datetime, int]:
    return row["priority"], row["deliver_after"], row["id"]


async def remove_leased(fetcher: Fetcher, rows: Iterable[Row]) -> set[int]:
    """Remove items that have just been leased, ordered by id as all locks are; returns the ids of those not there."""
    ordered = sorted(rows, key=lambda row: int(row["id"]))
    if not ordered:
        return set()
    removed = await fetcher.fetch(
        "topic_ack",
        [row["id"] for row in ordered],
        [row["topic_id"] for row in ordered],
        [row["lease_owner"] for row in ordered],
    )
    return {row["id"] for row in ordered} - {ordered[row["slot"] - 1]["id"] for row in removed}

"""Several topics that are dequeued as one: which of them have something, and when others will."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.dequeue import Dequeue, Heads, OutageGrace, remove_leased, service_order
from queen.broker.topics.prefetch import PrefetchBuffer
from queen.broker.topics.settle import Settler
from queen.broker.topics.throttle import TenantThrottle
from queen.concurrency import BackgroundTasks, DeadlineTimer
from queen.errors import QueenError
from queen.log.topics import Topic, TopicCatalog, TopicKey
from queen.metrics.meter import Meter
from queen.storage.database import Database, Record
from queen.wire.ids import IdSource
from queen.wire.topics import ItemRef


class TopicSet:
    """What is known of the topics of a namespace, or of some of them. Times are those of the event loop."""

    def __init__(self, namespace: str, names: frozenset[str]) -> None:
        """Without names, all topics of the namespace."""
        self.namespace = namespace
        self.names = names
        self.scanned_at: float | None = None
        self.used_at = 0.0
        self._lively: set[TopicKey] = set()
        self._news: set[TopicKey] = set()
        self._due: list[tuple[float, TopicKey]] = []
        self._due_at: dict[TopicKey, float] = {}

    def covers(self, key: TopicKey) -> bool:
        """Whether a topic of its namespace is one of these."""
        return not self.names or key[1] in self.names

    def fed(self, key: TopicKey, at: float, now: float) -> None:
        """A topic has items that are due at a time."""
        if at <= now:
            self._lively.add(key)
            self._news.add(key)
        elif at < self._due_at.get(key, math.inf):
            # The first is enough: when it has come, PostgreSQL is asked for the next.
            self._due_at[key] = at
            heapq.heappush(self._due, (at, key))

    def look(self, now: float) -> set[TopicKey]:
        """The topics that may have something due; what is told from now on is news."""
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            self._lively.add(key)
            if self._due_at.get(key) == at:
                del self._due_at[key]
        self._news = set()
        return set(self._lively)

    def found_empty(self, keys: set[TopicKey]) -> None:
        """There was nothing due in these since the last look, save where there are news."""
        self._lively -= keys - self._news

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def has_news(self) -> bool:
        return bool(self._news)


log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 5000
_MOST_WAITING: Final = 1_000_000
_IDLE_SECONDS: Final = 600.0
_MOST_TRIES: Final = 5


@dataclass(slots=True, eq=False)
class MultiTopicDequeue(Dequeue):
    """A request for items of several topics; the second part of its key says nothing."""

    names: frozenset[str] = frozenset()
    topics: dict[int, str] = dataclasses.field(default_factory=dict)
    """The names of the topics of its items."""


class MultiTopicDequeuer:
    """Leases items of many topics in one order of service."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        heads: Heads,
        ids: IdSource,
        settler: Settler,
        on_leased: Callable[[float], None],
        meter: Meter,
        poll_seconds: float,
        desk: PrefetchBuffer,
        courtesy: TenantThrottle,
    ) -> None:
        self._desk = desk
        self._link = Links(database)
        self._catalog = catalog
        self._heads = heads
        self._ids = ids
        self._settler = settler
        self._on_leased = on_leased
        self._meter = meter
        self._poll_seconds = poll_seconds
        self._fields: dict[str, dict[frozenset[str], TopicSet]] = {}
        self._parked: dict[TopicSet, list[MultiTopicDequeue]] = {}
        self._timers: dict[TopicSet, DeadlineTimer] = {}
        self._errands = BackgroundTasks()
        self._closing = False
        self._patience = OutageGrace(database.availability, self.wake_all)
        self.lane: RequestBatcher[MultiTopicDequeue] = RequestBatcher(
            self._run,
            weigh=lambda request: min(request.limit, _MOST_AT_ONCE),
            limit=_MOST_AT_ONCE,
            most=_MOST_WAITING,
            tenant=lambda request: request.key[0],
            spare=self._spare,
            courtesy=courtesy,
        )

    def dequeue(
        self, namespace: str, names: Collection[str], limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> MultiTopicDequeue:
        """Lease up to `limit` items of these topics, or (without names) of all topics of a namespace."""
        loop = asyncio.get_running_loop()
        request = MultiTopicDequeue(
            (namespace, ""), limit, lease_seconds, wait_seconds > 0, loop.create_future(), names=frozenset(names)
        )
        self.lane.submit(request)
        if request.wait:
            request.timer = loop.call_later(wait_seconds, request.expire)
        return request

    def fed(self, key: TopicKey, seconds: float) -> None:
        """A topic has items that are due in so many seconds."""
        fields = self._fields.get(key[0])
        if fields is None:
            return
        now = asyncio.get_running_loop().time()
        for field in fields.values():
            if field.covers(key):
                field.fed(key, now + seconds, now)
                if seconds <= 0:
                    self._wake(field)
                elif field in self._parked:
                    self._arm(field)

    def wake_all(self) -> None:
        """Let everybody who waits look again, at PostgreSQL; forget what nobody asks for any more."""
        now = asyncio.get_running_loop().time()
        for namespace, fields in list(self._fields.items()):
            for names, field in list(fields.items()):
                if field in self._parked:
                    field.scanned_at = None
                    self._wake(field)
                elif now - field.used_at > _IDLE_SECONDS:
                    del fields[names]
            if not fields:
                del self._fields[namespace]

    def release_parked(self) -> None:
        """Answer everybody who waits with nothing, and let nobody wait from now on."""
        self._closing = True
        for requests in self._parked.values():
            for request in list(requests):
                request.expire()

    @property
    def parked(self) -> int:
        return sum(not request.answer.done() for requests in self._parked.values() for request in requests)

    async def stop(self) -> None:
        self.release_parked()
        self._patience.stop()
        for timer in self._timers.values():
            timer.cancel()
        await self.lane.join()
        await self._errands.finish()

    async def _run(self, batch: list[MultiTopicDequeue]) -> None:
        """Those who ask for the same topics are served by one statement."""
        asked: dict[TopicSet, list[MultiTopicDequeue]] = {}
        for request in batch:
            if not request.answer.done():
                asked.setdefault(self._field(request), []).append(request)
        for field, requests in asked.items():
            await self._serve(field, requests)

    def _field(self, request: MultiTopicDequeue) -> TopicSet:
        fields = self._fields.setdefault(request.key[0], {})
        field = fields.get(request.names)
        if field is None:
            field = fields[request.names] = TopicSet(request.key[0], request.names)
        field.used_at = asyncio.get_running_loop().time()
        return field

    async def _serve(self, field: TopicSet, requests: list[MultiTopicDequeue]) -> None:
        loop = asyncio.get_running_loop()
        wanted = sum(request.limit for request in requests)
        if field.scanned_at is None:
            await self._scan(field)
        rows, topics = await self._claim(field, requests, wanted)
        if not rows and field.scanned_at is not None and loop.time() - field.scanned_at > self._poll_seconds:
            # Nobody told of anything; another host may have forgotten to.
            await self._scan(field)
            rows, topics = await self._claim(field, requests, wanted)
        await self._hand_over(field, requests, rows, topics)

    async def _scan(self, field: TopicSet) -> None:
        """Look in PostgreSQL which topics have something."""
        loop = asyncio.get_running_loop()
        rows = await self._link.fetch("topic_lively", field.namespace, sorted(field.names) if field.names else None)
        now = field.scanned_at = loop.time()
        for row in rows:
            field.fed((field.namespace, row["name"]), now + row["seconds"], now)

    async def _claim(
        self, field: TopicSet, requests: Sequence[MultiTopicDequeue], wanted: int
    ) -> tuple[list[list[Record]], dict[int, Topic]]:
        """Lease for the requests, of which the first is served first; empty when there is nothing at all."""
        starts = [0, *itertools.accumulate(request.limit for request in requests)][:-1]
        for _ in range(_MOST_TRIES):
            keys = field.look(asyncio.get_running_loop().time())
            topics = {topic.id: topic for topic in (await self._catalog.find(keys)).values()}
            if not topics:
                field.found_empty(keys)
                return [], {}
            # Items in the ready queue of one topic cannot be told from those of others by their order.
            await self._desk.close(list(topics.values()))
            rows = await self._link.fetch(
                "topic_claim_many",
                list(topics),
                wanted,
                starts,
                [request.lease_seconds for request in requests],
                [self._ids.uuid() for _ in requests],
            )
            seen = rows[0]["seen"]
            if seen < wanted:
                field.found_empty(keys)
                await self._note_due(field, list(topics.values()))
            items: list[list[Record]] = [[] for _ in requests]
            for row in rows:
                if row["slot"] is not None:
                    items[row["slot"] - 1].append(row)
            if any(items):
                return items, topics
            if not seen:
                return [], {}
            # Others were quicker to take everything that was seen.
        return [], {}

    async def _note_due(self, field: TopicSet, topics: Sequence[Topic]) -> None:
        loop = asyncio.get_running_loop()
        by_id = {topic.id: topic.key for topic in topics}
        for row in await self._link.fetch("topic_next_due", list(by_id)):
            now = loop.time()
            # A millisecond later than told, as PostgreSQL counts finer than timers do.
            field.fed(by_id[row["topic_id"]], now + max(0.0, row["seconds"]) + 0.001, now)

    async def _hand_over(
        self,
        field: TopicSet,
        requests: Sequence[MultiTopicDequeue],
        items: list[list[Record]],
        topics: dict[int, Topic],
    ) -> None:
        leased: Counter[int] = Counter()
        for request, rows in zip(requests, items or [[]] * len(requests), strict=True):
            rows.sort(key=service_order)
            leased.update(row["topic_id"] for row in rows)
            if rows and request.answer.done():
                self._errands.spawn(self._give_back(rows, topics))
                continue
            if not rows and request.wait and not request.expired and not self._closing:
                if not request.answer.done():
                    self._park(field, request)
                continue
            await self._give_up_leases(rows, topics)
            request.topics = {id: topic.name for id, topic in topics.items()}
            counts = {
                topics[topic_id].key: count for topic_id, count in Counter(row["topic_id"] for row in rows).items()
            }
            for key, count in counts.items():
                self._meter.topic_items("dequeued", *key, count)
            self._meter.topic_request("dequeue", counts, request.seconds)
            request.finish(rows)
        for topic_id, count in leased.items():
            self._heads.note(topic_id, count)
        leases = ((row["leased_until"] - row["updated_at"]).total_seconds() for rows in items for row in rows)
        for seconds in {round(lease, 2) for lease in leases}:
            self._on_leased(seconds)
        if field.has_news:
            self._wake(field)

    async def _give_up_leases(self, rows: Sequence[Record], topics: dict[int, Topic]) -> None:
        """Items that are delivered at most once are gone before anybody is told of them."""
        await remove_leased(self._link, (row for row in rows if topics[row["topic_id"]].at_most_once))

    async def _give_back(self, rows: Sequence[Record], topics: dict[int, Topic]) -> None:
        """The client has gone away meanwhile."""
        refs = [ItemRef(row["id"], *topics[row["topic_id"]].key, row["lease_owner"]) for row in rows]
        try:
            await self._settler.release(refs)
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("%d items could not be given back; their leases have to lapse: %s", len(rows), error)

    def _park(self, field: TopicSet, request: MultiTopicDequeue) -> None:
        request.busy = False
        self._parked.setdefault(field, []).append(request)
        self._arm(field)

    def _spare(self, request: MultiTopicDequeue, error: Exception) -> bool:
        if not self._patience.spares(request.wait, request.since, error):
            return False
        if request.expired:
            request.finish([])
        elif request.busy:
            self._park(self._field(request), request)
        return True

    def _arm(self, field: TopicSet) -> None:
        """Wake those who wait when the next item is due."""
        if field.next_at is None:
            return
        timer = self._timers.get(field)
        if timer is None:
            timer = self._timers[field] = DeadlineTimer(partial(self._wake, field))
        timer.set(field.next_at)

    def _wake(self, field: TopicSet) -> None:
        timer = self._timers.pop(field, None)
        if timer is not None:
            timer.cancel()
        for request in self._parked.pop(field, ()):
            if not request.answer.done():
                request.busy = True
                request.woken_at = asyncio.get_running_loop().time()
                self.lane.submit(request)

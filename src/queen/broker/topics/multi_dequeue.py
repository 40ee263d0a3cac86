"""Dequeues over several topics, or all of a namespace, in one order of service."""

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
from datetime import datetime
from typing import Final

import asyncpg

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.context import TopicContext
from queen.broker.topics.dequeue import FLOODED, Dequeue, Heads, WaitLists, is_cut, remove_leased, service_order
from queen.broker.topics.settle import Settler
from queen.concurrency import BackgroundTasks
from queen.errors import Overloaded, QueenError
from queen.log.topics import Topic, TopicKey
from queen.storage.database import Record
from queen.wire.topics.requests import ItemRef


class TopicSet:
    """Which topics of a namespace, or of some of them, have due items, or when they will. Times are loop times."""

    def __init__(self, namespace: str, names: frozenset[str]) -> None:
        """Without names, all topics of the namespace."""
        self.namespace = namespace
        self.names = names
        self.scanned_at: float | None = None
        self.used_at = 0.0
        self._due_now: set[TopicKey] = set()
        self._fed_since: set[TopicKey] = set()
        self._due: list[tuple[float, TopicKey]] = []
        self._due_at: dict[TopicKey, float] = {}

    def covers(self, key: TopicKey) -> bool:
        """Whether a topic of its namespace is one of these."""
        return not self.names or key[1] in self.names

    def items_due(self, key: TopicKey, at: float, now: float) -> None:
        """A topic has items that are due at a time."""
        if at <= now:
            self._due_now.add(key)
            self._fed_since.add(key)
        elif at < self._due_at.get(key, math.inf):
            # The first is enough: when it has come, PostgreSQL is asked for the next.
            self._due_at[key] = at
            heapq.heappush(self._due, (at, key))

    def look(self, now: float) -> set[TopicKey]:
        """The topics that may have due items; `changed` covers those that get items from now on."""
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            self._due_now.add(key)
            if self._due_at.get(key) == at:
                del self._due_at[key]
        self._fed_since = set()
        return set(self._due_now)

    def found_empty(self, keys: set[TopicKey]) -> None:
        """Nothing was due in these at the last look; those that got items since stay."""
        self._due_now -= keys - self._fed_since

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def changed(self) -> bool:
        return bool(self._fed_since)


log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 5000
_MOST_WAITING: Final = 1_000_000
_IDLE_SECONDS: Final = 600.0
_MOST_TRIES: Final = 5


@dataclass(slots=True, eq=False)
class MultiTopicDequeue(Dequeue):
    """A request for items of several topics; the topic in its key is empty."""

    names: frozenset[str] = frozenset()
    topics: dict[int, str] = dataclasses.field(default_factory=dict)
    """The names of the topics of its items."""


class MultiTopicDequeuer:
    """Leases items of many topics in one order of service."""

    def __init__(self, context: TopicContext, heads: Heads, settler: Settler, poll_seconds: float) -> None:
        self._link = Links(context.database)
        self._catalog = context.catalog
        self._heads = heads
        self._ids = context.ids
        self._settler = settler
        self._on_leased = context.on_leased
        self._meter = context.meter
        self._poll_seconds = poll_seconds
        self._topic_sets: dict[str, dict[frozenset[str], TopicSet]] = {}
        self._most_bytes = context.most_bytes
        self.is_flooded: Callable[[], bool] = lambda: False
        """Whether so many answers wait to be read by clients that there is no memory for more."""
        self._tasks = BackgroundTasks()
        self.batcher: RequestBatcher[MultiTopicDequeue] = RequestBatcher(
            self._run,
            weigh=lambda request: min(request.limit, _MOST_AT_ONCE),
            limit=_MOST_AT_ONCE,
            most=_MOST_WAITING,
            tenant=lambda request: request.key[0],
            spare=lambda request, error: self.waiting.keep(self._topic_set(request), request, error),
            fair_share=context.fair_share,
        )
        self.waiting: WaitLists[TopicSet, MultiTopicDequeue] = WaitLists(
            context.database.availability, self.batcher.submit, self.wake_all
        )

    def dequeue(
        self, namespace: str, names: Collection[str], limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> MultiTopicDequeue:
        """Lease up to `limit` items of these topics, or (without names) of all topics of a namespace."""
        loop = asyncio.get_running_loop()
        request = MultiTopicDequeue(
            (namespace, ""), limit, lease_seconds, wait_seconds > 0, loop.create_future(), names=frozenset(names)
        )
        self.batcher.submit(request)
        if request.wait:
            request.timer = loop.call_later(wait_seconds, request.expire)
        return request

    def items_due(self, key: TopicKey, seconds: float) -> None:
        """A topic has items that are due in `seconds`."""
        topic_sets = self._topic_sets.get(key[0])
        if topic_sets is None:
            return
        now = asyncio.get_running_loop().time()
        for topic_set in topic_sets.values():
            if topic_set.covers(key):
                topic_set.items_due(key, now + seconds, now)
                if seconds <= 0:
                    self.waiting.wake(topic_set)
                else:
                    self._wake_when_due(topic_set)

    def wake_all(self) -> None:
        """Have every waiting request search PostgreSQL again; forget topic sets that are not used any more."""
        now = asyncio.get_running_loop().time()
        for namespace, topic_sets in list(self._topic_sets.items()):
            for names, topic_set in list(topic_sets.items()):
                # Also one that is being searched for, or served: that may have begun before.
                topic_set.scanned_at = None
                if topic_set in self.waiting:
                    self.waiting.wake(topic_set)
                elif now - topic_set.used_at > _IDLE_SECONDS:
                    del topic_sets[names]
            if not topic_sets:
                del self._topic_sets[namespace]

    def release_parked(self) -> None:
        """Answer waiting requests with nothing; none waits from now on."""
        self.waiting.release()

    async def stop(self) -> None:
        self.waiting.stop()
        await self.batcher.join()
        await self._tasks.finish()

    async def _run(self, batch: list[MultiTopicDequeue]) -> None:
        """Requests for the same topics share a statement."""
        if self.is_flooded():
            raise Overloaded(FLOODED)
        asked: dict[TopicSet, list[MultiTopicDequeue]] = {}
        for request in batch:
            if not request.answer.done():
                asked.setdefault(self._topic_set(request), []).append(request)
        for topic_set, requests in asked.items():
            await self._serve(topic_set, requests)

    def _topic_set(self, request: MultiTopicDequeue) -> TopicSet:
        topic_sets = self._topic_sets.setdefault(request.key[0], {})
        topic_set = topic_sets.get(request.names)
        if topic_set is None:
            topic_set = topic_sets[request.names] = TopicSet(request.key[0], request.names)
        topic_set.used_at = asyncio.get_running_loop().time()
        return topic_set

    async def _serve(self, topic_set: TopicSet, requests: list[MultiTopicDequeue]) -> None:
        loop = asyncio.get_running_loop()
        wanted = sum(request.limit for request in requests)
        if topic_set.scanned_at is None:
            await self._scan(topic_set)
        rows, topics = await self._claim(topic_set, requests, wanted)
        if not rows and topic_set.scanned_at is not None and loop.time() - topic_set.scanned_at > self._poll_seconds:
            # A notification of another host may have been lost.
            await self._scan(topic_set)
            rows, topics = await self._claim(topic_set, requests, wanted)
        await self._hand_over(topic_set, requests, rows, topics)

    async def _scan(self, topic_set: TopicSet) -> None:
        """Find the topics with ready items in PostgreSQL."""
        loop = asyncio.get_running_loop()
        topic_set.scanned_at = loop.time()
        try:
            rows = await self._link.fetch(
                "topic_due", topic_set.namespace, sorted(topic_set.names) if topic_set.names else None
            )
        except BaseException:
            topic_set.scanned_at = None
            raise
        now = loop.time()
        for row in rows:
            topic_set.items_due((topic_set.namespace, row["name"]), now + row["seconds"], now)

    async def _claim(
        self, topic_set: TopicSet, requests: Sequence[MultiTopicDequeue], wanted: int
    ) -> tuple[list[list[Record]], dict[int, Topic]]:
        """Lease for the requests, in order; empty when no item is due."""
        starts = [0, *itertools.accumulate(request.limit for request in requests)][:-1]
        for _ in range(_MOST_TRIES):
            keys = topic_set.look(asyncio.get_running_loop().time())
            topics = {topic.id: topic for topic in (await self._catalog.find(keys)).values() if not topic.paused}
            if not topics:
                topic_set.found_empty(keys)
                return [], {}
            rows = await self.claim_rows(topics, wanted, starts, requests)
            seen = rows[0]["seen"]
            if seen < wanted:
                topic_set.found_empty(keys)
                await self._note_due(topic_set, list(topics.values()), rows[0]["at"])
            items: list[list[Record]] = [[] for _ in requests]
            for row in rows:
                if row["slot"] is not None:
                    items[row["slot"] - 1].append(row)
            if any(items):
                if is_cut(rows, self._most_bytes):
                    for request in requests:
                        request.again = True
                return items, topics
            if not seen:
                return [], {}
            # All that was seen was leased by others meanwhile.
        return [], {}

    async def claim_rows(
        self, topics: dict[int, Topic], wanted: int, starts: list[int], requests: Sequence[MultiTopicDequeue]
    ) -> list[Record]:
        return await self._link.fetch(
            "topic_claim_many",
            list(topics),
            wanted,
            starts,
            [request.lease_seconds for request in requests],
            [self._ids.uuid() for _ in requests],
            self._most_bytes,
        )

    async def _note_due(self, topic_set: TopicSet, topics: Sequence[Topic], since: datetime) -> None:
        """Note when items become due that were not due by then."""
        loop = asyncio.get_running_loop()
        by_id = {topic.id: topic.key for topic in topics}
        for row in await self._link.fetch("topic_next_due", list(by_id), [since] * len(by_id)):
            if row["seconds"] is not None:
                now = loop.time()
                # A millisecond later, as PostgreSQL's clock is finer than timers are.
                topic_set.items_due(by_id[row["topic_id"]], now + max(0.0, row["seconds"]) + 0.001, now)

    async def _hand_over(
        self,
        topic_set: TopicSet,
        requests: Sequence[MultiTopicDequeue],
        items: list[list[Record]],
        topics: dict[int, Topic],
    ) -> None:
        leased: Counter[int] = Counter()
        for request, rows in zip(requests, items or [[]] * len(requests), strict=True):
            rows.sort(key=service_order)
            leased.update(row["topic_id"] for row in rows)
            if rows and request.answer.done():
                self._tasks.spawn(self._give_back(rows, topics))
                continue
            if not rows and request.again and not request.expired and not request.answer.done():
                request.again = False
                self.batcher.submit(request)
                continue
            if not rows and request.wait and not request.expired and not self.waiting.closed:
                if not request.answer.done():
                    self.waiting.park(topic_set, request)
                    self._wake_when_due(topic_set)
                continue
            gone = await remove_leased(self._link, (row for row in rows if topics[row["topic_id"]].at_most_once))
            rows[:] = [row for row in rows if row["id"] not in gone]
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
        if topic_set.changed or topic_set.scanned_at is None:
            self.waiting.wake(topic_set)

    async def _give_back(self, rows: Sequence[Record], topics: dict[int, Topic]) -> None:
        """End the leases of items whose client disconnected."""
        refs = [ItemRef(row["id"], *topics[row["topic_id"]].key, row["lease_owner"]) for row in rows]
        try:
            await self._settler.release(refs)
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("%d undelivered items stay leased until expiry: %s", len(rows), error)

    def _wake_when_due(self, topic_set: TopicSet) -> None:
        if topic_set.next_at is not None:
            self.waiting.wake_at(topic_set, topic_set.next_at)

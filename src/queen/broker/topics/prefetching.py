"""Subclasses of the components of topics, for topics with prefetch buffers.

Optional: `Topics` imports this module and composes its components from it only if buffers are on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Final

import asyncpg

from queen.broker.answer_size import Answers
from queen.broker.topics.admin import TopicAdmin
from queen.broker.topics.batching import RequestBatcher
from queen.broker.topics.context import TopicContext
from queen.broker.topics.dequeue import Dequeue, Dequeuer, Heads, lease_seconds_of
from queen.broker.topics.multi_dequeue import MultiTopicDequeue, MultiTopicDequeuer
from queen.broker.topics.prefetch import (
    LEASE_SECONDS,
    SETTLED_SECONDS,
    NotBuffered,
    PrefetchBuffer,
    PrefetchBuffers,
    PrefetchRequest,
)
from queen.broker.topics.settle import LeaseExpiry, Place, Ref, Settler
from queen.concurrency import BackgroundTask, BackgroundTasks
from queen.errors import QueenError
from queen.log.topics import Topic, TopicCatalog, TopicKey
from queen.storage.database import Database, Record
from queen.wire.topics.items import Row

log = logging.getLogger(__name__)

_HOT: Final = 20
"""Served dequeues in a second that make a topic hot."""
_MOST_BUFFERS: Final = 200
_AGAIN_SECONDS: Final = 5.0


class Prefetcher:
    """Opens buffers for hot topics, and fills them in the background."""

    def __init__(self, buffers: PrefetchBuffers) -> None:
        self._buffers = buffers
        self._second = 0
        self._served: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._busy: set[int] = set()
        self._tasks = BackgroundTasks()
        self._closing = False

    def note(self, topic: Topic) -> None:
        """A dequeue was served by a claim in PostgreSQL."""
        now = asyncio.get_running_loop().time()
        if int(now) != self._second:
            self._second = int(now)
            self._served.clear()
            self._not_before = {id: at for id, at in self._not_before.items() if at > now}
        served = self._served[topic.id] = self._served.get(topic.id, 0) + 1
        if served >= _HOT and len(self._buffers.by_topic) < _MOST_BUFFERS and topic.id not in self._not_before:
            self._not_before[topic.id] = now + _AGAIN_SECONDS
            self._spawn(topic.id, self._open(topic))

    def refill(self, topic_id: int) -> None:
        """Items were taken: fill the buffer if it runs low."""
        buffer = self._buffers.by_topic.get(topic_id)
        if buffer is not None and buffer.depth <= self._buffers.size // 2 and not buffer.dry:
            self._spawn(topic_id, self._fill(buffer))

    def items_due(self, topic_id: int) -> None:
        """A topic has new items."""
        buffer = self._buffers.by_topic.get(topic_id)
        if buffer is not None:
            buffer.dry = False

    async def stop(self) -> None:
        self._closing = True
        await self._tasks.finish()

    async def _open(self, topic: Topic) -> None:
        if await self._buffers.open(topic):
            await self._fill(self._buffers.by_topic[topic.id])

    async def _fill(self, buffer: PrefetchBuffer) -> None:
        try:
            await self._buffers.fill(buffer)
        except NotBuffered:
            return
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("topic %s/%s: prefetch buffer not filled: %s", *buffer.topic.key, error)

    def _spawn(self, topic_id: int, work: Coroutine[None, None, None]) -> None:
        if topic_id in self._busy or self._closing:
            work.close()
            return
        self._busy.add(topic_id)
        task = self._tasks.spawn(work)
        task.add_done_callback(lambda _: self._busy.discard(topic_id))


_EVERY_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 5.0


class LeaseDaemon:
    """Once a second: renews the leases of buffers in use, closes expired ones, and writes handouts to items."""

    def __init__(self, database: Database, catalog: TopicCatalog, buffers: PrefetchBuffers) -> None:
        self._link = database.link()
        self._catalog = catalog
        self._buffers = buffers
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    async def run_once(self) -> None:
        idle = asyncio.get_running_loop().time() - _IDLE_SECONDS
        for topic_id, buffer in list(self._buffers.by_topic.items()):
            if buffer.used_at < idle:
                await self._buffers.leave(topic_id)
        tokens = [buffer.token for buffer in self._buffers.by_topic.values()]
        if tokens:
            await self._link.fetch("topic_ready_renew", tokens, LEASE_SECONDS)
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        for row in await self._link.fetch("topic_ready_expired"):
            topic = await self._catalog.one((row["namespace"], row["topic"])) if row["topic"] is not None else None
            if topic is not None:
                await self._buffers.recall(topic, row["token"], 0.0)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            if not self._catalog.used:
                # No topic is used here, so no dequeue waits for items in buffers of a dead server.
                continue
            try:
                await self.run_once()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("leases of prefetch buffers not renewed, next attempt in 1 s: %s", error)


class PrefetchingDequeuer(Dequeuer):
    """Serves topics with a buffer from it, each in a batcher of its own."""

    skips_buffered = True

    def __init__(self, context: TopicContext, heads: Heads, buffers: PrefetchBuffers) -> None:
        super().__init__(context, heads)
        self._buffers = buffers
        self._buffered_batchers: dict[TopicKey, RequestBatcher[Dequeue]] = {}
        self._prefetcher = Prefetcher(buffers)

    def items_due(self, key: TopicKey, seconds: float) -> None:
        topic = self._catalog.cached(key)
        if topic is not None:
            self._prefetcher.items_due(topic.id)
        super().items_due(key, seconds)

    def submit(self, request: Dequeue) -> None:
        topic = self._catalog.cached(request.key)
        if topic is None or topic.id not in self._buffers.by_topic:
            self.batcher.submit(request)
            return
        batcher = self._buffered_batchers.get(request.key)
        if batcher is None:
            batcher = self._buffered_batchers[request.key] = self.make_batcher(self._serve_buffered)
        batcher.submit(request)

    async def stop(self) -> None:
        self.waiting.stop()
        for batcher in self._buffered_batchers.values():
            await batcher.join()
        await super().stop()
        await self._prefetcher.stop()

    async def claim(self, requests: Sequence[Dequeue], topics: dict[TopicKey, Topic]) -> list[list[Record]]:
        items = await super().claim(requests, topics)
        for request, some in zip(requests, items, strict=True):
            if some:
                self._prefetcher.note(topics[request.key])
        return items

    async def answer(
        self, batch: Sequence[Dequeue], topics: dict[TopicKey, Topic], given: Mapping[int, Sequence[Row]]
    ) -> None:
        """Requests that were given nothing go to the buffer of their topic, if another worker has opened one."""
        served = {request.key for request in batch if given.get(id(request))}
        unserved = [
            topics[key]
            for key in {request.key for request in batch} - served
            if key in topics and not topics[key].paused
        ]
        buffered = await self._buffers.adopt(unserved) if unserved else set()
        for request in batch:
            if request.key in buffered:
                self.submit(request)
        await super().answer([request for request in batch if request.key not in buffered], topics, given)

    async def _serve_buffered(self, batch: list[Dequeue]) -> None:
        topic = await self._catalog.one(batch[0].key) if batch else None
        try:
            if topic is None or topic.paused:
                raise NotBuffered
            leases = [lease_seconds_of(request, topic) for request in batch]
            items, cut = await self._buffers.take(
                topic,
                [PrefetchRequest(self._ids.uuid(), one.limit, lease) for one, lease in zip(batch, leases, strict=True)],
            )
        except NotBuffered:
            for request in batch:
                self.batcher.submit(request)
            return
        topics = {topic.key: topic}
        for request in batch:
            request.again = cut
        await self.remove_unacknowledged(batch, topics, items)
        for some, lease in zip(items, leases, strict=True):
            if some:
                self._on_leased(lease)
        self._heads.note(topic.id, sum(map(len, items)))
        self._prefetcher.refill(topic.id)
        await super().answer(batch, topics, {id(request): some for request, some in zip(batch, items, strict=True)})

    async def end_leases(self, rows: Sequence[Row]) -> None:
        await self._buffers.settle_handouts({row["topic_id"] for row in rows}, [row["id"] for row in rows])
        await super().end_leases(rows)


class PrefetchingMultiDequeuer(MultiTopicDequeuer):
    """Closes the buffers of the topics it is asked for: their items have a place in the common order of service."""

    def __init__(
        self, context: TopicContext, heads: Heads, settler: Settler, poll_seconds: float, buffers: PrefetchBuffers
    ) -> None:
        super().__init__(context, heads, settler, poll_seconds)
        self._buffers = buffers

    async def claim_rows(
        self, topics: dict[int, Topic], wanted: int, starts: list[int], requests: Sequence[MultiTopicDequeue]
    ) -> list[Record]:
        await self._buffers.close(list(topics.values()))
        return await super().claim_rows(topics, wanted, starts, requests)


class PrefetchingSettler(Settler):
    """Writes the leases of items that were just handed out to their rows before they are changed."""

    def __init__(self, context: TopicContext, buffers: PrefetchBuffers) -> None:
        super().__init__(context)
        self._buffers = buffers

    async def places_to_change(self, refs: Sequence[Ref]) -> list[Place[Ref]]:
        places = await super().places_to_change(refs)
        if places:
            ids = [place.number for place in places]
            await self._buffers.settle_handouts({place.topic_id for place in places}, ids)
        return places


class PrefetchingExpiry(LeaseExpiry):
    """Sees leases of items that were handed out and are not written to their rows yet."""

    async def _search(self, since: datetime) -> None:
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        await super()._search(since)


class PrefetchingAdmin(TopicAdmin):
    """Closes the buffer of a topic before its items are removed."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        on_changed: Callable[[TopicKey], None],
        buffers: PrefetchBuffers,
        answers: Answers,
    ) -> None:
        super().__init__(database, catalog, on_changed, answers)
        self._buffers = buffers

    async def pause(self, key: TopicKey, paused: bool) -> bool:
        changed = await super().pause(key, paused)
        topic = await self._catalog.one(key)
        if topic is not None and topic.paused:
            await self._buffers.close([topic])
        return changed

    async def remove_items(self, topic: Topic, *, leased: bool) -> int:
        await self._buffers.close([topic])
        return await super().remove_items(topic, leased=leased)

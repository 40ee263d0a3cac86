"""Prefetch buffers (`TOPIC_READY_QUEUES=on`): items of hot topics leased ahead of the dequeues that will get them.

Optional: nothing else imports this module. `Topics` composes its parts from the classes at the end of it, which add to
their base classes what a topic with a buffer needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

import asyncpg

from queen.broker.topics.admin import TopicAdmin
from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.context import TopicContext
from queen.broker.topics.dequeue import Dequeue, Dequeuer, Heads, lease_seconds_of
from queen.broker.topics.multi_dequeue import MultiTopicDequeue, MultiTopicDequeuer
from queen.broker.topics.settle import LeaseExpiry, Place, Ref, Settler
from queen.concurrency import BackgroundTask, BackgroundTasks
from queen.errors import QueenError, RedisUnavailable
from queen.log.topics import Topic, TopicCatalog, TopicKey, lock_keys
from queen.redis.interfaces import TURN_SECONDS, FillTurn, FillTurnState, ReadyQueue
from queen.redis.memory import MemoryReadyQueue
from queen.storage.database import Database, Record
from queen.wire.ids import IdSource
from queen.wire.topic_items import ReadyItem, Row, add_payload, from_micros, render_ahead, to_micros

if TYPE_CHECKING:
    from queen.redis.link import RedisLink

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 6.0
"""How long a buffer lives whose lease is not renewed."""
SETTLED_SECONDS: Final = 3.0
"""Items handed out longer ago have their leases written to their rows."""
_BARRED_SECONDS: Final = 10.0
_LARGEST_COPIED: Final = 4096
_SHARED: Final = "shared:"
_OWN: Final = "own:"
_BUSY_SECONDS: Final = 0.002
_place = attrgetter("place")


class NotBuffered(Exception):
    """The topic has no buffer that can be used here: its items are leased from PostgreSQL."""


@dataclass(slots=True)
class PrefetchRequest:
    """What one dequeue asks for."""

    owner: str
    limit: int
    lease_seconds: float


@dataclass(slots=True)
class PrefetchBuffer:
    """The buffer of one topic, as this worker knows it."""

    topic: Topic
    token: str
    used_at: float
    depth: int = 0
    turn: int = 0
    dry: bool = False
    """The last fill found no more items in PostgreSQL."""


@dataclass(slots=True)
class PrefetchStats:
    fills: int = 0
    filled: int = 0
    handed_out: int = 0
    recalls: int = 0


class PrefetchBuffers:
    """Opens, fills and closes buffers, and hands out their items."""

    def __init__(
        self,
        database: Database,
        queue: ReadyQueue,
        ids: IdSource,
        *,
        shared: bool,
        size: int,
        on_freed: Callable[[Topic], None],
    ) -> None:
        """`shared`: other workers use the same buffers. `on_freed` is called with topics whose items became ready."""
        self._database = database
        self._queue = queue
        self._ids = ids
        self._shared = shared
        self._kind = _SHARED if shared else _OWN
        self.size = size
        self._on_freed = on_freed
        self._fetch = Links(database).fetch
        self.by_topic: dict[int, PrefetchBuffer] = {}
        self.stats = PrefetchStats()

    async def open(self, topic: Topic) -> bool:
        """Give a topic a buffer; False when it has one already, or cannot have one now."""
        token = self._kind + self._ids.uuid()
        try:
            async with self._database.transaction() as transaction:
                await transaction.fetch("topic_ready_short_wait")
                await transaction.fetch("topic_ready_lock")
                if not await transaction.fetch("topic_ready_open", topic.id, token, LEASE_SECONDS):
                    return False
                # Before the commit: a worker that saw the row and found no queue would close it as lost.
                await self._queue.open(topic.id, token)
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("topic %s/%s: prefetch buffer not opened: %s", *topic.key, error)
            return False
        self._add(topic, token)
        return True

    async def adopt(self, topics: Sequence[Topic]) -> set[TopicKey]:
        """Use the buffers that other workers opened for these topics, or close those that cannot be reached from here.

        Returns the topics that had one: their requests are to be submitted again.
        """
        rows = await self._fetch("topic_ready_of", [topic.id for topic in topics])
        by_id = {topic.id: topic for topic in topics}
        for row in rows:
            topic, token = by_id[row["topic_id"]], row["token"]
            known = self.by_topic.get(topic.id)
            same = known is not None and known.token == token
            ours = same or (self._shared and token.startswith(_SHARED))
            if not ours or not row["live"]:
                await self.recall(topic, token, _BARRED_SECONDS if not ours else 0.0)
            elif not same:
                self._add(topic, token)
        return {by_id[row["topic_id"]].key for row in rows}

    async def take(self, topic: Topic, asked: Sequence[PrefetchRequest]) -> list[list[ReadyItem]]:
        """Hand out the most urgent items. Raises `NotBuffered`."""
        buffer = self.by_topic.get(topic.id)
        if buffer is None:
            raise NotBuffered
        buffer.topic = topic
        buffer.used_at = asyncio.get_running_loop().time()
        try:
            return await self._take(buffer, asked)
        except RedisUnavailable:
            # What Redis will hold when it is available again is unknown: the items are leased from PostgreSQL.
            await self.recall(buffer.topic, buffer.token, 0.0)
            raise NotBuffered from None

    async def settle_handouts(self, topic_ids: Collection[int], item_ids: Sequence[int]) -> None:
        """Write the leases of handed-out items to their rows."""
        await self._fetch("topic_settle_handouts", 0.0, sorted(topic_ids), item_ids)

    async def fill(self, buffer: PrefetchBuffer) -> None:
        """Lease items ahead until the buffer is full. Raises `NotBuffered`."""
        turn = await self._begin(buffer, 0)
        rows = await self._prefetch(buffer, turn, self.size - turn.depth) if turn.depth < self.size else []
        await self._end(buffer, 0, rows)

    async def recall(self, topic: Topic, token: str, barred_seconds: float) -> None:
        """Close a buffer: its items are ready as before. The topic gets no other one for so many seconds."""
        buffer = self.by_topic.get(topic.id)
        if buffer is not None and buffer.token == token:
            del self.by_topic[topic.id]
        async with self._database.transaction() as transaction:
            if not await transaction.fetch("topic_ready_close", topic.id, token, barred_seconds):
                return
            await transaction.fetch("topic_settle_handouts", 0.0, [topic.id], None)
            (row,) = await transaction.fetch("topic_ready_free", lock_keys([topic.id]), topic.id)
        self.stats.recalls += 1
        if row["freed"]:
            self._on_freed(topic)

    async def leave(self, topic_id: int) -> None:
        """Stop using a buffer. Other workers may go on; without any, its lease expires."""
        buffer = self.by_topic.pop(topic_id, None)
        if buffer is not None and not self._shared:
            await self.recall(buffer.topic, buffer.token, 0.0)

    async def recall_all(self) -> None:
        """Close every buffer that is used here."""
        for buffer in list(self.by_topic.values()):
            try:
                await self.recall(buffer.topic, buffer.token, 0.0)
            except (QueenError, asyncpg.PostgresError) as error:
                log.warning("topic %s/%s: prefetch buffer left to expire: %s", *buffer.topic.key, error)

    async def close(self, topics: Sequence[Topic]) -> None:
        """Close the buffers of topics, whichever worker opened them: the caller needs their items in PostgreSQL."""
        by_id = {topic.id: topic for topic in topics}
        for row in await self._fetch("topic_ready_of", list(by_id)):
            await self.recall(by_id[row["topic_id"]], row["token"], _BARRED_SECONDS)

    def _add(self, topic: Topic, token: str) -> None:
        self.by_topic[topic.id] = PrefetchBuffer(topic, token, asyncio.get_running_loop().time())

    async def _take(self, buffer: PrefetchBuffer, asked: Sequence[PrefetchRequest]) -> list[list[ReadyItem]]:
        wanted = sum(one.limit for one in asked)
        turn = await self._begin(buffer, wanted)
        items = turn.items
        if turn.depth < wanted:
            # More is leased for the next dequeue, unless dequeues are so large that it would find too little anyway.
            ahead = self.size // 2 if wanted <= self.size // 2 else 0
            items = _merge(items, await self._prefetch(buffer, turn, wanted - turn.depth + ahead))
        if not items:
            await self._check(buffer)
            rows: list[Record] = []
        elif not (rows := await self._hand_out(buffer, turn, asked, items[:wanted], checked=True)):
            items = _merge(items, await self._prefetch(buffer, turn, wanted, before=items[:wanted][-1]))
            # At most as many as were asked for can come first, so these are the most urgent as of that statement.
            rows = await self._hand_out(buffer, turn, asked, items[:wanted], checked=False)
        await self._end(buffer, len(turn.items), items[wanted:])
        return await self._deal(buffer, asked, items[:wanted], rows)

    async def _begin(self, buffer: PrefetchBuffer, limit: int) -> FillTurn:
        deadline = asyncio.get_running_loop().time() + TURN_SECONDS + 1
        while True:
            turn = await self._queue.begin(buffer.topic.id, buffer.token, limit)
            if turn.state is FillTurnState.YOURS:
                buffer.turn = turn.number
                return turn
            if turn.state is FillTurnState.LOST or asyncio.get_running_loop().time() > deadline:
                await self._give_up(buffer)
            await asyncio.sleep(_BUSY_SECONDS)

    async def _end(self, buffer: PrefetchBuffer, taken: int, offered: Sequence[ReadyItem]) -> None:
        buffer.depth = await self._queue.end(buffer.topic.id, buffer.token, buffer.turn, taken, offered)

    def _next(self, buffer: PrefetchBuffer, turn: FillTurn) -> tuple[int, int]:
        """The number of the turn that PostgreSQL must have, and its next number."""
        now, buffer.turn = buffer.turn, turn.number + 1
        return now, buffer.turn

    async def _prefetch(
        self, buffer: PrefetchBuffer, turn: FillTurn, wanted: int, before: ReadyItem | None = None
    ) -> list[ReadyItem]:
        place = _moment(before) if before is not None else (None, None, None)
        rows = await self._fetch(
            "topic_prefetch", buffer.topic.id, buffer.token, wanted, *place, _LARGEST_COPIED, *self._next(buffer, turn)
        )
        if before is None:
            buffer.dry = len(rows) < wanted
        self.stats.fills += 1
        self.stats.filled += len(rows)
        return sorted((_ahead(row, buffer.topic) for row in rows), key=_place)

    async def _hand_out(
        self,
        buffer: PrefetchBuffer,
        turn: FillTurn,
        asked: Sequence[PrefetchRequest],
        items: Sequence[ReadyItem],
        *,
        checked: bool,
    ) -> list[Record]:
        """Returns nothing when items outside of the buffer come first."""
        counts = _shares(asked, len(items))
        given = [(one, count) for one, count in zip(asked, counts, strict=True) if count]
        rows = await self._fetch(
            "topic_hand_out",
            buffer.topic.id,
            buffer.token,
            *_moment(items[-1]),
            checked,
            [one.owner for one, _ in given],
            [one.lease_seconds for one, _ in given],
            [count for _, count in given],
            [item.id for item in items],
            *self._next(buffer, turn),
        )
        if rows[0]["overtaken"]:
            return []
        if rows[0]["owner"] is None:
            await self._give_up(buffer)
        return rows

    async def _check(self, buffer: PrefetchBuffer) -> None:
        """An empty buffer is an answer only while it is the current one."""
        rows = await self._fetch("topic_ready_of", [buffer.topic.id])
        if not any(row["token"] == buffer.token and row["turn"] == buffer.turn and row["live"] for row in rows):
            await self._give_up(buffer)

    async def _give_up(self, buffer: PrefetchBuffer) -> NoReturn:
        await self.recall(buffer.topic, buffer.token, 0.0)
        raise NotBuffered

    async def _deal(
        self,
        buffer: PrefetchBuffer,
        asked: Sequence[PrefetchRequest],
        items: Sequence[ReadyItem],
        rows: Sequence[Record],
    ) -> list[list[ReadyItem]]:
        """The leased items of each request, without those past their `ttl`."""
        leases = {row["owner"]: (row["leased_until"], row["handed_at"]) for row in rows}
        expired: list[ReadyItem] = []
        dealt: list[list[ReadyItem]] = []
        start = 0
        for one, count in zip(asked, _shares(asked, len(items)), strict=True):
            mine: list[ReadyItem] = []
            if count:
                until, at = leases[one.owner]
                now = to_micros(at)
            for item in items[start : start + count]:
                item.lease_owner, item.leased_until, item.updated_at = one.owner, until, at
                late = item.expires is not None and item.expires <= now
                (expired if late else mine).append(item)
            dealt.append(mine)
            start += count
        self.stats.handed_out += len(items)
        await self._add_payloads(dealt)
        if expired:
            expired.sort(key=attrgetter("id"))
            await self._fetch(
                "topic_ack",
                [item.id for item in expired],
                [item.topic_id for item in expired],
                [item.lease_owner for item in expired],
            )
        return dealt

    async def _add_payloads(self, dealt: list[list[ReadyItem]]) -> None:
        large = {item.id: item for items in dealt for item in items if not item.whole}
        if not large:
            return
        for row in await self._fetch("topic_payloads", list(large)):
            add_payload(large[row["id"]], row["payload"], row["is_json"])
        for items in dealt:
            items[:] = [item for item in items if item.whole]


def ready_queue(redis: RedisLink | None) -> ReadyQueue:
    """Where buffers keep their items: in Redis, or in the memory of this worker."""
    if redis is None:
        return MemoryReadyQueue()
    from queen.redis.stores import RedisReadyQueue

    return RedisReadyQueue(redis)


def _ahead(row: Record, topic: Topic) -> ReadyItem:
    expires_at = row["expires_at"]
    rendered, whole = render_ahead(row, topic.namespace, topic.name)
    return ReadyItem(
        row["id"],
        row["topic_id"],
        row["priority"],
        to_micros(row["deliver_after"]),
        to_micros(expires_at) if expires_at is not None else None,
        whole,
        rendered,
    )


def _moment(item: ReadyItem) -> tuple[int, datetime, int]:
    return item.priority, from_micros(item.due), item.id


def _merge(items: Sequence[ReadyItem], more: Sequence[ReadyItem]) -> list[ReadyItem]:
    return sorted([*items, *more], key=_place)


def _shares(asked: Sequence[PrefetchRequest], items: int) -> list[int]:
    """How many of the items each request gets, in order."""
    shares = []
    for one in asked:
        shares.append(min(one.limit, items))
        items -= shares[-1]
    return shares


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

    def fed(self, topic_id: int) -> None:
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

    def fed(self, key: TopicKey, seconds: float) -> None:
        topic = self._catalog.cached(key)
        if topic is not None:
            self._prefetcher.fed(topic.id)
        super().fed(key, seconds)

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
            items = await self._buffers.take(
                topic,
                [PrefetchRequest(self._ids.uuid(), one.limit, lease) for one, lease in zip(batch, leases, strict=True)],
            )
        except NotBuffered:
            for request in batch:
                self.batcher.submit(request)
            return
        topics = {topic.key: topic}
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
            ids = [place.ref.number for place in places]
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
    ) -> None:
        super().__init__(database, catalog, on_changed)
        self._buffers = buffers

    async def pause(self, key: TopicKey, paused: bool) -> bool:
        changed = await super().pause(key, paused)
        topic = await self._catalog.one(key)
        if topic is not None and topic.paused:
            await self._buffers.close([topic])
        return changed

    async def remove_items(self, topic: Topic) -> int:
        await self._buffers.close([topic])
        return await super().remove_items(topic)

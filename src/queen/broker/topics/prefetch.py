"""Prefetch buffers (`TOPIC_READY_QUEUES=on`): items of hot topics leased ahead of the dequeues that will get them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

import asyncpg

from queen.broker.topics.batching import Links
from queen.errors import QueenError, RedisUnavailable
from queen.log.topics import Topic, TopicKey, lock_keys
from queen.redis.interfaces import TURN_SECONDS, FillTurn, FillTurnState, ReadyQueue
from queen.redis.memory import MemoryReadyQueue
from queen.storage.database import Database, Record
from queen.wire.ids import IdSource
from queen.wire.topics.items import ReadyItem, add_payload, from_micros, render_ahead, to_micros

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
    """The parameters of one dequeue."""

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
        most_bytes: int,
        on_freed: Callable[[Topic], None],
    ) -> None:
        """`shared`: other workers use the same buffers. `on_freed` is called with topics whose items became ready.

        `most_bytes` are handed out together, unless the first item has more, and as many are kept in memory.
        """
        self._database = database
        self._queue = queue
        self._ids = ids
        self._shared = shared
        self._kind = _SHARED if shared else _OWN
        self.size = size
        self._most_bytes = most_bytes
        self._filling = 0
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

    async def take(self, topic: Topic, asked: Sequence[PrefetchRequest]) -> tuple[list[list[ReadyItem]], bool]:
        """Hand out the most urgent items, and whether there are more that did not fit. Raises `NotBuffered`."""
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
        count = self._room(self.size - turn.depth)
        await self._end(buffer, 0, await self._prefetch(buffer, turn, count) if count > 0 else [])

    async def recall(self, topic: Topic, token: str, barred_seconds: float) -> None:
        """Close a buffer: its items are ready as before. The topic gets no other one for `barred_seconds`."""
        buffer = self.by_topic.get(topic.id)
        if buffer is not None and buffer.token == token:
            del self.by_topic[topic.id]
        self._queue.drop(topic.id, token)
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

    async def _take(
        self, buffer: PrefetchBuffer, asked: Sequence[PrefetchRequest]
    ) -> tuple[list[list[ReadyItem]], bool]:
        wanted = sum(one.limit for one in asked)
        turn = await self._begin(buffer, wanted)
        items = turn.items
        if turn.depth < wanted:
            # More is leased for the next dequeue, unless dequeues are so large that it would find too little anyway.
            ahead = self._room(self.size // 2) if wanted <= self.size // 2 else 0
            items = _merge(items, await self._prefetch(buffer, turn, wanted - turn.depth + ahead))
        given = self._first(items, wanted)
        if not items:
            await self._check(buffer)
            rows: list[Record] = []
        elif not (rows := await self._hand_out(buffer, turn, asked, given, checked=True)):
            items = _merge(items, await self._prefetch(buffer, turn, wanted, before=given[-1]))
            # At most as many as were asked for can come first, so these are the most urgent as of that statement.
            given = self._first(items, wanted)
            rows = await self._hand_out(buffer, turn, asked, given, checked=False)
        await self._end(buffer, len(turn.items), items[len(given) :])
        return await self._deal(asked, given, rows), len(given) < min(wanted, len(items))

    def _first(self, items: Sequence[ReadyItem], wanted: int) -> Sequence[ReadyItem]:
        """As many of the first items as were asked for, and fit in memory with their payloads; at least one."""
        left = self._most_bytes
        for count, item in enumerate(items[:wanted]):
            left -= item.size
            if left < 0 and count:
                return items[:count]
        return items[:wanted]

    def _room(self, count: int) -> int:
        """How many of `count` items can be leased ahead, as far as there is memory for them."""
        return min(count, (self._most_bytes - self._queue.nbytes - self._filling) // (2 * _LARGEST_COPIED))

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
        filling = wanted * 2 * _LARGEST_COPIED
        self._filling += filling
        try:
            rows = await self._fetch(
                "topic_prefetch",
                buffer.topic.id,
                buffer.token,
                wanted,
                *place,
                _LARGEST_COPIED,
                *self._next(buffer, turn),
            )
        finally:
            self._filling -= filling
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
        self, asked: Sequence[PrefetchRequest], items: Sequence[ReadyItem], rows: Sequence[Record]
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
            add_payload(large[row["id"]], row["payload"], row["is_json"], row["metadata"])
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
        nbytes=row["nbytes"],
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

"""The prefetcher: gives hot topics ready queues, and keeps these from running low."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Final, NoReturn

import asyncpg

from queen.broker.topics.batching import Links
from queen.broker.topics.settle import SETTLED_SECONDS
from queen.concurrency import BackgroundTask, BackgroundTasks
from queen.errors import QueenError, RedisUnavailable
from queen.log.topics import Topic, TopicCatalog, TopicKey, lock_keys
from queen.redis.interfaces import TURN_SECONDS, FillTurn, FillTurnState, ReadyQueue
from queen.storage.database import Database, Record
from queen.wire.ids import IdSource
from queen.wire.topic_items import ReadyItem, add_payload, from_micros, render_ahead, to_micros

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 6.0
"""How long the lease of a ready queue lasts that nobody renews."""
_BARRED_SECONDS: Final = 10.0
_LARGEST_COPIED: Final = 4096
_SHARED: Final = "shared:"
_OWN: Final = "own:"
_BUSY_SECONDS: Final = 0.002
_place = attrgetter("place")


class NotReady(Exception):
    """The topic has no ready queue that can be used here: its items are to be leased one by one."""


@dataclass(slots=True)
class PrefetchRequest:
    """What one dequeue wants."""

    owner: str
    limit: int
    lease_seconds: float


@dataclass(slots=True)
class Waiter:
    """A topic that is served from a ready queue here."""

    topic: Topic
    token: str
    used_at: float
    depth: int = 0
    turn: int = 0
    dry: bool = False
    """PostgreSQL had no more when last asked."""


@dataclass(slots=True)
class ReadyStats:
    fills: int = 0
    filled: int = 0
    handed_out: int = 0
    recalls: int = 0


class PrefetchBuffer:
    """Hands out items of ready queues, and fills these."""

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
        """`shared`: others use the same queue. `on_freed` is told of topics whose items are ready again."""
        self._database = database
        self._queue = queue
        self._ids = ids
        self._shared = shared
        self._kind = _SHARED if shared else _OWN
        self.size = size
        self._on_freed = on_freed
        self._fetch = Links(database).fetch
        self.seats: dict[int, Waiter] = {}
        self.stats = ReadyStats()

    def serves(self, topic_id: int) -> bool:
        return topic_id in self.seats

    async def open(self, topic: Topic) -> bool:
        """Give a topic a ready queue; False when it has one already, or cannot have one now."""
        token = self._kind + self._ids.uuid()
        try:
            async with self._database.transaction() as transaction:
                await transaction.fetch("topic_ready_patience")
                await transaction.fetch("topic_ready_lock")
                if not await transaction.fetch("topic_ready_open", topic.id, token, LEASE_SECONDS):
                    return False
                # Before anybody can know of it, or they would find nothing there and take it for lost.
                await self._queue.open(topic.id, token)
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("topic %s cannot have a ready queue now: %s", topic.key, error)
            return False
        self._seat(topic, token)
        return True

    async def adopt(self, topics: Sequence[Topic]) -> set[TopicKey]:
        """Take part in the ready queues that these topics may have, or close those that cannot be reached from here.

        Returns the topics that had one: they are to be asked again.
        """
        rows = await self._fetch("topic_ready_of", [topic.id for topic in topics])
        by_id = {topic.id: topic for topic in topics}
        for row in rows:
            topic, token = by_id[row["topic_id"]], row["token"]
            known = self.seats.get(topic.id)
            same = known is not None and known.token == token
            ours = same or (self._shared and token.startswith(_SHARED))
            if not ours or not row["live"]:
                await self.recall(topic, token, _BARRED_SECONDS if not ours else 0.0)
            elif not same:
                self._seat(topic, token)
        return {by_id[row["topic_id"]].key for row in rows}

    async def take(self, topic: Topic, asked: Sequence[PrefetchRequest]) -> list[list[ReadyItem]]:
        """Hand out the most urgent items. Raises `NotReady`."""
        seat = self.seats.get(topic.id)
        if seat is None:
            raise NotReady
        seat.topic = topic
        seat.used_at = asyncio.get_running_loop().time()
        try:
            return await self._take(seat, asked)
        except RedisUnavailable:
            # What is in Redis may be there or not when it comes back: PostgreSQL goes on alone.
            await self.recall(seat.topic, seat.token, 0.0)
            raise NotReady from None

    async def fill(self, seat: Waiter) -> None:
        """Lease items ahead until the queue is full. Raises `NotReady`."""
        turn = await self._begin(seat, 0)
        rows = await self._prefetch(seat, turn, self.size - turn.depth) if turn.depth < self.size else []
        await self._end(seat, turn, 0, rows)

    async def recall(self, topic: Topic, token: str, barred_seconds: float) -> None:
        """Close a ready queue: what is in it is ready as before, and it is led into no other for so many seconds."""
        seat = self.seats.get(topic.id)
        if seat is not None and seat.token == token:
            del self.seats[topic.id]
        async with self._database.transaction() as transaction:
            if not await transaction.fetch("topic_ready_close", topic.id, token, barred_seconds):
                return
            await transaction.fetch("topic_settle_handouts", 0.0, [topic.id], None)
            (row,) = await transaction.fetch("topic_ready_free", lock_keys([topic.id]), topic.id)
        self.stats.recalls += 1
        if row["freed"]:
            self._on_freed(topic)

    async def leave(self, topic_id: int) -> None:
        """A queue is not used here any more. Others may use it still; if nobody does, its lease lapses."""
        seat = self.seats.pop(topic_id, None)
        if seat is not None and not self._shared:
            await self.recall(seat.topic, seat.token, 0.0)

    async def recall_all(self) -> None:
        """Close every queue that is used here."""
        for seat in list(self.seats.values()):
            try:
                await self.recall(seat.topic, seat.token, 0.0)
            except (QueenError, asyncpg.PostgresError) as error:
                log.warning("the ready queue of %s has to lapse: %s", seat.topic.key, error)

    async def close(self, topics: Sequence[Topic]) -> None:
        """Close the queues of topics, wherever they are, for whoever needs their items in PostgreSQL."""
        by_id = {topic.id: topic for topic in topics}
        for row in await self._fetch("topic_ready_of", list(by_id)):
            await self.recall(by_id[row["topic_id"]], row["token"], _BARRED_SECONDS)

    def _seat(self, topic: Topic, token: str) -> None:
        self.seats[topic.id] = Waiter(topic, token, asyncio.get_running_loop().time())

    async def _take(self, seat: Waiter, asked: Sequence[PrefetchRequest]) -> list[list[ReadyItem]]:
        wanted = sum(one.limit for one in asked)
        turn = await self._begin(seat, wanted)
        items = turn.items
        if turn.depth < wanted:
            # Some more are leased for the next dequeue, unless dequeues are so large that it would find too few anyway.
            ahead = self.size // 2 if wanted <= self.size // 2 else 0
            items = _merge(items, await self._prefetch(seat, turn, wanted - turn.depth + ahead))
        if not items:
            await self._check(seat)
            rows: list[Record] = []
        elif not (rows := await self._hand_out(seat, turn, asked, items[:wanted], checked=True)):
            items = _merge(items, await self._prefetch(seat, turn, wanted, before=items[:wanted][-1]))
            # No more than were asked for can come first, so that these are the right ones, as of that statement.
            rows = await self._hand_out(seat, turn, asked, items[:wanted], checked=False)
        await self._end(seat, turn, len(turn.items), items[wanted:])
        return await self._deal(seat, asked, items[:wanted], rows)

    async def _begin(self, seat: Waiter, limit: int) -> FillTurn:
        deadline = asyncio.get_running_loop().time() + TURN_SECONDS + 1
        while True:
            turn = await self._queue.begin(seat.topic.id, seat.token, limit)
            if turn.state is FillTurnState.YOURS:
                seat.turn = turn.number
                return turn
            if turn.state is FillTurnState.LOST or asyncio.get_running_loop().time() > deadline:
                await self._give_up(seat)
            await asyncio.sleep(_BUSY_SECONDS)

    async def _end(self, seat: Waiter, turn: FillTurn, taken: int, offered: Sequence[ReadyItem]) -> None:
        seat.depth = await self._queue.end(seat.topic.id, seat.token, seat.turn, taken, offered)

    def _next(self, seat: Waiter, turn: FillTurn) -> tuple[int, int]:
        """The number that PostgreSQL is to have of this turn, and will have once something was done in it."""
        now, seat.turn = seat.turn, turn.number + 1
        return now, seat.turn

    async def _prefetch(
        self, seat: Waiter, turn: FillTurn, wanted: int, before: ReadyItem | None = None
    ) -> list[ReadyItem]:
        place = _moment(before) if before is not None else (None, None, None)
        rows = await self._fetch(
            "topic_prefetch", seat.topic.id, seat.token, wanted, *place, _LARGEST_COPIED, *self._next(seat, turn)
        )
        if before is None:
            seat.dry = len(rows) < wanted
        self.stats.fills += 1
        self.stats.filled += len(rows)
        return sorted((_ahead(row, seat.topic) for row in rows), key=_place)

    async def _hand_out(
        self,
        seat: Waiter,
        turn: FillTurn,
        asked: Sequence[PrefetchRequest],
        items: Sequence[ReadyItem],
        *,
        checked: bool,
    ) -> list[Record]:
        """Gives nothing when items outside of the queue come first."""
        counts = _shares(asked, len(items))
        given = [(one, count) for one, count in zip(asked, counts, strict=True) if count]
        rows = await self._fetch(
            "topic_hand_out",
            seat.topic.id,
            seat.token,
            *_moment(items[-1]),
            checked,
            [one.owner for one, _ in given],
            [one.lease_seconds for one, _ in given],
            [count for _, count in given],
            [item.id for item in items],
            *self._next(seat, turn),
        )
        if rows[0]["overtaken"]:
            return []
        if rows[0]["owner"] is None:
            await self._give_up(seat)
        return rows

    async def _check(self, seat: Waiter) -> None:
        """That nothing was found means something only while the queue is this one."""
        rows = await self._fetch("topic_ready_of", [seat.topic.id])
        if not any(row["token"] == seat.token and row["turn"] == seat.turn and row["live"] for row in rows):
            await self._give_up(seat)

    async def _give_up(self, seat: Waiter) -> NoReturn:
        await self.recall(seat.topic, seat.token, 0.0)
        raise NotReady

    async def _deal(
        self, seat: Waiter, asked: Sequence[PrefetchRequest], items: Sequence[ReadyItem], rows: Sequence[Record]
    ) -> list[list[ReadyItem]]:
        """The items for each who asked, as leased; without those that waited too long."""
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
        await self._add_payloads(seat, dealt)
        if expired:
            expired.sort(key=attrgetter("id"))
            await self._fetch(
                "topic_ack",
                [item.id for item in expired],
                [item.topic_id for item in expired],
                [item.lease_owner for item in expired],
            )
        return dealt

    async def _add_payloads(self, seat: Waiter, dealt: list[list[ReadyItem]]) -> None:
        large = {item.id: item for items in dealt for item in items if not item.whole}
        if not large:
            return
        for row in await self._fetch("topic_payloads", list(large)):
            add_payload(large[row["id"]], row["payload"], row["is_json"])
        for items in dealt:
            items[:] = [item for item in items if item.whole]


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
    """How many of the items each gets; who asked first is served first."""
    shares = []
    for one in asked:
        shares.append(min(one.limit, items))
        items -= shares[-1]
    return shares


_HOT: Final = 20
"""Dequeues with something to give, in a second, that make a topic hot."""
_MOST_SEATS: Final = 200
_AGAIN_SECONDS: Final = 5.0


class Prefetcher:
    """Watches dequeues, and fills ready queues in the background."""

    def __init__(self, desk: PrefetchBuffer, *, enabled: bool) -> None:
        self._desk = desk
        self._enabled = enabled
        self._second = 0
        self._served: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._busy: set[int] = set()
        self._errands = BackgroundTasks()
        self._closing = False

    def note(self, topic: Topic) -> None:
        """A dequeue of a topic was given items that were leased one by one."""
        if not self._enabled:
            return
        now = asyncio.get_running_loop().time()
        if int(now) != self._second:
            self._second = int(now)
            self._served.clear()
            self._not_before = {id: at for id, at in self._not_before.items() if at > now}
        served = self._served[topic.id] = self._served.get(topic.id, 0) + 1
        if served >= _HOT and len(self._desk.seats) < _MOST_SEATS and topic.id not in self._not_before:
            self._not_before[topic.id] = now + _AGAIN_SECONDS
            self._spawn(topic.id, self._open(topic))

    def look(self, topic_id: int) -> None:
        """Something was taken from a ready queue, or is there to fill it."""
        seat = self._desk.seats.get(topic_id)
        if seat is not None and seat.depth <= self._desk.size // 2 and not seat.dry:
            self._spawn(topic_id, self._fill(seat))

    def fed(self, topic_id: int) -> None:
        """A topic has new items."""
        seat = self._desk.seats.get(topic_id)
        if seat is not None:
            seat.dry = False

    async def stop(self) -> None:
        self._closing = True
        await self._errands.finish()

    async def _open(self, topic: Topic) -> None:
        if await self._desk.open(topic):
            await self._fill(self._desk.seats[topic.id])

    async def _fill(self, seat: Waiter) -> None:
        try:
            await self._desk.fill(seat)
        except NotReady:
            return
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("the ready queue of %s could not be filled: %s", seat.topic.key, error)

    def _spawn(self, topic_id: int, work: Coroutine[None, None, None]) -> None:
        if topic_id in self._busy or self._closing:
            work.close()
            return
        self._busy.add(topic_id)
        task = self._errands.spawn(work)
        task.add_done_callback(lambda _: self._busy.discard(topic_id))


_EVERY_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 5.0


class LeaseDaemon:
    """Once a second: renews the leases of queues in use, ends those nobody renewed, and writes handouts to items."""

    def __init__(self, database: Database, catalog: TopicCatalog, desk: PrefetchBuffer) -> None:
        self._link = database.link()
        self._catalog = catalog
        self._desk = desk
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    async def run_once(self) -> None:
        idle = asyncio.get_running_loop().time() - _IDLE_SECONDS
        for topic_id, seat in list(self._desk.seats.items()):
            if seat.used_at < idle:
                await self._desk.leave(topic_id)
        tokens = [seat.token for seat in self._desk.seats.values()]
        if tokens:
            await self._link.fetch("topic_ready_renew", tokens, LEASE_SECONDS)
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        for row in await self._link.fetch("topic_ready_lapsed"):
            topic = await self._catalog.one((row["namespace"], row["topic"])) if row["topic"] is not None else None
            if topic is not None:
                await self._desk.recall(topic, row["token"], 0.0)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            if not self._catalog.used:
                # Where nobody uses topics, nobody waits for what a dead server has left.
                continue
            try:
                await self.run_once()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("leases of ready queues could not be looked after; tried again in a second: %s", error)

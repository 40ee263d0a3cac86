"""Storing what a log holds: its records become items in PostgreSQL, in one transaction with how far it is stored."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import asyncpg
import msgspec

from queen.broker.topics.buffer import ServerTime, ticks
from queen.broker.topics.enqueue import OnFed
from queen.errors import QueenError
from queen.log.topics import TopicCatalog, TopicKey, lock_keys
from queen.spool.quarantine import FailedRecords
from queen.spool.record import Record
from queen.storage.database import Database
from queen.storage.shard_setup import ELSEWHERE
from queen.wire.topic_wal import WalBatch, WalItem, decode_batch, encode_batch

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5

SendOn: TypeAlias = Callable[[TopicKey, Record], Awaitable[bool]]
"""Told of a topic and of a record with one item of it; says whether that is stored elsewhere now."""


class Moved(QueenError):
    """Somebody else has stored something of the same file, or this process has and did not hear of it."""


class _TopicGone(QueenError):
    """A topic was deleted since it was looked up; nothing was stored."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is stored of a file of some log: its bytes from where it was stored up to on."""

    file_id: uuid.UUID
    since: int
    upto: int


class WalStore:
    """Stores records of logs. Whoever uses it has it for itself: it does one thing after the other."""

    def __init__(self, database: Database, catalog: TopicCatalog, failed: FailedRecords, on_fed: OnFed) -> None:
        """`failed` keeps what PostgreSQL refuses."""
        self._link = database.link()
        self._catalog = catalog
        self._failed = failed
        self._on_fed = on_fed
        self._time = ServerTime()
        self._refused = 0
        self.send_on: SendOn | None = None
        """With several shards: stores an item on the shard that its topic has moved to."""

    async def store(self, stretches: Sequence[Stretch], records: Sequence[Record]) -> int:
        """Store records, in order. What PostgreSQL refuses is set aside; gives how many items that were.

        Raises `Moved`: then none was stored.
        """
        if not self._time.known:
            await self._ask_time()
        batches, unreadable = _read(records)
        for attempt in range(_ATTEMPTS):
            self._refused = len(unreadable)
            try:
                async with self._link.transaction():
                    await self._advance(stretches)
                    fed = await self._store_batches(batches) if batches else {}
                    for record in unreadable:
                        await asyncio.to_thread(self._failed.add, record, "it cannot be read by this version")
                break
            except (*_RETRIED, _TopicGone):
                # Nothing of the attempt is left.
                if attempt == _ATTEMPTS - 1:
                    raise
        self._on_fed(list(fed.items()))
        return self._refused

    async def _ask_time(self) -> None:
        # The first of them may have to connect, and says little.
        for _ in range(2):
            sent = ticks()
            (row,) = await self._link.fetch("topic_clock")
            self._time.learn(row["at"], sent, ticks())

    async def _advance(self, stretches: Sequence[Stretch]) -> None:
        """Claim what is stored in this transaction. Who stored it in another has claimed it there."""
        rows = await self._link.fetch(
            "spool_advance_from",
            [stretch.file_id for stretch in stretches],
            [stretch.since for stretch in stretches],
            [stretch.upto for stretch in stretches],
        )
        if len(rows) < len(stretches):
            raise Moved("somebody else has stored some of them")

    async def _store_batches(self, batches: Sequence[_Batch]) -> dict[TopicKey, float]:
        try:
            async with self._link.transaction():
                return await self._store_items([(batch, batch.items) for batch in batches])
        except _RETRIED:
            raise
        except asyncpg.PostgresError:
            return await self._store_piecemeal(batches)

    async def _store_piecemeal(self, batches: Sequence[_Batch]) -> dict[TopicKey, float]:
        """One of the items is refused: find out which, in halves."""
        fed: dict[TopicKey, float] = {}
        for batch in batches:
            refused: list[tuple[WalItem, str]] = []
            waiting = [batch.items]
            while waiting:
                some = waiting.pop()
                try:
                    async with self._link.transaction():
                        for key, seconds in (await self._store_items([(batch, some)])).items():
                            fed[key] = min(seconds, fed.get(key, seconds))
                except _RETRIED:
                    raise
                except asyncpg.PostgresError as error:
                    if len(some) == 1:
                        if not await self._is_elsewhere(batch, some[0], error):
                            refused.append((some[0], str(error)))
                        continue
                    middle = len(some) // 2
                    waiting += [some[middle:], some[:middle]]
            # Before the commit: a crash now sets them aside again, under the same names.
            for item, reason in refused:
                await asyncio.to_thread(self._failed.add, batch.excerpt(item), reason)
            self._refused += len(refused)
        return fed

    async def _is_elsewhere(self, batch: _Batch, item: WalItem, error: asyncpg.PostgresError) -> bool:
        """Whether an item that was refused is in PostgreSQL all the same, here or on another shard."""
        if isinstance(error, asyncpg.UniqueViolationError):
            # It was flushed before its file was put back, from a copy perhaps.
            return True
        if self.send_on is None or error.sqlstate != ELSEWHERE:
            return False
        key = batch.topics[item.topic]
        try:
            return await self.send_on(key, batch.excerpt(item))
        except (QueenError, asyncpg.PostgresError) as refused:
            log.warning("an item of topic %s/%s cannot be sent on to its shard now: %s", *key, refused)
            return False

    async def _store_items(self, parts: Sequence[tuple[_Batch, Sequence[WalItem]]]) -> dict[TopicKey, float]:
        """Store items of batches; gives in how many seconds the first of each topic is due."""
        keys = {batch.topics[place] for batch, some in parts for place in {item.topic for item in some}}
        topics = await self._catalog.ensure(keys)
        if len(topics) < len(keys):
            raise _TopicGone(_GONE)
        ids = {topic.id for topic in topics.values()}
        homes = [[topics[key].id if key in topics else 0 for key in batch.topics] for batch, _ in parts]
        accepted = [batch.accepted(self._time) for batch, _ in parts]
        items = [item for _, some in parts for item in some]
        sent = ticks()
        (row,) = await self._link.fetch(
            "topic_flush",
            lock_keys(ids),
            list(ids),
            accepted,
            [item.id for item in items],
            [home[item.topic] for home, (_, some) in zip(homes, parts, strict=True) for item in some],
            [item.priority for item in items],
            _column([item.deliver_after for item in items]),
            _column([item.delay for item in items]),
            _column([item.ttl for item in items]),
            [place for place, (_, some) in enumerate(parts, 1) for _ in some],
            [item.is_json for item in items],
            _column([item.metadata for item in items]),
            [item.payload for item in items],
        )
        self._time.learn(row["at"], sent, ticks())
        if not row["there"]:
            for key in topics:
                self._catalog.forget(key)
            raise _TopicGone(_GONE)
        fed: dict[TopicKey, float] = {}
        for at, (batch, some) in zip(accepted, parts, strict=True):
            for item in some:
                key, seconds = batch.topics[item.topic], _wait(item, at, row["at"])
                if seconds < fed.get(key, math.inf):
                    fed[key] = seconds
        return fed


_ITEMS: Final = uuid.UUID("5175656e-0000-4000-8000-746f70696373")
_GONE: Final = "topics are being deleted while items for them are flushed"
_RETRIED: Final = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class _Batch:
    """A record of the log, read."""

    __slots__ = ("_content", "_record", "items", "topics")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._content: WalBatch = decode_batch(record.sealed)
        self.items = self._content.items
        self.topics: list[TopicKey] = self._content.topics

    def accepted(self, time: ServerTime) -> float:
        return time.at(self._content.boot, self._content.ticks, self._record.at)

    def excerpt(self, item: WalItem) -> Record:
        """A record of one of the items, which always has the same name."""
        content = encode_batch(msgspec.structs.replace(self._content, items=[item]))
        name = uuid.uuid5(_ITEMS, str(item.id))
        return msgspec.structs.replace(self._record, block=name.bytes, count=1, sealed=content)


def is_readable(record: Record) -> bool:
    """Whether this version knows what a record says."""
    return bool(_read([record])[0])


def _read(records: Sequence[Record]) -> tuple[list[_Batch], list[Record]]:
    """The batches in records, and records that hold none, from a newer version perhaps."""
    batches: list[_Batch] = []
    unreadable: list[Record] = []
    for record in records:
        try:
            batches.append(_Batch(record))
        except msgspec.DecodeError:
            unreadable.append(record)
    return batches, unreadable


def _column(values: list[Any]) -> list[Any]:
    """What PostgreSQL is given for a column: nothing where there is nothing, for it makes nulls of what is missing."""
    return values if any(value is not None for value in values) else []


def _wait(item: WalItem, accepted: float, now: float) -> float:
    """In how many seconds an item is due."""
    if item.deliver_after is None and item.delay is None:
        return 0.0
    due = item.deliver_after.timestamp() if item.deliver_after is not None else accepted + (item.delay or 0.0)
    return max(0.0, due - now)

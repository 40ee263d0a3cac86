"""Pushing: requests are gathered, their messages become segments, one statement stores them all or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

import asyncpg

from queen.broker.append import Appender
from queen.broker.catalog import Catalog, Partition
from queen.broker.dedup import Fetcher
from queen.broker.fusion import Fusion
from queen.broker.lots import Lot, message_id_in
from queen.errors import DatabaseAway, QueenError
from queen.storage.database import Database, Link
from queen.wire.ids import IdBlock, IdSource
from queen.wire.push import PushItem

_LARGEST_BATCH_BYTES = 4 << 20
_RETRY_SECONDS = 2.0

Target: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class Part:
    """The items of one request that go to one partition, and where in the request they stand (None: all of it)."""

    target: Target
    items: list[PushItem]
    positions: list[int] | None


@dataclass(slots=True, eq=False)
class Push:
    """One request: its items by the partition they go to, and the future of its JSON answer."""

    parts: list[Part]
    count: int
    nbytes: int
    subject: str | None
    answer: asyncio.Future[bytes]
    blocks: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StoredPush:
    """What a transaction pushed: id and partition of each message, in order."""

    messages: list[tuple[str, Partition]]
    lots: list[Lot]
    times: list[datetime]


@dataclass(slots=True, eq=False)
class _TransactionSender:
    subject: str | None
    blocks: set[bytes] = field(default_factory=set)


class DuplicateInTransaction(QueenError):
    """A transaction pushes a transaction id that its partition has already."""


class Pusher:
    """Stores what is pushed to one shard, in the order it arrived."""

    def __init__(self, database: Database, catalog: Catalog, appender: Appender, ids: IdSource) -> None:
        self._link: Link = database.link()
        self._catalog = catalog
        self._appender = appender
        self._ids = ids
        self.fusion: Fusion[Push] = Fusion(
            self._run, _fail, weigh=lambda push: push.nbytes + 512, limit=_LARGEST_BATCH_BYTES
        )

    def push(self, items: list[PushItem], nbytes: int, subject: str | None = None) -> asyncio.Future[bytes]:
        """Store the items (at least one); the future gives the JSON array that answers the request."""
        self._name_nameless(items)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.fusion.submit(Push(_by_target(items), len(items), nbytes, subject, answer))
        return answer

    async def prepare(self, items: Sequence[PushItem]) -> None:
        """Before a transaction that stores the items: make their partitions, learn their ids."""
        await self._catalog.ensure_partitions({(item.queue, item.partition) for item in items})

    async def store_in(self, transaction: Fetcher, items: list[PushItem], subject: str | None) -> StoredPush:
        """Store the items inside a transaction; `settle` when it has committed. A duplicate refuses them all."""
        if not items:
            return StoredPush([], [], [])
        self._name_nameless(items)
        sender = _TransactionSender(subject)
        parts = _by_target(items)
        lots = self._lots([(sender, part) for part in parts])
        await self._appender.meet(transaction, lots)
        times = await self._appender.append_locked(transaction, lots)
        if times is None:
            raise QueenError("a queue of the transaction was deleted meanwhile; try again")
        messages: list[tuple[str, Partition] | None] = [None] * len(items)
        by_target = {(lot.queue.name, lot.partition.name): lot for lot in lots}
        for part in parts:
            lot = by_target[part.target]
            for position, result in zip(part.positions or range(len(items)), lot.results, strict=True):
                _check_stored(result)
                messages[position] = (message_id_in(result).decode(), lot.partition)
        return StoredPush([message for message in messages if message is not None], lots, times)

    def settle(self, stored: StoredPush) -> None:
        """The transaction that stored them has committed."""
        self._appender.settle(stored.lots, stored.times)

    def _name_nameless(self, items: list[PushItem]) -> None:
        """Give an id to items that came without, before any attempt, so that a retry recognises them."""
        block: IdBlock | None = None
        for index, item in enumerate(items):
            if not item.transaction_id:
                block = block or self._ids.block()
                item.transaction_id = block.text(index)

    async def _run(self, batch: list[Push]) -> None:
        """Store a batch; when PostgreSQL refuses it, each request alone, so that only the guilty one fails."""
        try:
            await self._store_persistently(batch)
        except (asyncpg.PostgresError, QueenError) as error:
            if len(batch) == 1 or isinstance(error, DatabaseAway):
                for push in batch:
                    _fail(push, error)
                return
            for push in batch:
                await self._run([push])

    async def _store_persistently(self, batch: list[Push]) -> None:
        """Try again for a while when PostgreSQL goes away: segments of a lost attempt are recognised by their ids."""
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return await self._store(batch)
            except (DatabaseAway, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                for push in batch:
                    for part in push.parts:
                        partition = self._catalog.cached_partition(*part.target)
                        if partition is not None:
                            partition.known_to = None
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _store(self, batch: list[Push]) -> None:
        for _ in range(5):
            pieces = [(push, part) for push in batch for part in push.parts]
            unknown = {part.target for _, part in pieces if self._catalog.cached_partition(*part.target) is None}
            if unknown:
                await self._catalog.ensure_partitions(unknown)
            lots = self._lots(pieces)
            if await self._appender.append(self._link, lots):
                _answer(batch, lots)
                return
            # A partition is gone: its queue was deleted. Pushing makes it anew.
            for lot in lots:
                self._catalog.forget_queue(lot.queue.name)
        raise QueenError("a queue is deleted again and again while it is pushed to; try later")

    def _lots(self, pieces: Sequence[tuple[Push | _TransactionSender, Part]]) -> list[Lot]:
        """What goes to each partition, in ascending order of their ids: the order in which they are locked."""
        lots: dict[int, Lot] = {}
        for sender, part in pieces:
            partition = self._catalog.cached_partition(*part.target)
            queue = self._catalog.cached_queue(part.target[0])
            if partition is None or queue is None:
                raise QueenError(f"queue {part.target[0]!r} was deleted while it was being pushed to; push again")
            lot = lots.get(partition.id)
            if lot is None:
                lot = lots[partition.id] = Lot(partition, queue)
            lot.pieces.append((sender, part.items))
        return [lots[id] for id in sorted(lots)]


def _by_target(items: list[PushItem]) -> list[Part]:
    first = (items[0].queue, items[0].partition)
    if all(item.partition == first[1] and item.queue == first[0] for item in items):
        return [Part(first, items, None)]
    parts: dict[Target, Part] = {}
    for position, item in enumerate(items):
        target = (item.queue, item.partition)
        part = parts.get(target)
        if part is None:
            part = parts[target] = Part(target, [], [])
        part.items.append(item)
        assert part.positions is not None
        part.positions.append(position)
    return list(parts.values())


def _answer(batch: list[Push], lots: list[Lot]) -> None:
    """Give each request the results of its items, in the order it sent them."""
    gathered: dict[int, list[list[bytes]]] = {id(push): [] for push in batch}
    by_target: dict[Target, tuple[Lot, int]] = {(lot.queue.name, lot.partition.name): (lot, 0) for lot in lots}
    for push in batch:
        for part in push.parts:
            lot, start = by_target[part.target]
            end = start + len(part.items)
            by_target[part.target] = (lot, end)
            gathered[id(push)].append(lot.results[start:end])
    for push in batch:
        if not push.answer.done():
            push.answer.set_result(_render(push, gathered[id(push)]))


def _render(push: Push, results_by_part: list[list[bytes]]) -> bytes:
    if len(push.parts) == 1:
        results = results_by_part[0]
    else:
        results = [b""] * push.count
        for part, own in zip(push.parts, results_by_part, strict=True):
            for position, result in zip(part.positions or (), own, strict=True):
                results[position] = result
    return b"[" + b",".join([b'{"index":%d%b' % numbered for numbered in enumerate(results)]) + b"]"


def _check_stored(result: bytes) -> None:
    if b'"status":"queued"' not in result:
        raise DuplicateInTransaction(
            "duplicate key value violates unique constraint: the transactionId exists already in this partition"
            if b'"status":"duplicate"' in result
            else "Queue would exceed max capacity"
        )


def _fail(push: Push, error: Exception) -> None:
    if not push.answer.done():
        push.answer.set_exception(error)

"""Pushing: requests are gathered, their messages become segments, one statement stores them all or none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import asyncpg

from queen.broker.batcher import Batcher, fail_request
from queen.broker.catalog import Catalog, Partition, Queue
from queen.broker.push.append_batch import AppendBatch, ItemOutcome
from queen.broker.push.append_lock import AppendLock
from queen.broker.push.appender import Appender
from queen.broker.push.results import join_results, refusal, render_results, stored_ids
from queen.broker.push.slices import Push, PushSlice, SlicePreparer, split_by_target
from queen.broker.push.spool_router import SpoolRouter
from queen.concurrency import EagerFuture
from queen.errors import DatabaseUnavailable, QueenError
from queen.metrics.meter import Meter, clock
from queen.storage.database import Database, Fetcher, Link, TransactionConflict
from queen.wire.ids import IdSource
from queen.wire.push import Hold, PushItem

_LARGEST_BATCH_BYTES = 4 << 20
_MOST_WAITING_BYTES = 64 << 20
_RETRY_SECONDS = 2.0
_FEW_ANSWERS = 128

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredPush:
    """What a transaction pushed."""

    parts: list[PushSlice]
    lots: list[AppendBatch]
    times: list[datetime]

    @property
    def messages(self) -> list[tuple[str, Partition]]:
        """Id and partition of each message in the order of the items, all of which were stored."""
        placed: dict[int, tuple[str, Partition]] = {}
        for lot in self.lots:
            ids = iter(stored_ids(lot))
            for part in lot.parts:
                for position in part.positions if part.positions is not None else range(part.count):
                    placed[position] = (next(ids).decode(), lot.partition)
        return [placed[position] for position in range(len(placed))]


@dataclass(slots=True, eq=False)
class _TransactionSender:
    subject: str | None
    blocks: frozenset[bytes] = frozenset()


class _Answers:
    """What the requests of a batch are told once it is stored."""

    def __init__(self, batch: Sequence[Push], lots: Sequence[AppendBatch]) -> None:
        self._batch = batch
        self._lots = lots
        self._rendered: list[Any] | None = None

    def prepare(self) -> None:
        """While PostgreSQL works: few are rendered before it is done; many would keep the next turn waiting."""
        few = sum([lot.size for lot in self._lots]) <= _FEW_ANSWERS
        self._rendered = self._render() if few else None

    @property
    def are_ready(self) -> bool:
        return self._rendered is not None

    def give(self, meter: Meter) -> None:
        rendered_for_all = self._rendered if self._rendered is not None else self._render()
        now = clock()
        for push, rendered in zip(self._batch, rendered_for_all, strict=True):
            meter.push_latency.observe(now - push.began)
            if not push.answer.done():
                push.answer.set_result(rendered)
            # A push and its parts know each other: let go of what they hold without waiting for the collector.
            push.parts.clear()

    def _render(self) -> list[Any]:
        """To each request the results of its items, in the order it sent them, for the lots as they are now."""
        results = render_results(self._lots)
        return [push.render(join_results(push.parts, results, push.count)) for push in self._batch]


class NotStored(QueenError):
    """A transaction pushes what cannot be stored: a transaction id that its partition has, or too much."""


class QueueChanged(NotStored, TransactionConflict):
    """A queue was changed or deleted since the transaction began; its next attempt finds it as it is now."""


class Pusher:
    """Stores what is pushed to one shard, in the order it arrived."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        preparer: SlicePreparer,
        appender: Appender,
        ids: IdSource,
        lock: AppendLock,
        drain_bus: Callable[[], None],
        spool_router: SpoolRouter,
        meter: Meter,
    ) -> None:
        self._link: Link = database.link()
        self._availability = database.availability
        self._spool_router = spool_router
        self._catalog = catalog
        self._preparer = preparer
        self._appender = appender
        self._ids = ids
        self._drain_bus = drain_bus
        self.batcher = _batcher(self._run, meter, lock, self._pack_ahead)
        self.buffering = _batcher(self._buffer, meter)
        self._meter = meter

    def push(
        self,
        items: list[PushItem],
        nbytes: int,
        render: Callable[[bytes], T],
        subject: str | None = None,
        hold: Hold | None = None,
    ) -> asyncio.Future[T]:
        """Store the items (at least one); the future gives what `render` makes of the JSON array that answers them.

        With a `hold` they go to the spool, and from there to PostgreSQL when that says.
        """
        self._name_nameless(items)
        push = Push(len(items), nbytes, subject, render, EagerFuture(), clock())
        push.parts = split_by_target(push, items)
        self._meter.push_requested([part.target[0] for part in push.parts])
        # While the batch before is being stored, this one is made ready.
        for part in push.parts:
            self._prepare(part)
        push.hold = hold
        (self.batcher if hold is None else self.buffering).submit(push)
        return push.answer

    async def join(self) -> None:
        """Wait until everything pushed so far is answered."""
        await self.batcher.join()
        await self.buffering.join()

    async def prepare(self, items: Sequence[PushItem]) -> None:
        """Before a transaction that stores the items: make their queues and partitions."""
        targets = {(item.queue, item.partition) for item in items}
        await self._spool_router.let_pass(targets)
        await self._catalog.ensure_partitions(targets)

    async def store_in(self, transaction: Fetcher, items: list[PushItem], subject: str | None) -> StoredPush:
        """Store the items inside a transaction; `settle` when it has committed. A duplicate refuses them all."""
        stored = await self._append_in(transaction, items, subject)
        for lot in stored.lots:
            _check_all_stored(lot)
        return stored

    async def store_new_in(
        self, transaction: Fetcher, items: list[PushItem], subject: str | None
    ) -> tuple[StoredPush, bytes]:
        """The same, but duplicates are passed over; with the JSON array that says what became of each item."""
        stored = await self._append_in(transaction, items, subject)
        for lot in stored.lots:
            _check_none_refused(lot)
        return stored, join_results(stored.parts, render_results(stored.lots), len(items))

    async def _append_in(self, transaction: Fetcher, items: list[PushItem], subject: str | None) -> StoredPush:
        if not items:
            return StoredPush([], [], [])
        self._name_nameless(items)
        parts = split_by_target(_TransactionSender(subject), items)
        lots = self.lots_of(parts)
        return StoredPush(parts, lots, await self.append_in(transaction, lots))

    def lots_of(self, parts: Sequence[PushSlice]) -> list[AppendBatch]:
        """What a transaction has for each partition. Raises `QueueChanged` if one of them was just forgotten."""
        lots = self._lots(parts)
        if lots is None:
            raise QueueChanged("a queue of the transaction is being changed again and again; try later")
        return lots

    async def append_in(self, transaction: Fetcher, lots: list[AppendBatch]) -> list[datetime]:
        """Append lots inside a transaction. Raises `QueueChanged` when a partition is gone."""
        await self._appender.meet(transaction, lots)
        times = await self._appender.append_locked(transaction, lots)
        if times is None:
            for lot in lots:
                self._catalog.forget_queue(lot.queue.name)
            raise QueueChanged("a queue of the transaction is being deleted again and again; try later")
        return times

    def settle(self, stored: StoredPush) -> None:
        """The transaction that stored them has committed."""
        self.settle_lots(stored.lots, stored.times)

    def settle_lots(self, lots: list[AppendBatch], times: list[datetime]) -> None:
        self._appender.settle(lots, times)

    def _name_nameless(self, items: list[PushItem]) -> None:
        """Give an id to items that came without, before any attempt, so that a retry recognises them."""
        for item in items:
            if not item.transaction_id:
                item.transaction_id = self._ids.uuid()

    def _prepare(self, part: PushSlice) -> Queue | None:
        """Make a part ready if its partition is known; the queue it belongs to."""
        queue = self._catalog.cached_queue(part.target[0])
        partition = self._catalog.cached_partition_in(queue, part.target[1]) if queue is not None else None
        if queue is None or partition is None:
            return None
        if part.partition is not partition:
            self._preparer.prepare(part, partition, queue)
            self._appender.foresee(part)
        return queue

    def _pack_ahead(self, waiting: Sequence[Push]) -> None:
        """Another worker has its turn. What comes until ours begins has only its own partitions packed anew."""
        # Whatever is wrong with one of them is told to whoever sent it, when it is stored.
        with contextlib.suppress(QueenError):
            lots = self._lots([part for push in waiting for part in push.parts])
            if lots is not None:
                self._appender.pack_ahead(lots)

    async def _run(self, batch: list[Push]) -> Callable[[], None] | None:
        """Store a batch; returns what answers the requests, to be called when the append lock has been released."""
        if self._spool_router.engaged and await self._spool_router.takes(
            {part.target for push in batch for part in push.parts}
        ):
            return await self._spool_router.take(batch)
        try:
            answers, settle = await self._store_persistently(batch)
        except DatabaseUnavailable:
            return await self._spool_router.take(batch, trouble=True)

        def finish() -> None:
            # Nothing else runs before both are done. Answers that have to be rendered first keep no other waiting.
            if not answers.are_ready:
                settle()
                answers.give(self._meter)
                return
            try:
                answers.give(self._meter)
            finally:
                settle()

        return finish

    async def _buffer(self, batch: list[Push]) -> Callable[[], None] | None:
        """Spool pushes that asked for it."""
        return await self._spool_router.take(batch)

    async def _store_persistently(self, batch: list[Push]) -> tuple[_Answers, Callable[[], None]]:
        """Try again for a while when PostgreSQL goes away: segments of a lost attempt are recognised by their ids."""
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return await self._store(batch)
            except (DatabaseUnavailable, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                for push in batch:
                    for part in push.parts:
                        if part.partition is not None:
                            part.partition.known_to = None
                if self._availability.down or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _store(self, batch: list[Push]) -> tuple[_Answers, Callable[[], None]]:
        self._drain_bus()
        parts = [part for push in batch for part in push.parts]
        for _ in range(6):
            lots = self._lots(parts)
            if lots is None:
                await self._catalog.ensure_partitions({part.target for part in parts})
                continue
            answers = _Answers(batch, lots)
            try:
                settle = await self._appender.append(self._link, lots, answers.prepare)
            except DatabaseUnavailable:
                _note_tried(lots)
                raise
            if settle is not None:
                return answers, settle
            # A partition is gone: its queue was deleted. Pushing makes it anew.
            for lot in lots:
                self._catalog.forget_queue(lot.queue.name)
        raise QueenError("a queue is deleted again and again while it is pushed to; try later")

    def _lots(self, parts: Sequence[PushSlice]) -> list[AppendBatch] | None:
        """What goes to each partition, in ascending order of their ids: the order in which they are locked.

        None: one of them is not known, or has just been forgotten because its queue was deleted or changed.
        """
        lots: dict[int, AppendBatch] = {}
        for part in parts:
            queue = self._prepare(part)
            if queue is None:
                return None
            partition = part.partition
            assert partition is not None
            lot = lots.get(partition.id)
            if lot is None:
                lot = lots[partition.id] = AppendBatch(partition, queue)
            lot.add(part)
        return [lots[id] for id in sorted(lots)]


def _batcher(
    run: Callable[[list[Push]], Awaitable[Callable[[], None] | None]],
    meter: Meter,
    lock: AppendLock | None = None,
    meanwhile: Callable[[Sequence[Push]], None] | None = None,
) -> Batcher[Push]:
    return Batcher(
        run,
        weigh=lambda push: push.nbytes + 512,
        limit=_LARGEST_BATCH_BYTES,
        most=_MOST_WAITING_BYTES,
        lock=lock,
        meanwhile=meanwhile,
        sizes=meter.push_batches,
        fail=_fail,
    )


def _note_tried(lots: Sequence[AppendBatch]) -> None:
    """Whether these were stored is not known: the next attempt recognises their segments, should it meet them."""
    for lot in lots:
        tried = frozenset([chunk.ids[:16] for chunk in lot.chunks])
        for part in lot.parts:
            part.sender.blocks |= tried


def _check_none_refused(lot: AppendBatch) -> None:
    """In a transaction, anything that does not fit refuses the whole."""
    if lot.fates is not None and ItemOutcome.REFUSED in lot.fates:
        raise NotStored(refusal(lot))


def _check_all_stored(lot: AppendBatch) -> None:
    """Where duplicates are not to be either, they do so too."""
    _check_none_refused(lot)
    if lot.fates is None:
        return
    for item, fate in zip(lot.items(), lot.fates, strict=True):
        if fate is ItemOutcome.DUPLICATE:
            raise NotStored(
                "duplicate key value violates unique constraint: partition"
                f" {lot.partition.name!r} of queue {lot.queue.name!r} has transactionId {item.transaction_id!r} already"
            )


def _fail(push: Push, error: Exception) -> None:
    push.parts.clear()
    fail_request(push, error)

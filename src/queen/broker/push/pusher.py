"""Pushing: requests are gathered, their messages become segments, one statement stores them all or none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import asyncpg

from queen.broker.batcher import Batcher, SmallFirst, fail_request
from queen.broker.push.append_lock import AppendLock
from queen.broker.push.results import join_results, render_results, stored_ids
from queen.broker.push.spool_router import SpoolRouter
from queen.concurrency import EagerFuture
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.append_batch import AppendBatch, ItemOutcome
from queen.log.appender import Appender
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.slices import Push, PushSlice, SlicePreparer, Target, split_by_target
from queen.metrics.meter import Meter, clock
from queen.storage.database import Database, Fetcher, Link, TransactionAborted, TransactionConflict
from queen.wire.ids import IdSource
from queen.wire.push import PushItem, PushRequest

_LARGEST_BATCH_BYTES = 4 << 20
_MOST_WAITING_BYTES = 64 << 20
_SMALL_PUSH_BYTES = 128 << 10
_RETRY_SECONDS = 2.0
_FEW_ANSWERS = 128
# What is stored in one transaction. A larger push is stored in parts, and others have their turn in between.
_MOST_ITEMS_AT_ONCE = 10_000
_MOST_PARTITIONS_AT_ONCE = 1_000
_ROOM_POLL_SECONDS = 0.02

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredPush:
    """What a transaction pushed."""

    slices: list[PushSlice]
    batches: list[AppendBatch]
    times: list[datetime]

    @property
    def messages(self) -> list[tuple[str, Partition]]:
        """Id and partition of each message in the order of the items, all of which were stored."""
        placed: dict[int, tuple[str, Partition]] = {}
        for batch in self.batches:
            ids = iter(stored_ids(batch))
            for slice_ in batch.slices:
                for position in slice_.positions if slice_.positions is not None else range(slice_.count):
                    placed[position] = (next(ids).decode(), batch.partition)
        return [placed[position] for position in range(len(placed))]


@dataclass(slots=True, eq=False)
class _TransactionSender:
    subject: str | None
    blocks: frozenset[bytes] = frozenset()


class _Answers:
    """The responses to the pushes of a batch."""

    def __init__(self, pushes: Sequence[Push], batches: Sequence[AppendBatch]) -> None:
        self._pushes = pushes
        self._batches = batches
        self._rendered: list[Any] | None = None

    def prepare(self) -> None:
        """While PostgreSQL works: a few are rendered before it is done; many would delay the append lock's release."""
        few = sum([batch.size for batch in self._batches]) <= _FEW_ANSWERS
        self._rendered = self._render() if few else None

    @property
    def are_ready(self) -> bool:
        return self._rendered is not None

    def give(self, meter: Meter) -> None:
        rendered_for_all = self._rendered if self._rendered is not None else self._render()
        now = clock()
        for push, rendered in zip(self._pushes, rendered_for_all, strict=True):
            meter.push_latency.observe(now - push.began)
            if not push.answer.done():
                push.answer.set_result(rendered)
            # A push and its slices refer to each other: free what they hold without waiting for the garbage collector.
            push.slices.clear()

    def _render(self) -> list[Any]:
        """To each request the results of its items, in the order it sent them, for the batches as they are now."""
        results = render_results(self._batches)
        return [push.render(join_results(push.slices, results, push.count, push.first)) for push in self._pushes]


class NotStored(QueenError):
    """A transaction pushes what cannot be stored: a transaction id that its partition has, or too much."""


class QueueChanged(NotStored, TransactionConflict):
    """A queue was changed or deleted since the transaction began; its next attempt finds it as it is now."""


class Pusher:
    """Stores what is pushed to one shard: what one client sends in the order it arrived, and small pushes first."""

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

    def push(self, request: PushRequest, render: Callable[[bytes], T]) -> asyncio.Future[T]:
        """Store the items; the future gives what `render` makes of the JSON array that answers them."""
        if len(request.items) > _MOST_PARTITIONS_AT_ONCE:
            return asyncio.ensure_future(self._push_in_parts(request, render))
        return self._submit(request, render)

    def _submit(self, request: PushRequest, render: Callable[[bytes], T], first: int = 0) -> asyncio.Future[T]:
        items, hold = request.items, request.hold
        batcher = self.batcher if hold is None else self.buffering
        # Before anything is made of it: what is refused should cost nothing.
        batcher.check_room(request.nbytes)
        self._assign_ids(items)
        push = Push(len(items), request.nbytes, request.subject, render, EagerFuture(), clock(), hold=hold, first=first)
        push.slices = split_by_target(push, items)
        self._meter.push_requested([slice_.target[0] for slice_ in push.slices])
        try:
            # While the batch before is being stored, this one is made ready.
            for slice_ in push.slices:
                self._prepare(slice_)
            batcher.submit(push)
        except BaseException:
            push.slices.clear()
            raise
        return push.answer

    async def _push_in_parts(self, request: PushRequest, render: Callable[[bytes], T]) -> T:
        """Store one part after the other. When one fails, those before it stay: a client that tries again with the
        same transaction ids has them answered as duplicates."""
        answers: list[bytes] = []
        first = 0
        for items in _parts(request.items):
            if first:
                await self._wait_for_room()
            if not self._spool_router.engaged:
                # Not while others wait for the append lock. What goes wrong here goes wrong when it is stored, too.
                with contextlib.suppress(QueenError, asyncpg.PostgresError):
                    await self._catalog.ensure_partitions({(item.queue, item.partition) for item in items})
            nbytes = request.nbytes * len(items) // len(request.items)
            part = PushRequest(items, nbytes, request.subject, request.hold)
            answers.append(await self._submit(part, bytes, first))
            first += len(items)
        if len(answers) == 1:
            return render(answers[0])
        return render(b"[" + b",".join([answer[1:-1] for answer in answers]) + b"]")

    async def _wait_for_room(self) -> None:
        give_up = time.monotonic() + _RETRY_SECONDS
        while time.monotonic() < give_up:
            try:
                self.batcher.check_room(_LARGEST_BATCH_BYTES)
            except Overloaded:
                await asyncio.sleep(_ROOM_POLL_SECONDS)
            else:
                return

    async def join(self) -> None:
        """Wait until everything pushed so far is answered."""
        await self.batcher.join()
        await self.buffering.join()

    async def prepare(self, items: Sequence[PushItem]) -> None:
        """Before a transaction that stores the items: make their queues and partitions."""
        targets = {(item.queue, item.partition) for item in items}
        await self._spool_router.wait_for_replay(targets)
        await self._catalog.ensure_partitions(targets)

    def spooled(self, targets: Collection[Target]) -> list[Target]:
        """Those of the partitions that messages in the spool go to: nothing may be appended before them."""
        return self._spool_router.spooled(targets)

    async def store_in(self, transaction: Fetcher, items: list[PushItem], subject: str | None) -> StoredPush:
        """Store the items inside a transaction; `settle` when it has committed. A duplicate refuses them all."""
        stored = await self._append_in(transaction, items, subject)
        for batch in stored.batches:
            _check_all_stored(batch)
        return stored

    async def store_new_in(
        self, transaction: Fetcher, items: list[PushItem], subject: str | None
    ) -> tuple[StoredPush, bytes]:
        """The same, but duplicates are skipped; with the JSON array that says what became of each item."""
        stored = await self._append_in(transaction, items, subject)
        for batch in stored.batches:
            _check_none_refused(batch)
        return stored, join_results(stored.slices, render_results(stored.batches), len(items))

    async def _append_in(self, transaction: Fetcher, items: list[PushItem], subject: str | None) -> StoredPush:
        if not items:
            return StoredPush([], [], [])
        self._assign_ids(items)
        slices = split_by_target(_TransactionSender(subject), items)
        batches = self.batches_of(slices)
        return StoredPush(slices, batches, await self.append_in(transaction, batches))

    def batches_of(self, slices: Sequence[PushSlice]) -> list[AppendBatch]:
        """What a transaction has for each partition. Raises `QueueChanged` if one of them was just forgotten."""
        batches = self._batches(slices)
        if batches is None:
            raise QueueChanged("a queue of the transaction changes too often; try again later")
        return batches

    async def append_in(self, transaction: Fetcher, batches: list[AppendBatch]) -> list[datetime]:
        """Append batches inside a transaction. Raises `QueueChanged` when a partition is gone."""
        times = await self._appender.append_in(transaction, batches)
        if times is None:
            for batch in batches:
                self._catalog.forget_queue(batch.queue.name)
            raise QueueChanged("a queue of the transaction is deleted too often; try again later")
        return times

    def settle(self, stored: StoredPush) -> None:
        """The transaction that stored them has committed."""
        self.settle_batches(stored.batches, stored.times)

    def settle_batches(self, batches: list[AppendBatch], times: list[datetime]) -> None:
        self._appender.settle(batches, times)

    def _assign_ids(self, items: list[PushItem]) -> None:
        """Give an id to items that came without, before any attempt, so that a retry recognises them."""
        for item in items:
            if not item.transaction_id:
                item.transaction_id = self._ids.uuid()

    def _prepare(self, slice_: PushSlice) -> Queue | None:
        """Prepare a slice if its partition is known; returns the queue it belongs to."""
        queue = self._catalog.cached_queue(slice_.target[0])
        partition = self._catalog.cached_partition_in(queue, slice_.target[1]) if queue is not None else None
        if queue is None or partition is None:
            return None
        if slice_.partition is not partition:
            self._preparer.prepare(slice_, partition, queue)
            self._appender.check_ahead(slice_)
        return queue

    def _pack_ahead(self, waiting: Sequence[Push]) -> None:
        """Another worker has the append lock: pack what waits, so that later arrivals alone are packed inside of it."""
        # Whatever is wrong with one of them fails it when it is stored.
        with contextlib.suppress(QueenError):
            batches = self._batches([slice_ for push in waiting for slice_ in push.slices])
            if batches is not None:
                self._appender.pack_ahead(batches)

    async def _run(self, pushes: list[Push]) -> Callable[[], None] | None:
        """Store a batch; returns what answers the requests, to be called when the append lock has been released."""
        router = self._spool_router
        free, behind = router.divide(pushes) if router.engaged else (pushes, [])
        if not behind:
            return await self._store_or_spool(free)
        if free:
            # Those whose partitions are not in the spool neither wait for it nor go there.
            try:
                (await self._store_all(free))()
            except DatabaseUnavailable:
                return await router.spool(pushes, outage=True)
        if await router.must_spool(behind):
            return await router.spool(behind)
        return await self._store_or_spool(behind)

    async def _store_or_spool(self, pushes: list[Push]) -> Callable[[], None]:
        try:
            return await self._store_all(pushes)
        except DatabaseUnavailable:
            return await self._spool_router.spool(pushes, outage=True)

    async def _store_all(self, pushes: list[Push]) -> Callable[[], None]:
        answers, settle = await self._store_persistently(pushes)

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

    async def _buffer(self, pushes: list[Push]) -> Callable[[], None] | None:
        """Spool pushes that asked for it."""
        return await self._spool_router.spool(pushes)

    async def _store_persistently(self, pushes: list[Push]) -> tuple[_Answers, Callable[[], None]]:
        """Retry for a while when the connection is lost: segments of a lost attempt are recognised by their ids."""
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                return await self._store(pushes)
            except (DatabaseUnavailable, TransactionAborted):
                for push in pushes:
                    for slice_ in push.slices:
                        if slice_.partition is not None:
                            slice_.partition.known_to = None
                if self._availability.down or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _store(self, pushes: list[Push]) -> tuple[_Answers, Callable[[], None]]:
        self._drain_bus()
        slices = [slice_ for push in pushes for slice_ in push.slices]
        for _ in range(6):
            batches = self._batches(slices)
            if batches is None:
                await self._catalog.ensure_partitions({slice_.target for slice_ in slices})
                continue
            answers = _Answers(pushes, batches)
            try:
                settle = await self._appender.append(self._link, batches, answers.prepare)
            except DatabaseUnavailable:
                _note_tried(batches)
                raise
            if settle is not None:
                return answers, settle
            # A partition is gone: its queue was deleted. Pushing creates it again.
            for batch in batches:
                self._catalog.forget_queue(batch.queue.name)
        raise Overloaded("the queue is deleted too often while it is pushed to; nothing was stored, try again soon")

    def _batches(self, slices: Sequence[PushSlice]) -> list[AppendBatch] | None:
        """What goes to each partition, in ascending order of their ids: the order in which they are locked.

        None: one of them is not known, or has just been forgotten because its queue was deleted or changed.
        """
        batches: dict[int, AppendBatch] = {}
        for slice_ in slices:
            queue = self._prepare(slice_)
            if queue is None:
                return None
            partition = slice_.partition
            assert partition is not None
            batch = batches.get(partition.id)
            if batch is None:
                batch = batches[partition.id] = AppendBatch(partition, queue)
            batch.add(slice_)
        return [batches[id] for id in sorted(batches)]


def _parts(items: list[PushItem]) -> Iterator[list[PushItem]]:
    """The items of a push in the order in which they came, in parts that are stored at once."""
    start = 0
    targets: set[tuple[str, str]] = set()
    for position, item in enumerate(items):
        targets.add((item.queue, item.partition))
        if len(targets) > _MOST_PARTITIONS_AT_ONCE or position - start >= _MOST_ITEMS_AT_ONCE:
            yield items[start:position]
            start, targets = position, {(item.queue, item.partition)}
    yield items[start:]


def _batcher(
    run: Callable[[list[Push]], Awaitable[Callable[[], None] | None]],
    meter: Meter,
    lock: AppendLock | None = None,
    meanwhile: Callable[[Sequence[Push]], None] | None = None,
) -> Batcher[Push]:
    def weigh(push: Push) -> int:
        return push.nbytes + 512

    return Batcher(
        run,
        weigh=weigh,
        limit=_LARGEST_BATCH_BYTES,
        most=_MOST_WAITING_BYTES,
        backlog=SmallFirst(weigh, _LARGEST_BATCH_BYTES, _SMALL_PUSH_BYTES),
        lock=lock,
        meanwhile=meanwhile,
        sizes=meter.push_batches,
        fail=_fail,
    )


def _note_tried(batches: Sequence[AppendBatch]) -> None:
    """Whether these were stored is not known: the next attempt recognises their segments."""
    for batch in batches:
        tried = frozenset([chunk.ids[:16] for chunk in batch.chunks])
        for slice_ in batch.slices:
            slice_.sender.blocks |= tried


def _check_none_refused(batch: AppendBatch) -> None:
    """Raises `NotStored` when something does not fit: it refuses the whole transaction."""
    if batch.outcomes is not None and ItemOutcome.REFUSED in batch.outcomes:
        raise NotStored(batch.refusal)


def _check_all_stored(batch: AppendBatch) -> None:
    """The same where duplicates are not allowed either."""
    _check_none_refused(batch)
    if batch.outcomes is None:
        return
    for item, outcome in zip(batch.items(), batch.outcomes, strict=True):
        if outcome is ItemOutcome.DUPLICATE:
            raise NotStored(
                "duplicate key value violates unique constraint: partition"
                f" {batch.partition.name!r} of queue {batch.queue.name!r}"
                f" has transactionId {item.transaction_id!r} already"
            )


def _fail(push: Push, error: Exception) -> None:
    push.slices.clear()
    fail_request(push, error)

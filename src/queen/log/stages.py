"""Staged publishing: what tasks have staged becomes messages in one transaction, once, however often it is tried.

Tasks stage segments that are packed and hashed already. As long as nothing is a duplicate and nothing has changed
since, publishing gives out offsets and has PostgreSQL move the segments, so no message comes here. Otherwise they are
read, and go the way of any push: under the partitions' locks, checked against the window of transaction ids.

What is known of partitions and ids for that is kept apart from what pushes know, because it is learnt inside
transactions that may yet be rolled back.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

import msgspec

from queen.errors import Conflict, Overloaded
from queen.log.append_batch import AppendBatch, BatchAssembler, ItemOutcome
from queen.log.appender import Appender
from queen.log.catalog import Catalog, Partition
from queen.log.dedup import Dedup
from queen.log.dedup_filter import DedupFilter
from queen.log.segments import SegmentCache
from queen.log.slices import Chunk, PushSlice, SlicePreparer
from queen.log.stage_moves import NewIds, SegmentMove, StagedRows, StageLost, check_found, is_encrypted
from queen.log.topic_store import Entry, Stored
from queen.log.topics import TopicKey
from queen.storage.database import Database, Fetcher, Record, Transaction, TransactionConflict, retry_transaction
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock, IdSource
from queen.wire.push import PushItem
from queen.wire.segment import Segment
from queen.wire.topics.requests import EnqueueItem, decode_enqueue_items

Appended: TypeAlias = tuple[Partition, int]
"""A partition, and how many messages it got."""

TOPIC_ITEMS = 0
"""Stands in the place of a partition id for items of topics."""
_PIECE_BYTES = 32 << 20
_PIECE_MESSAGES = 200_000
_NOT_YET = IdBlock.parse(bytes(16))

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a task that succeeded, and how many messages it staged."""

    id: uuid.UUID
    messages: int


@dataclass(frozen=True, slots=True)
class Published:
    """What a batch came to. `repeated`: it was published before, and nothing was done now."""

    messages: int
    duplicates: int
    repeated: bool = False


class QueueChanged(Overloaded, TransactionConflict):
    """A queue was changed or deleted since the transaction began; the next attempt finds it as it is now."""


@dataclass(slots=True, eq=False)
class StageSender:
    """Messages are recognised by their batch; there is no attempt of unknown outcome to look for."""

    subject: str | None = None
    blocks: frozenset[bytes] = frozenset()


class TopicEnqueuer(Protocol):
    """Enqueues items of topics inside the transaction that publishes a batch."""

    async def admit(self, items: Sequence[EnqueueItem]) -> None: ...

    async def enqueue_in(self, transaction: Transaction, entries: Sequence[Entry]) -> Stored: ...

    def settle(self, stored: Stored) -> None: ...


class Stages:
    """Publishes what was staged on one shard."""

    def __init__(
        self,
        database: Database,
        envelope: Envelope,
        ids: IdSource,
        topics: TopicEnqueuer,
        on_published: Callable[[Sequence[Appended]], None],
        *,
        dedup_window: float,
        dedup_filter: DedupFilter,
    ) -> None:
        """`on_published` is called with what partitions got, once that is committed; `dedup_filter` is of its own."""
        self._database = database
        self.envelope = envelope
        self.ids = ids
        self._topics = topics
        self._on_published = on_published
        self.catalog = Catalog(database)
        self.preparer = SlicePreparer(envelope, ids)
        self._dedup = dedup = Dedup(envelope, dedup_filter)
        self._assembler = BatchAssembler(dedup, self.preparer, dedup_window=dedup_window)
        self._appender = Appender(
            self._assembler,
            dedup,
            SegmentCache(0),
            announce=lambda spans, hashes: lambda: None,
            on_stored=lambda spans: None,
        )
        self._lock = asyncio.Lock()

    async def stage(self, run: str, batch: int, attempt: uuid.UUID, rows: Sequence[tuple[Any, ...]]) -> None:
        """Store rows for the batch; those that are stored already stay as they are."""
        await self._database.fetch("stage", run, batch, attempt, *[list(column) for column in zip(*rows, strict=True)])

    async def publish(self, run: str, batch: int, attempts: Sequence[Attempt]) -> Published:
        """Publish what the attempts staged, all of it or nothing.

        Raises `StageLost` when something of it is missing, and `Conflict` when it does not fit its queue or nothing may
        be stored now.
        """
        async with self._lock:
            published = await self.published(run, batch)
            if published is not None:
                # A writer that did not see the result has staged all of it again.
                await self._database.fetch("stage_remove", run, batch)
                return published
            return await retry_transaction(lambda: self._publish(run, batch, attempts))

    async def published(self, run: str, batch: int) -> Published | None:
        """What a batch came to, if it was published."""
        for row in await self._database.fetch("stage_published", run):
            if row["batch"] == batch:
                return Published(row["messages"], row["duplicates"], repeated=True)
            if row["batch"] > batch:
                return Published(0, 0, repeated=True)
        return None

    async def abandon(self, run: str, batch: int) -> int:
        """Remove what was staged for a batch that will not be published; returns how many messages that were."""
        return sum(row["count"] for row in await self._database.fetch("stage_abandon", run, batch))

    async def _publish(self, run: str, batch: int, attempts: Sequence[Attempt]) -> Published:
        await self._refresh_targets(run, batch, attempts)
        publishing = _Publishing(run, batch)
        try:
            async with self._database.transaction() as transaction:
                if not await transaction.fetch("stage_claim", run, batch):
                    # Another session has published it since.
                    return Published(0, 0, repeated=True)
                await _check_modes(transaction)
                rows = await transaction.fetch("stage_list", run, batch, [attempt.id for attempt in attempts])
                _check_complete(rows, attempts)
                messages = [row for row in rows if row["partition_id"] != TOPIC_ITEMS]
                items = [row for row in rows if row["partition_id"] == TOPIC_ITEMS]
                await self._publish_messages(transaction, publishing, messages, alone=not items)
                await self._publish_items(transaction, publishing, items)
                await publishing.finish(transaction)
        except BaseException:
            # The filter may hold ids that were rolled back.
            for partition in publishing.checked:
                partition.known_to = None
            raise
        self._on_published(publishing.appended)
        for stored in publishing.topics:
            self._topics.settle(stored)
        return publishing.result

    async def _refresh_targets(self, run: str, batch: int, attempts: Sequence[Attempt]) -> None:
        """Refresh the queues in the catalog, and create what does not exist."""
        rows = await self._database.fetch("stage_targets", run, batch, [attempt.id for attempt in attempts])
        targets = {(row["queue"], row["partition"]) for row in rows if row["partition_id"] != TOPIC_ITEMS}
        known = {queue for queue, _ in targets} & self.catalog.known_queues()
        if known:
            stored = await self.catalog.stored_queues(known)
            self.catalog.correct({name: stored.get(name) for name in known})
        await self.catalog.ensure_partitions(targets)

    async def _publish_messages(
        self, transaction: Fetcher, publishing: _Publishing, rows: Sequence[Record], *, alone: bool
    ) -> None:
        """`alone`: there is nothing else in the batch."""
        staged = self._by_partition(rows)
        ids = NewIds(self._dedup, transaction, publishing.key)
        moved = await self._movable(ids, staged)
        move = SegmentMove(publishing.key, moved, self.ids)
        await move.copy(transaction)
        if move.ahead and alone and len(moved) == len(staged):
            await publishing.remove_staged(transaction)
        if move.ahead:
            await self._database.fetch("stage_flush")
        for queue_id in sorted({one.queue.id for one in staged if one.queue.max_size}):
            await transaction.fetch("lock_queue", queue_id)
        locked = await transaction.fetch("lock_partitions", [one.partition.id for one in staged])
        if len(locked) < len(staged):
            for one in staged:
                self.catalog.forget_queue(one.queue.name)
            raise QueueChanged("a queue was deleted while it was published to")
        ends = {row["id"]: row["next_offset"] for row in locked}
        await ids.check_again(moved, ends)
        await move.place(transaction, ends)
        for one in moved:
            publishing.add(one.partition, one.count)
        for piece in _pieces([one for one in staged if one not in moved]):
            await self._append(transaction, publishing, piece)

    async def _movable(self, ids: NewIds, staged: Sequence[StagedRows]) -> list[StagedRows]:
        """What can be stored as it is: it fits its queue, and none of its ids can be a duplicate."""
        fitting = [one for one in staged if one.fits]
        windows = {one: self._assembler.window(AppendBatch(one.partition, one.queue)) for one in fitting}
        checked = [one for one in fitting if one.named and windows[one] > 0]
        new = set(fitting) - set(checked)
        if checked:
            new |= set(await ids.check(checked, [windows[one] for one in checked]))
        return [one for one in fitting if one in new]

    def _by_partition(self, rows: Sequence[Record]) -> list[StagedRows]:
        """In ascending order of the partitions' ids: the order of all locks."""
        staged: dict[tuple[str, str], StagedRows] = {}
        for row in rows:
            target = row["queue"], row["partition"]
            one = staged.get(target)
            if one is None:
                queue = self.catalog.cached_queue(target[0])
                partition = self.catalog.cached_partition_in(queue, target[1]) if queue is not None else None
                if queue is None or partition is None:
                    raise QueueChanged("a queue was changed while it was published to")
                one = staged[target] = StagedRows(partition, queue)
            one.rows.append(row)
        return sorted(staged.values(), key=lambda one: one.partition.id)

    async def _append(self, transaction: Fetcher, publishing: _Publishing, staged: Sequence[StagedRows]) -> None:
        """Store what is staged as a push would."""
        publishing.checked |= {one.partition for one in staged}
        batches = await self._append_batches(transaction, publishing, staged)
        if await self._appender.append_locked(transaction, batches) is None:
            raise QueueChanged("a queue was deleted while it was published to")
        for one in batches:
            if one.outcomes is not None and ItemOutcome.REFUSED in one.outcomes:
                raise Conflict(one.refusal)
            publishing.add(one.partition, one.count, one.size - one.count)

    async def _append_batches(
        self, transaction: Fetcher, publishing: _Publishing, staged: Sequence[StagedRows]
    ) -> list[AppendBatch]:
        rows = [row for one in staged for row in one.rows]
        bodies = await transaction.fetch(
            "stage_bodies", *publishing.key, [row["attempt"] for row in rows], [row["seq"] for row in rows]
        )
        check_found(rows, bodies)
        rest = iter(bodies)
        batches = []
        for one in staged:
            batch = AppendBatch(one.partition, one.queue)
            for row in one.rows:
                batch.add(self._slice(row, next(rest), one))
            batches.append(batch)
        return batches

    def _slice(self, row: Record, stored: Record, staged: StagedRows) -> PushSlice:
        """The messages of a staged segment; packed already, if that is how they are to be stored."""
        sealed: bytes = stored["body"]
        plain = self.envelope.open(sealed)
        segment = Segment(0, datetime.now(UTC), _NOT_YET, plain)
        segment.check()
        target = staged.queue.name, staged.partition.name
        ids = segment.transaction_ids()
        payloads = [segment.payload(index) for index in range(segment.count)]
        part = PushSlice(
            StageSender(),
            target,
            [
                PushItem(*target, msgspec.Raw(payload), id, segment.trace_id(index) or "")
                for index, (payload, id) in enumerate(zip(payloads, ids, strict=True))
            ],
            None,
            subjects=[segment.producer(index) for index in range(segment.count)],
        )
        if row["partition_id"] != staged.partition.id or is_encrypted(row) != staged.queue.encryption_enabled:
            self.preparer.prepare(part, staged.partition, staged.queue)
            return part
        part.partition = staged.partition
        part.lengths = [len(payload) for payload in payloads]
        part.hashes = array("Q", stored["hashes"]).tolist()
        part.transactions = [_encode(id) for id in ids]
        block = self.ids.block(segment.count)
        part.chunks = [Chunk(block, segment.count, part.hashes, block.pack() + stored["hashes"], plain, sealed)]
        return part

    async def _publish_items(self, transaction: Transaction, publishing: _Publishing, rows: Sequence[Record]) -> None:
        for row in rows:
            found = await transaction.fetch("stage_bodies", *publishing.key, [row["attempt"]], [row["seq"]])
            check_found([row], found)
            items = decode_enqueue_items(self.envelope.open(found[0]["body"]), "staged items")
            await self._topics.admit(items)
            publishing.note_topics(
                await self._topics.enqueue_in(transaction, [Entry(item) for item in items]), len(items)
            )


class _Publishing:
    """The progress of publishing a batch."""

    def __init__(self, run: str, batch: int) -> None:
        self.key = (run, batch)
        self.messages = 0
        self.duplicates = 0
        self._removed = False
        self.checked: set[Partition] = set()
        self.appended: list[Appended] = []
        self.topics: list[Stored] = []

    def add(self, partition: Partition, messages: int, duplicates: int = 0) -> None:
        self.messages += messages
        self.duplicates += duplicates
        if messages:
            self.appended.append((partition, messages))

    def note_topics(self, stored: Stored, sent: int) -> None:
        count = stored.items.total()
        self.topics.append(stored)
        self.messages += count
        self.duplicates += sent - count

    @property
    def result(self) -> Published:
        return Published(self.messages, self.duplicates)

    async def remove_staged(self, transaction: Fetcher) -> None:
        """Once it is read: of a large batch, that takes as long as all the rest under the locks."""
        if not self._removed:
            self._removed = True
            await transaction.fetch("stage_remove", *self.key)

    async def finish(self, transaction: Fetcher) -> None:
        """Inside the transaction: record the result, remove what was staged, notify the servers."""
        await transaction.fetch("stage_note", self.key[0], self.messages, self.duplicates)
        await self.remove_staged(transaction)
        partitions = {partition.id: partition.queue_id for partition, _ in self.appended}
        if partitions:
            await transaction.fetch("stage_notify_partitions", list(partitions.values()), list(partitions))
        topics: set[TopicKey] = {key for stored in self.topics for key in stored.due}
        if topics:
            await transaction.fetch("stage_notify_topics", ["\n".join(key) for key in sorted(topics)])


async def _check_modes(transaction: Fetcher) -> None:
    (row,) = await transaction.fetch("push_maintenance_is_on")
    if row["enabled"]:
        raise Conflict("push maintenance is on: nothing was published, try again when it is off")


def _check_complete(rows: Sequence[Record], attempts: Sequence[Attempt]) -> None:
    found: dict[uuid.UUID, int] = dict.fromkeys((attempt.id for attempt in attempts), 0)
    for row in rows:
        found[row["attempt"]] += row["count"]
    for attempt in attempts:
        if found[attempt.id] != attempt.messages:
            raise StageLost(
                f"attempt {attempt.id} staged {attempt.messages} messages and {found[attempt.id]} of them are stored:"
                " PostgreSQL has crashed since, or they waited for more than a day; nothing was published,"
                " write the batch again"
            )


def _pieces(staged: Sequence[StagedRows]) -> Iterator[list[StagedRows]]:
    """Cut what is staged into pieces that fit into memory, each with a partition at most once."""
    piece: list[StagedRows] = []
    nbytes = messages = 0
    for one in staged:
        part = StagedRows(one.partition, one.queue)
        for row in one.rows:
            if messages and (nbytes + row["nbytes"] > _PIECE_BYTES or messages + row["count"] > _PIECE_MESSAGES):
                yield [*piece, part] if part.rows else piece
                piece, part, nbytes, messages = [], StagedRows(one.partition, one.queue), 0, 0
            part.rows.append(row)
            nbytes += row["nbytes"]
            messages += row["count"]
        piece.append(part)
    if piece:
        yield piece

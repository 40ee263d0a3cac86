"""Appending rows of the inbox: messages as a push would store them, items as an enqueue would.

What a push is refused for after the caller's transaction has committed (its queue is full, its namespace over quota)
must not vanish: it becomes a dead letter, with the reason, in the same transaction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from queen.broker.push.pusher import Pusher
from queen.broker.topics.topics import Topics
from queen.errors import BadRequest, QueenError, QuotaExceeded
from queen.log.append_batch import AppendBatch, ItemOutcome
from queen.log.catalog import QUEUE_MODE, Catalog
from queen.log.quotas import Quotas
from queen.log.slices import PushSlice, Target
from queen.log.stages import StageSender
from queen.log.topic_store import Entry, ItemIds, Stored, TopicStore
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, Record
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem, check_items
from queen.wire.topics.requests import EnqueueItem, decode_enqueue_items

_SLOW_SECONDS: Final = 60.0
"""What waited for longer is checked against a window that reaches further back, as if it had been pushed then."""
_PLACES: Final = 1 << 20
"""More than the largest number of messages in a row."""
_BEFORE_ALL: Final = -(1 << 62)
"""Dead letters that never had an offset count from here, so that they are retried in the order of their pushes."""

_Dead: TypeAlias = tuple[EnqueueItem, str]
"""An item, and why it was refused."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_payloads = msgspec.json.Decoder(list[msgspec.Raw])


class InboxRow(Protocol):
    """Messages for one partition: a row of the inbox, or what has the same fields."""

    def __getitem__(self, field: str, /) -> Any: ...


class QueuesHeld(QueenError):
    """Nothing may be appended to some queues for a while; nothing was."""

    def __init__(self, queues: Collection[str], seconds: float, reason: str) -> None:
        super().__init__(reason)
        self.queues = queues
        self.seconds = seconds


class ItemRules(Protocol):
    """What holds for the items of a namespace."""

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        """Count items against their quotas. Raises `QuotaExceeded` or `BadRequest`."""
        ...

    async def duplicates(self, items: Sequence[EnqueueItem]) -> Collection[int]:
        """Places of items whose idempotency keys belong to items of other shards."""
        ...


class QuotaRules:
    """The rules where one database holds all topics."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        await self._quotas.admit(items)

    async def duplicates(self, items: Sequence[EnqueueItem]) -> Collection[int]:
        return ()


@dataclass(slots=True)
class Appended:
    """What one transaction appended, to be announced once it is committed."""

    batches: list[AppendBatch] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    items: Stored = field(default_factory=Stored)
    stored: int = 0
    duplicates: int = 0
    dead: int = 0


class InboxAppender:
    """Appends rows inside the transaction that takes them out of the inbox."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        topics: Topics,
        envelope: Envelope,
        ids: IdSource,
        meter: Meter,
    ) -> None:
        self._catalog = catalog
        self._pusher = pusher
        self._topics = topics
        self._envelope = envelope
        self._ids = ids
        self._meter = meter
        self._item_ids = ItemIds(database, None)
        self._store = TopicStore(topics.catalog, self._item_ids)
        self.rules: ItemRules = QuotaRules(topics.quotas)

    async def append(self, fetcher: Fetcher, rows: Sequence[Record]) -> Appended:
        """Append rows in their order. Raises `QueuesHeld` when some have to wait, and whatever a push raises."""
        appended = Appended()
        await self.append_messages(fetcher, [row for row in rows if not row["topic"]], appended)
        await self._append_items(fetcher, [row for row in rows if row["topic"]], appended)
        await fetcher.fetch("inbox_count", appended.stored, appended.duplicates, appended.dead)
        return appended

    def settle(self, appended: Appended) -> None:
        """Committed: notify the workers, and wake waiting pops and dequeues."""
        if appended.batches:
            self._pusher.settle_batches(appended.batches, appended.times)
        self._topics.transaction_ops.settle(appended.items)

    async def append_messages(
        self,
        fetcher: Fetcher,
        rows: Sequence[InboxRow],
        appended: Appended,
        producer_of: Callable[[InboxRow], str | None] = lambda row: None,
    ) -> None:
        """Append messages alone, and note in `appended` what came of them.

        Rows that were written by SQL have no token that says who their producer is.
        """
        if not rows:
            return
        by_target: dict[Target, list[InboxRow]] = {}
        for row in rows:
            by_target.setdefault((row["queue"], row["partition"]), []).append(row)
        slices = [
            PushSlice(StageSender(producer), target, self._messages(target, list(some)), None)
            for target, own in by_target.items()
            for producer, some in itertools.groupby(own, producer_of)
        ]
        for slice_ in slices:
            check_items(slice_.items)
        await self._make_ready(list(by_target))
        batches = self._pusher.batches_of(slices)
        waited = time.time() - min(row["pushed_at"] for row in rows).timestamp()
        if waited > _SLOW_SECONDS:
            for batch in batches:
                batch.waited = waited
        appended.times = await self._pusher.append_in(fetcher, batches)
        appended.batches = batches
        for batch in batches:
            appended.stored += batch.count
            if batch.outcomes is None:
                continue
            appended.duplicates += batch.outcomes.count(ItemOutcome.DUPLICATE)
            if ItemOutcome.REFUSED in batch.outcomes:
                appended.dead += await self._dead_letter(fetcher, batch, by_target[batch.slices[0].target], producer_of)

    def _messages(self, target: Target, rows: Sequence[InboxRow]) -> list[PushItem]:
        items: list[PushItem] = []
        for row in rows:
            payloads = _payloads.decode(row["body"])
            given: Sequence[str | None] | None = row["transaction_ids"]
            trace_id = str(row["trace_id"]) if row["trace_id"] is not None else ""
            if given is None:
                given = [transaction_id(row)] if len(payloads) == 1 else self._make_ids(len(payloads))
            if len(given) != len(payloads):
                raise BadRequest(f"row {row['id']} has {len(payloads)} payloads, and {len(given)} transaction ids")
            items += [
                PushItem(*target, payload, id or self._ids.uuid(), trace_id)
                for payload, id in zip(payloads, given, strict=True)
            ]
        return items

    def _make_ids(self, count: int) -> list[str]:
        block = self._ids.block(count)
        prefix, low = block.prefix.decode(), block.low
        return [f"{prefix}{low + index:012x}" for index in range(count)]

    async def _make_ready(self, targets: Sequence[Target]) -> None:
        """Make queues and partitions. Raises `QueuesHeld` for those that nothing may be appended to now."""
        spooled = {queue for queue, _ in self._pusher.spooled(targets)}
        if spooled:
            raise QueuesHeld(spooled, 0.1, "messages that were pushed before are in the spool")
        await self._catalog.ensure_partitions(targets)
        if self._envelope.can_encrypt:
            return
        queues = [self._catalog.cached_queue(name) for name in {name for name, _ in targets}]
        encrypted = {queue.name for queue in queues if queue is not None and queue.encryption_enabled}
        if encrypted:
            raise QueuesHeld(encrypted, 30.0, "encrypted queue, and the server has no QUEEN_ENCRYPTION_KEY")

    async def _dead_letter(
        self,
        fetcher: Fetcher,
        batch: AppendBatch,
        rows: Sequence[InboxRow],
        producer_of: Callable[[InboxRow], str | None],
    ) -> int:
        """Keep messages that do not fit their queue as its dead letters; they have no offset, so theirs is negative."""
        assert batch.outcomes is not None
        group_id = await self._catalog.group(QUEUE_MODE)
        queue, partition, encrypt = batch.queue, batch.partition, batch.queue.encryption_enabled
        letters = [
            (
                queue.id,
                partition.id,
                _BEFORE_ALL + row["id"] * _PLACES + index,
                group_id,
                self._ids.uuid(),
                item.transaction_id,
                item.trace_id or None,
                producer_of(row),
                self._envelope.seal(bytes(item.payload), encrypt=encrypt),
                batch.refusal,
                0,
                row["pushed_at"],
            )
            for (row, index), item, outcome in zip(_origins(rows), batch.items(), batch.outcomes, strict=True)
            if outcome is ItemOutcome.REFUSED
        ]
        await fetcher.fetch("insert_dead_letters", *[list(column) for column in zip(*letters, strict=True)])
        self._meter.acked(queue.name, 0, 0, len(letters), requests=0)
        return len(letters)

    async def _append_items(self, fetcher: Fetcher, rows: Sequence[Record], appended: Appended) -> None:
        entries: list[Entry] = []
        dead: list[_Dead] = []
        for row in rows:
            items = decode_enqueue_items(row["body"].encode(), "inbox")
            try:
                await self.rules.admit(items)
            except (QuotaExceeded, BadRequest) as error:
                dead += [(item, str(error)) for item in items]
                continue
            duplicates = await self.rules.duplicates(items)
            entries += [Entry(item) for place, item in enumerate(items) if place not in duplicates]
            appended.duplicates += len(duplicates)
        appended.items = await self._store.store(fetcher, entries)
        stored = appended.items.items.total()
        appended.stored += stored
        appended.duplicates += len(entries) - stored
        appended.dead += len(dead)
        if dead:
            await self._dead_letter_items(fetcher, dead)

    async def _dead_letter_items(self, fetcher: Fetcher, dead: Sequence[_Dead]) -> None:
        topics = await self._topics.catalog.ensure({(item.namespace, item.topic) for item, _ in dead})
        ids = await self._item_ids.take(len(dead))
        letters = [
            (
                id,
                topics[item.namespace, item.topic].id,
                item.priority or 0,
                item.is_json,
                item.deliver_after,
                item.idempotency_key,
                reason,
                item.stored_metadata,
                item.stored_payload,
            )
            for id, (item, reason) in zip(ids, dead, strict=True)
        ]
        await fetcher.fetch("inbox_dead_items", *[list(column) for column in zip(*letters, strict=True)])
        for item, _ in dead:
            self._meter.topic_items("dead", item.namespace, item.topic, 1)


def transaction_id(row: InboxRow) -> str:
    """The id of a message that was pushed without one: the caller has been given it by `queen.push`."""
    return f"sql-{row['id']}-{(row['pushed_at'] - _EPOCH) // _MICROSECOND}"


def _origins(rows: Sequence[InboxRow]) -> Iterator[tuple[InboxRow, int]]:
    """For each message of rows, its row and its place in it."""
    for row in rows:
        for index in range(len(_payloads.decode(row["body"]))):
            yield row, index

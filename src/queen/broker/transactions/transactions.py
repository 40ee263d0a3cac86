"""Transactions: pushes, enqueues and acknowledgments that happen together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from queen.broker.ack.cursors import CursorKey, apply_decisions, lock_cursors
from queen.broker.ack.leases import LeaseBook, OnFreed
from queen.broker.ack.rules import INVALID_LEASE, NOT_FOUND, Ack, Cursor, Decision, decide_in_transaction, parse_status
from queen.broker.push.pusher import NotStored, Pusher, StoredPush
from queen.broker.state.key_values import KeyValues, PreconditionLost
from queen.broker.state.timers import Timers
from queen.broker.topics.transaction_ops import TopicTransactionOps
from queen.log.catalog import QUEUE_MODE, Catalog, Partition, Queue
from queen.log.segments import leased_offsets, locate
from queen.log.topic_store import Entry
from queen.metrics.meter import Meter
from queen.storage.database import Database, Transaction, TransactionRefused, retry_transaction
from queen.wire.api.messages.messaging import (
    AckDone,
    AckItemDone,
    EnqueueDone,
    KvDone,
    OperationResult,
    PushDone,
    TimerDone,
    TransactionResult,
)
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource, is_uuid, parse_partition_uuid
from queen.wire.segment import transaction_hash
from queen.wire.state.kv import KvResult
from queen.wire.state.timers import TimerResult
from queen.wire.transaction import (
    AckItemOperation,
    AckOperation,
    EnqueueOperation,
    KvRider,
    Operation,
    PushOperation,
    TimerRider,
    UnknownOperation,
)


class Transactions:
    """Runs transactions on one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        leases: LeaseBook,
        envelope: Envelope,
        ids: IdSource,
        on_freed: OnFreed,
        meter: Meter,
        topics: TopicTransactionOps,
        key_values: KeyValues,
        timers: Timers,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._pusher = pusher
        self._leases = leases
        self._envelope = envelope
        self._ids = ids
        self._on_freed = on_freed
        self._meter = meter
        self._topics = topics
        self._key_values = key_values
        self._timers = timers

    async def run(self, operations: Sequence[Operation], subject: str | None = None) -> TransactionResult:
        """Carry out all operations, or none; the answer says which, and why not."""
        result = TransactionResult(self._ids.uuid(), True, [])
        await self._topics.admit([one.item for one in operations if isinstance(one, EnqueueOperation)])
        try:
            result.results = await retry_transaction(lambda: self._run(operations, subject))
        except PreconditionLost as lost:
            kv = lost.result
            result.reason, result.failed_index, result.kv_reason = "kv_precondition", kv.index, kv.reason
            result.version, result.value = kv.version, kv.value
            result.success, result.error = False, f"{lost}; the transaction was rolled back"
        except (TransactionRefused, NotStored) as refused:
            result.success, result.error = False, f"{refused}; the transaction was rolled back"
        return result

    async def _run(self, operations: Sequence[Operation], subject: str | None) -> list[OperationResult]:
        for operation in operations:
            if isinstance(operation, UnknownOperation):
                raise TransactionRefused(f"Unknown operation type: {operation.type}")
        acks = [operation for operation in operations if isinstance(operation, AckOperation)]
        items = [operation.item for operation in operations if isinstance(operation, PushOperation)]
        places = await self._places(acks)
        partitions = await self._catalog.partitions_by_id({pid for pid, _ in places})
        queues: dict[CursorKey, Queue | None] = {
            key: await self._catalog.queue_of(partitions[key[0]]) for key in set(places) if key[0] in partitions
        }
        await self._pusher.prepare(items)
        refs = [operation.ref for operation in operations if isinstance(operation, AckItemOperation)]
        entries = [Entry(operation.item) for operation in operations if isinstance(operation, EnqueueOperation)]
        riders = [operation.operation for operation in operations if isinstance(operation, KvRider)]
        timers = [operation.operation for operation in operations if isinstance(operation, TimerRider)]
        first = len(operations) - len(riders) - len(timers)
        await self._key_values.prepare(riders)
        await self._timers.prepare(timers)
        async with self._database.transaction() as transaction:
            # First, because every transaction that locks keys and cursors locks keys first.
            kv = await self._key_values.run_in(transaction, riders, first)
            timed = await self._timers.run_in(transaction, timers, subject, first + len(riders))
            decisions, outcomes, available = await self._ack(transaction, acks, places, partitions, queues)
            stored = await self._pusher.store_in(transaction, items, subject)
            await self._topics.ack_in(transaction, refs)
            enqueued = await self._topics.enqueue_in(transaction, entries)
        self._settle(decisions, available, partitions, stored)
        self._count(decisions, partitions, stored)
        self._topics.settle(enqueued)
        self._timers.settle(timed)
        self._key_values.count(riders, kv)
        results = _results(operations, outcomes, stored, entries)
        return [*results, *[KvDone(**_fields(one)) for one in kv], *[TimerDone(**_fields(one)) for one in timed]]

    async def _places(self, acks: Sequence[AckOperation]) -> list[CursorKey]:
        places = []
        for ack in acks:
            partition = parse_partition_uuid(ack.partition_id)
            if partition is None:
                raise TransactionRefused(f"ACK operation failed: {NOT_FOUND}")
            if ack.lease_id and not is_uuid(ack.lease_id):
                raise TransactionRefused(f"ACK operation failed: {INVALID_LEASE}")
            places.append((partition, await self._catalog.group_on(ack.group or QUEUE_MODE, [partition])))
        return places

    async def _ack(
        self,
        transaction: Transaction,
        acks: Sequence[AckOperation],
        places: Sequence[CursorKey],
        partitions: dict[int, Partition],
        queues: dict[CursorKey, Queue | None],
    ) -> tuple[dict[CursorKey, Decision], list[bool], dict[CursorKey, int]]:
        """Apply the acknowledgments; for each, whether its message became a dead letter."""
        if not acks:
            return {}, [], {}
        if any(key[0] not in partitions for key in places):
            raise TransactionRefused(f"ACK operation failed: {NOT_FOUND}")
        leaseless = {key for ack, key in zip(acks, places, strict=True) if not ack.lease_id}
        cursors: dict[CursorKey, Cursor] = await lock_cursors(transaction, set(places), make=leaseless)
        for key in places:
            if key not in cursors:
                raise TransactionRefused(f"ACK operation failed: {NOT_FOUND if key in leaseless else INVALID_LEASE}")
        offsets = await self._offsets(transaction, acks, places)
        by_cursor: dict[CursorKey, list[int]] = {}
        for index, key in enumerate(places):
            by_cursor.setdefault(key, []).append(index)
        decisions: dict[CursorKey, Decision] = {}
        dead = [False] * len(acks)
        for key, indexes in by_cursor.items():
            chosen = []
            for index in indexes:
                ack = acks[index]
                status = parse_status(ack.status)
                if status is None:
                    raise TransactionRefused("ACK operation failed: Unknown error")
                chosen.append(Ack(offsets[index], status, ack.lease_id, ack.error))
            decision = decisions[key] = decide_in_transaction(cursors[key], chosen)
            for index, outcome in zip(indexes, decision.outcomes, strict=True):
                if not outcome.success:
                    raise TransactionRefused(f"ACK operation failed: {outcome.error}")
                dead[index] = outcome.dlq
        available = await apply_decisions(transaction, self._envelope, cursors, decisions, partitions, queues)
        return decisions, dead, available

    async def _offsets(
        self, transaction: Transaction, acks: Sequence[AckOperation], places: Sequence[CursorKey]
    ) -> list[int]:
        """The offset of each acknowledged message."""
        found = [-1] * len(acks)
        for index, (ack, (partition_id, group_id)) in enumerate(zip(acks, places, strict=True)):
            lease = self._leases.of_cursor(partition_id, group_id)
            if lease is not None:
                found[index] = lease.offsets().get(ack.transaction_id, -1)
        missing = [index for index, offset in enumerate(found) if offset < 0]
        if missing:
            spans = await leased_offsets(transaction, {places[index] for index in missing})
            for index in missing:
                key = transaction_hash(acks[index].transaction_id, places[index][0])
                found[index] = spans.get(places[index], {}).get(key, -1)
        for index in [index for index in missing if found[index] < 0]:
            partition_id = places[index][0]
            offsets = await locate(transaction, partition_id, [acks[index].transaction_id])
            if not offsets:
                raise TransactionRefused(f"ACK operation failed: {NOT_FOUND}")
            found[index] = offsets[acks[index].transaction_id]
        return found

    def _settle(
        self,
        decisions: dict[CursorKey, Decision],
        available: dict[CursorKey, int],
        partitions: dict[int, Partition],
        stored: StoredPush,
    ) -> None:
        """After the commit: update caches and publish notifications."""
        self._pusher.settle(stored)
        self._on_freed(
            [
                (partitions[key[0]].queue_id, *key, available.get(key, 0))
                for key, decision in decisions.items()
                if decision.released
            ]
        )

    def _count(
        self, decisions: dict[CursorKey, Decision], partitions: dict[int, Partition], stored: StoredPush
    ) -> None:
        """Count the operations in the meter; pushed messages are counted where they are stored."""
        touched = {partition.queue_name for _, partition in stored.messages}
        for key, decision in decisions.items():
            queue = partitions[key[0]].queue_name
            dead = len(decision.dead)
            self._meter.acked(queue, len(decision.outcomes) - dead, dead, dead, requests=0)
            touched.add(queue)
        self._meter.transacted(touched)


def _fields(result: KvResult | TimerResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


def _results(
    operations: Sequence[Operation], dead: Sequence[bool], stored: StoredPush, entries: Sequence[Entry]
) -> list[OperationResult]:
    results: list[OperationResult] = []
    dead_letters, messages, enqueued = iter(dead), iter(stored.messages), iter(entries)
    for index, operation in enumerate(operations):
        if isinstance(operation, PushOperation):
            message_id, partition = next(messages)
            transaction_id = operation.item.transaction_id
            results.append(PushDone(index, True, transaction_id, message_id, partition.uuid, partition.queue_name))
        elif isinstance(operation, AckOperation):
            results.append(AckDone(index, True, operation.transaction_id, None, next(dead_letters)))
        elif isinstance(operation, EnqueueOperation):
            results.append(EnqueueDone(index, True, str(next(enqueued).id)))
        elif isinstance(operation, AckItemOperation):
            results.append(AckItemDone(index, True, str(operation.ref.number)))
    return results

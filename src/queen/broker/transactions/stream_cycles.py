"""Cycles of streaming queries: state, what they push, and the ack of what they read, together or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from queen.broker.ack.cursors import CursorKey, apply_decisions, lock_cursors
from queen.broker.ack.leases import LeaseBook, OnFreed, find_offset
from queen.broker.ack.rules import (
    INVALID_LEASE,
    NOT_FOUND,
    Ack,
    AckStatus,
    Cursor,
    Decision,
    decide_cycle,
    parse_status,
)
from queen.broker.push.pusher import NotStored, Pusher, StoredPush
from queen.broker.transactions.stream_queries import StreamQueries
from queen.log.catalog import QUEUE_MODE, Catalog, Partition, Queue
from queen.storage.database import Database, Transaction, TransactionRefused, retry_transaction
from queen.wire.api.messages.messaging import PushResult
from queen.wire.api.resources.streams import Cycle, CycleAck, StreamAckResult, StreamCycleResult, window_end
from queen.wire.envelope import Envelope
from queen.wire.ids import is_uuid, partition_number


class StateConflict(TransactionRefused):
    """The state is not what the cycle was computed from."""

    def __init__(self, key: str) -> None:
        super().__init__(f"State changed since it was read: {key}")


@dataclass(frozen=True, slots=True)
class _CycleContext:
    """What a cycle names, looked up."""

    query: int | None
    partition: Partition
    queue: Queue | None
    group: int
    ack_status: AckStatus


@dataclass(frozen=True, slots=True)
class _Acked:
    """What is to become of the cursor."""

    key: CursorKey
    cursor: Cursor
    decision: Decision


class StreamCycles:
    """Carries out cycles on one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        queries: StreamQueries,
        pusher: Pusher,
        leases: LeaseBook,
        envelope: Envelope,
        on_freed: OnFreed,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._queries = queries
        self._pusher = pusher
        self._leases = leases
        self._envelope = envelope
        self._on_freed = on_freed

    async def run(self, cycle: Cycle, subject: str | None = None) -> StreamCycleResult:
        """Carry out all of the cycle, or nothing; the result says which, and why not."""
        queue_name = None
        try:
            context = await self._look_up(cycle)
            queue_name = context.partition.queue_name
            return await retry_transaction(lambda: self._run(cycle, context, subject))
        except StateConflict as error:
            await self._release(cycle.ack, context)
            refused = str(error)
        except (TransactionRefused, NotStored) as error:
            refused = str(error)
        return StreamCycleResult(False, cycle.query_id, cycle.partition_id, queue_name, 0, [], None, error=refused)

    async def _look_up(self, cycle: Cycle) -> _CycleContext:
        if cycle.refusal:
            raise TransactionRefused(cycle.refusal)
        if not is_uuid(cycle.query_id):
            raise TransactionRefused(f"query_id must be a UUID, not {cycle.query_id!r}")
        query = await self._queries.internal_id(cycle.query_id)
        if query is None and cycle.state:
            raise TransactionRefused(f"Query not found: {cycle.query_id}; register it first")
        partition_id = partition_number(cycle.partition_id)
        partition = (await self._catalog.partitions_by_id([partition_id])).get(partition_id)
        if partition is None:
            raise TransactionRefused(NOT_FOUND if cycle.ack else f"Partition not found: {cycle.partition_id}")
        queue = await self._catalog.queue_of(partition)
        if cycle.state and queue is not None and queue.encryption_enabled and not self._envelope.can_encrypt:
            raise TransactionRefused(f"queue {queue.name!r} is encrypted and the server has no QUEEN_ENCRYPTION_KEY")
        group = await self._catalog.group(cycle.group or QUEUE_MODE)
        return _CycleContext(query, partition, queue, group, _status(cycle.ack))

    async def _run(self, cycle: Cycle, context: _CycleContext, subject: str | None) -> StreamCycleResult:
        done = StreamCycleResult(
            True, cycle.query_id, cycle.partition_id, context.partition.queue_name, len(cycle.state), [], None
        )
        await self._pusher.prepare(cycle.items)
        async with self._database.transaction() as transaction:
            if context.query is not None:
                await transaction.fetch("lock_stream", context.query, context.partition.id)
            acked = await self._decide(transaction, cycle.ack, context, release=cycle.release_lease)
            if acked is None and cycle.ack is not None:
                done.ack_result = StreamAckResult(True, cycle.ack.count, cycle.release_lease, False)
                done.state_ops_applied, done.replayed = 0, True
                return done
            await _check_unchanged(transaction, cycle, context)
            await self._change_state(transaction, cycle, context)
            stored, results = await self._pusher.store_new_in(transaction, cycle.items, subject)
            available = await self._save(transaction, acked, context)
        self._settle(cycle.ack, acked, available, context, stored)
        # They are JSON already.
        done.push_results = cast(list[PushResult], msgspec.Raw(results))
        if acked is not None and cycle.ack is not None:
            (outcome,) = acked.decision.outcomes
            done.ack_result = StreamAckResult(True, cycle.ack.count, outcome.released, outcome.dlq)
        return done

    async def _decide(
        self, transaction: Transaction, ack: CycleAck | None, context: _CycleContext, *, release: bool
    ) -> _Acked | None:
        """Lock the cursor and decide what the ack does to it; None when it was applied before, or there is none."""
        if ack is None:
            return None
        if ack.lease_id and not is_uuid(ack.lease_id):
            raise TransactionRefused(INVALID_LEASE)
        key = (context.partition.id, context.group)
        cursors = await lock_cursors(transaction, [key], make=[] if ack.lease_id else [key])
        if key not in cursors:
            raise TransactionRefused(INVALID_LEASE if ack.lease_id else NOT_FOUND)
        offset = await find_offset(transaction, self._envelope, self._leases, *key, ack.transaction_id)
        if offset is None:
            raise TransactionRefused(NOT_FOUND)
        chosen = Ack(offset, context.ack_status, ack.lease_id, ack.error)
        decision = decide_cycle(cursors[key], chosen, count=ack.count, release=release)
        if decision is None:
            return None
        if not decision.outcomes[0].success:
            raise TransactionRefused(decision.outcomes[0].error or "Unknown error")
        return _Acked(key, cursors[key], decision)

    async def _change_state(self, transaction: Transaction, cycle: Cycle, context: _CycleContext) -> None:
        if not cycle.state:
            return
        place = (context.query, context.partition.id)
        # Operations apply in order: of each key the last one counts, and a delete finds what came before it.
        last = {operation.key: operation for operation in cycle.state}
        made = {operation.key for operation in cycle.state if operation.value is not None}
        gone = sorted(key for key, operation in last.items() if operation.value is None)
        if gone:
            deleted = {row["key"] for row in await transaction.fetch("delete_stream_state", *place, gone)}
            _check_deleted(cycle, set(gone) - deleted - made)
        written = sorted((key, operation.value) for key, operation in last.items() if operation.value is not None)
        if written:
            encrypt = context.queue is not None and context.queue.encryption_enabled
            stored = await transaction.fetch(
                "upsert_stream_state",
                *place,
                [key for key, _ in written],
                [self._envelope.seal(bytes(value), encrypt=encrypt) for _, value in written],
                [window_end(value) for _, value in written],
            )
            if not stored:
                raise _deleted(cycle)

    async def _save(self, transaction: Transaction, acked: _Acked | None, context: _CycleContext) -> int:
        if acked is None:
            return 0
        available = await apply_decisions(
            transaction,
            self._envelope,
            {acked.key: acked.cursor},
            {acked.key: acked.decision},
            {context.partition.id: context.partition},
            {acked.key: context.queue},
        )
        return available.get(acked.key, 0)

    async def _release(self, ack: CycleAck | None, context: _CycleContext) -> None:
        """The cycle is computed again from its messages: popping them need not wait for the lease to expire."""
        if ack is None or not ack.lease_id:
            return
        released = await self._database.fetch("release_leases", [context.partition.id], [ack.lease_id])
        for row in released:
            self._leases.finish(ack.lease_id, context.partition.id)
            self._on_freed([(row["queue_id"], row["partition_id"], row["group_id"], row["available"])])

    def _settle(
        self, ack: CycleAck | None, acked: _Acked | None, available: int, context: _CycleContext, stored: StoredPush
    ) -> None:
        """Committed: notify the waiting pops."""
        self._pusher.settle(stored)
        if ack is None or acked is None or not acked.decision.released:
            return
        self._leases.finish(ack.lease_id, context.partition.id)
        self._on_freed([(context.partition.queue_id, *acked.key, available)])


def _status(ack: CycleAck | None) -> AckStatus:
    status = parse_status(ack.status) if ack is not None else AckStatus.COMPLETED
    if status is None or status is AckStatus.RETRY:
        raise TransactionRefused(f"Unknown ack.status: {ack.status if ack else ''}")
    return status


async def _check_unchanged(transaction: Transaction, cycle: Cycle, context: _CycleContext) -> None:
    """It must still be the query, and the state, that the cycle was made from."""
    expected: dict[str, int | None] = {}
    for operation in cycle.state:
        # Later operations on the same key apply to what the first one left.
        if operation.guarded and operation.key not in expected:
            expected[operation.key] = operation.version
    if context.query is None or (cycle.config_hash is None and not expected):
        return
    rows = await transaction.fetch("stream_versions", context.query, context.partition.id, list(expected))
    if not rows:
        raise _deleted(cycle)
    if cycle.config_hash is not None and rows[0]["config_hash"] != cycle.config_hash:
        raise TransactionRefused("config_hash mismatch: the query was registered again with other operators")
    versions = {row["key"]: row["version"] for row in rows}
    for key, version in expected.items():
        if versions.get(key) != version:
            raise StateConflict(key)


def _deleted(cycle: Cycle) -> TransactionRefused:
    return TransactionRefused(f"Query not found: {cycle.query_id} was deleted; register it again")


def _check_deleted(cycle: Cycle, absent: set[str]) -> None:
    """A cycle that pushes what a window came to deletes the window: another cycle that deleted it has pushed it too."""
    if absent and cycle.items:
        raise StateConflict(min(absent))

"""Acknowledging: gathered like pushes; whole leases in one statement, everything else under a row lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from queen.broker.ack.cursors import CursorKey, apply_decisions, lock_cursors
from queen.broker.ack.fast_path import AckFastPath, AckRequest, complete_leases
from queen.broker.ack.leases import LeaseBook, OnFreed
from queen.broker.ack.rules import INVALID_LEASE, UNRESOLVABLE, Ack, AckStatus, Decision, Outcome, decide, parse_status
from queen.broker.batcher import Batcher
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.segments import leased_offsets, locate
from queen.metrics.meter import Meter, clock
from queen.storage.database import Database, Link
from queen.wire.ack import AckItem
from queen.wire.envelope import Envelope
from queen.wire.ids import is_uuid, parse_partition_uuid
from queen.wire.segment import transaction_hash

T = TypeVar("T")

# How many items of a request are processed before the event loop runs other requests.
_ITEMS_AT_A_TIME = 2000

_encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class _Pending:
    """An item that is being processed, and its outcome."""

    item: AckItem
    partition_id: int
    group_id: int
    lease_id: str
    status: AckStatus | None
    offset: int = -1
    outcome: Outcome | None = None


class Acker:
    """Applies acknowledgments to one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        leases: LeaseBook,
        envelope: Envelope,
        on_freed: OnFreed,
        meter: Meter,
    ) -> None:
        self._link: Link = database.link()
        self._catalog = catalog
        self._leases = leases
        self._envelope = envelope
        self._on_freed = on_freed
        self._meter = meter
        self._whole = AckFastPath(catalog, leases, on_freed, meter)
        self.batcher: Batcher[AckRequest] = Batcher(
            self._run, weigh=lambda request: len(request.items), limit=5000, sizes=meter.ack_batches
        )

    def ack(self, items: list[AckItem], group: str, render: Callable[[bytes], T], *, batch: bool) -> asyncio.Future[T]:
        """Apply the items; the future gives what `render` makes of the JSON array of their results."""
        request = AckRequest(items, group, batch, render, asyncio.get_running_loop().create_future(), clock())
        self._meter.total.ack_requests += 1
        self.batcher.submit(request)
        return request.answer

    async def _run(self, batch: list[AckRequest]) -> None:
        rest = await self._whole.serve(self._link, batch)
        if rest:
            await self._apply_each(rest)

    async def _apply_each(self, batch: list[AckRequest]) -> None:
        """Apply requests whose items have to be decided one by one."""
        pending = [await self._identify(request) for request in batch]
        everything = [one for several in pending for one in several]
        await self._find_offsets([one for one in everything if one.outcome is None])
        by_cursor: dict[CursorKey, list[_Pending]] = {}
        for one in everything:
            if one.outcome is None:
                by_cursor.setdefault((one.partition_id, one.group_id), []).append(one)
        partitions = await self._catalog.partitions_by_id({one.partition_id for one in everything})
        slow = await self._apply_completed(by_cursor, partitions)
        waiting = self._answer(list(zip(batch, pending, strict=True)), partitions)
        if slow:
            await self._apply_under_locks(slow, partitions, batch)
            self._answer(waiting, partitions)

    def _answer(
        self, asked: list[tuple[AckRequest, list[_Pending]]], partitions: dict[int, Partition]
    ) -> list[tuple[AckRequest, list[_Pending]]]:
        """Answer the requests whose every item is decided; returns the others.

        What is applied is answered at once: a failure of a later step must not have it retried.
        """
        now = clock()
        waiting = []
        for request, own in asked:
            if any(one.outcome is None for one in own):
                waiting.append((request, own))
                continue
            self._count(own, partitions)
            self._meter.ack_latency.observe(now - request.began)
            request.resolve(_render(own, partitions))
        return waiting

    def _count(self, pending: list[_Pending], partitions: dict[int, Partition]) -> None:
        """Count the outcomes of the items of a request in the meter, by queue."""
        by_queue: dict[str | None, list[_Pending]] = {}
        for one in pending:
            partition = partitions.get(one.partition_id)
            by_queue.setdefault(partition.queue_name if partition else None, []).append(one)
        for queue, several in by_queue.items():
            completed = sum(
                1 for one in several if one.outcome and one.outcome.success and one.status is AckStatus.COMPLETED
            )
            dead = sum(1 for one in several if one.outcome and one.outcome.dlq)
            self._meter.acked(queue, completed, len(several) - completed, dead)

    async def _identify(self, request: AckRequest) -> list[_Pending]:
        """Read partition, lease and status of each item; what cannot be is answered here."""
        # The items of a batch mostly name the same partition, lease and status: each text is read once.
        partitions = {text: parse_partition_uuid(text) for text in {item.partition_id for item in request.items}}
        group_id = self._catalog.cached_group(request.group)
        if group_id is None:
            group_id = await self._catalog.group_on(request.group, {one for one in partitions.values() if one})
        leases = {text: is_uuid(text) for text in {item.lease_id or "" for item in request.items}}
        statuses = {text: parse_status(text or AckStatus.COMPLETED) for text in {item.status for item in request.items}}
        result: list[_Pending] = []
        for item in request.items:
            if len(result) % _ITEMS_AT_A_TIME == _ITEMS_AT_A_TIME - 1:
                await asyncio.sleep(0)
            partition, lease_id, status = partitions[item.partition_id], item.lease_id or "", statuses[item.status]
            one = _Pending(item, partition or 0, group_id, lease_id, status)
            if partition is None:
                one.outcome = Outcome(False, UNRESOLVABLE)
            elif status is None:
                one.outcome = Outcome(False, None)
            elif lease_id and not leases[lease_id]:
                one.outcome = Outcome(False, INVALID_LEASE)
            result.append(one)
        return result

    async def _find_offsets(self, pending: list[_Pending]) -> None:
        """Find each message: in the leases this worker gave, in the leases PostgreSQL knows, then anywhere."""
        missing = [one for one in pending if not self._find_in_book(one)]
        if not missing:
            return
        spans = await leased_offsets(self._link, {(one.partition_id, one.group_id) for one in missing})
        elsewhere: dict[int, list[_Pending]] = {}
        for one in missing:
            span = spans.get((one.partition_id, one.group_id), {})
            one.offset = span.get(transaction_hash(one.item.transaction_id, one.partition_id), -1)
            if one.offset < 0:
                elsewhere.setdefault(one.partition_id, []).append(one)
        for partition_id, several in elsewhere.items():
            found = await locate(self._link, partition_id, {one.item.transaction_id for one in several})
            for one in several:
                one.offset = found.get(one.item.transaction_id, -1)
                if one.offset < 0:
                    one.outcome = Outcome(False, UNRESOLVABLE)

    def _find_in_book(self, one: _Pending) -> bool:
        if one.lease_id:
            lease = self._leases.get(one.lease_id, one.partition_id)
        else:
            lease = self._leases.of_cursor(one.partition_id, one.group_id)
        if lease is None or lease.group_id != one.group_id:
            return False
        one.offset = lease.offsets().get(one.item.transaction_id, -1)
        return one.offset >= 0

    async def _apply_completed(
        self, by_cursor: dict[CursorKey, list[_Pending]], partitions: dict[int, Partition]
    ) -> dict[CursorKey, list[_Pending]]:
        """Apply cursors whose acks are all `completed` under one lease; returns the others."""
        slow: dict[CursorKey, list[_Pending]] = {}
        whole: list[tuple[CursorKey, list[_Pending]]] = []
        for key, several in by_cursor.items():
            lease_id = several[0].lease_id
            if lease_id and all(one.status is AckStatus.COMPLETED and one.lease_id == lease_id for one in several):
                whole.append((key, several))
            else:
                slow[key] = several
        if not whole:
            return slow
        whole.sort(key=lambda pair: pair[0])
        done = await complete_leases(
            self._link, [(key, several[0].lease_id, max(one.offset for one in several) + 1) for key, several in whole]
        )
        freed = []
        for position, (released, available, committed) in done.items():
            key, several = whole[position]
            # A cursor that is beyond all of them was so before.
            noop = committed > max(one.offset for one in several) + 1
            for one in several:
                one.outcome = Outcome(True, released=released, noop=noop)
            if released:
                self._leases.finish(several[0].lease_id, key[0])
                partition = partitions.get(key[0])
                if partition is not None:
                    freed.append((partition.queue_id, *key, available))
        self._on_freed(freed)
        slow.update({key: several for key, several in whole if several[0].outcome is None})
        return slow

    async def _apply_under_locks(
        self, slow: dict[CursorKey, list[_Pending]], partitions: dict[int, Partition], batch: list[AckRequest]
    ) -> None:
        """Failures, retries, dead letters, acks without a lease, late acks: decided with the cursors locked."""
        for key in [key for key in slow if key[0] not in partitions]:
            for one in slow.pop(key):
                one.outcome = Outcome(False, UNRESOLVABLE)
        queues = {key: await self._catalog.queue_of(partitions[key[0]]) for key in slow}
        single = {id(item) for request in batch if not request.batch for item in request.items}
        decisions: dict[CursorKey, Decision] = {}
        async with self._link.transaction():
            leaseless = [key for key, several in slow.items() if not all(one.lease_id for one in several)]
            cursors = await lock_cursors(self._link, list(slow), make=leaseless)
            for key in [key for key in slow if key not in cursors]:
                # The group or the partition was deleted, and this worker has not been notified yet.
                for one in slow.pop(key):
                    one.outcome = Outcome(False, INVALID_LEASE if one.lease_id else UNRESOLVABLE)
            for key, several in slow.items():
                acks = [
                    Ack(one.offset, one.status or AckStatus.COMPLETED, one.lease_id, _error_text(one.item, single))
                    for one in several
                ]
                queue: Queue | None = queues[key]
                decisions[key] = decide(
                    cursors[key],
                    acks,
                    retry_limit=queue.retry_limit if queue else 0,
                    retry_delay=queue.retry_delay / 1000 if queue else 0.0,
                )
            available = await apply_decisions(self._link, self._envelope, cursors, decisions, partitions, queues)
        freed = []
        for key, decision in decisions.items():
            for one, outcome in zip(slow[key], decision.outcomes, strict=True):
                one.outcome = outcome
            if decision.released:
                freed.append((partitions[key[0]].queue_id, *key, available.get(key, 0)))
        self._on_freed(freed)


def _error_text(item: AckItem, single: set[int]) -> str:
    """What the dead letter says when the client gave no reason."""
    if item.error:
        return item.error
    return "" if id(item) in single else "Retries exhausted"


def _render(pending: list[_Pending], partitions: dict[int, Partition]) -> bytes:
    out = []
    names: dict[int, bytes] = {}
    for index, one in enumerate(pending):
        outcome = one.outcome
        assert outcome is not None
        where = names.get(one.partition_id)
        if where is None:
            partition = partitions.get(one.partition_id)
            where = names[one.partition_id] = b'"queueName":%b,"partitionName":%b' % (
                _encode(partition.queue_name if partition else None),
                _encode(partition.name if partition else None),
            )
        out.append(
            b'{"index":%d,"transactionId":%b,"success":%b,"error":%b,%b,"leaseReleased":%b,"dlq":%b%b}'
            % (
                index,
                _encode(one.item.transaction_id),
                b"true" if outcome.success else b"false",
                _encode(outcome.error) if outcome.error else b"null",
                where,
                b"true" if outcome.released else b"false",
                b"true" if outcome.dlq else b"false",
                b',"noop":true' if outcome.noop else b"",
            )
        )
    return b"[" + b",".join(out) + b"]"

"""Redriving: copies of messages are stored at the tails of their partitions, and their dead letters removed.

A copy is a new message that every group of the queue gets. It keeps its transaction id when the partition accepts it;
inside the dedup window it cannot, and becomes `<id>:retry-1`, then `<id>:retry-2` when that copy is redriven.
Copies are stored and dead letters removed in one transaction, with the dead letters locked first: a second redrive,
or comes back after a crash, finds nothing left to do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import msgspec

from queen.broker.push.pusher import NotStored, Pusher, StoredPush
from queen.errors import Conflict, NotFound
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.dedup import Dedup
from queen.log.segments import Place, UnreadableSegment, find_message
from queen.storage.database import Database, Record, Transaction, TransactionAborted
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.push import LONGEST_NAME, PushItem
from queen.wire.segment import transaction_hash

_RETRIED = re.compile(r"(.*):retry-(\d{1,9})", re.DOTALL)
# Ages are measured by two clocks, this host's and PostgreSQL's.
_CLOCK_MARGIN = 60.0
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Copy:
    """A message to be stored again."""

    partition: Partition
    transaction_id: str
    payload: bytes
    trace_id: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Redriven:
    """What a message became."""

    transaction_id: str
    new_transaction_id: str
    new_message_id: str


@dataclass(frozen=True, slots=True)
class _Sent:
    messages: list[Redriven]
    letters: int
    stored: StoredPush


_Work: TypeAlias = Callable[[Transaction, bool], Awaitable[_Sent | None]]


class Redriver:
    """Stores copies on one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        dedup: Dedup,
        envelope: Envelope,
        *,
        dedup_window: float,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._pusher = pusher
        self._dedup = dedup
        self._envelope = envelope
        self._dedup_window = dedup_window

    async def message(self, queue: Queue, copy: Copy, producer: str | None) -> Redriven:
        """Store a copy of one message that is no dead letter."""
        return (await self.messages(queue, [copy], producer))[0]

    async def messages(self, queue: Queue, copies: Sequence[Copy], producer: str | None) -> list[Redriven]:
        """Store copies of messages of one producer that are no dead letters, all or none."""

        async def work(transaction: Transaction, keep_ids: bool) -> _Sent | None:
            return await self._store(transaction, queue, copies, producer, keep_ids)

        redriven, _ = await self._carry_out(queue, sorted({copy.partition.id for copy in copies}), work)
        return redriven

    async def letters(self, queue: Queue, places: Sequence[Place], group_id: int | None) -> tuple[list[Redriven], int]:
        """Store a copy of each message that still has dead letters (of the group, or any); all of one producer.

        Returns what they became, and how many dead letters were removed for it.
        """
        partition_ids = sorted({partition_id for partition_id, _ in places})
        partitions = await self._catalog.partitions_by_id(partition_ids)

        async def work(transaction: Transaction, keep_ids: bool) -> _Sent | None:
            rows = await transaction.fetch(
                "lock_dead_letters", [pid for pid, _ in places], [offset for _, offset in places], group_id
            )
            # A message may be the dead letter of several groups: it is redriven once for all of them.
            newest: dict[Place, Record] = {(row["partition_id"], row["message_offset"]): row for row in rows}
            if not newest:
                return None
            copies = [self._copy(newest[place], partitions) for place in sorted(newest)]
            sent = await self._store(transaction, queue, copies, rows[0]["producer_sub"], keep_ids)
            await transaction.fetch("delete_dead_letters", [row["id"] for row in rows])
            return _Sent(sent.messages, len(rows), sent.stored)

        return await self._carry_out(queue, partition_ids, work)

    async def _carry_out(self, queue: Queue, partition_ids: list[int], work: _Work) -> tuple[list[Redriven], int]:
        """Do the work in a transaction; again after a deadlock, and with new ids if the old ones exist already."""
        for attempt in range(1, _ATTEMPTS + 1):
            known = await self._catalog.queue(queue.name)
            partitions = await self._catalog.partitions_by_id(partition_ids)
            if known is None or known.id != queue.id or len(partitions) < len(partition_ids):
                raise NotFound("Queue not found")
            try:
                async with self._database.transaction() as transaction:
                    sent = await work(transaction, attempt == 1)
            except NotStored as error:
                if attempt > 1:
                    raise Conflict(str(error)) from error
                continue
            except TransactionAborted:
                if attempt == _ATTEMPTS:
                    raise
                continue
            if sent is None:
                return [], 0
            self._pusher.settle(sent.stored)
            return sent.messages, sent.letters
        raise Conflict("the messages could not be stored; try again")

    def _copy(self, row: Record, partitions: dict[int, Partition]) -> Copy:
        partition = partitions.get(row["partition_id"])
        if partition is None:
            raise NotFound("Queue not found")
        try:
            payload = self._envelope.open(row["body"])
        except EnvelopeError as error:
            raise UnreadableSegment(
                f"the dead letter of transaction {row['transaction_id']!r} cannot be read: {error}"
            ) from error
        return Copy(partition, row["transaction_id"], payload, row["trace_id"], row["original_created_at"])

    async def _store(
        self, transaction: Transaction, queue: Queue, copies: Sequence[Copy], producer: str | None, keep_ids: bool
    ) -> _Sent:
        """Append copies under the locks of their partitions, so that the ids they get stay free."""
        partitions = list({copy.partition.id: copy.partition for copy in copies}.values())
        if queue.max_size:
            # In the order in which a push takes its locks.
            await transaction.fetch("lock_queue", queue.id)
        await self._dedup.load_windows(transaction, partitions, {queue.id: self._window(queue)})
        rows = await transaction.fetch("lock_partitions", [partition.id for partition in partitions])
        if len(rows) < len(partitions):
            raise NotFound("Queue not found")
        await self._dedup.catch_up(transaction, partitions, {row["id"]: row["next_offset"] for row in rows})
        items: list[PushItem] = []
        given: set[tuple[int, str]] = set()
        for copy in copies:
            name = await self._free_id(transaction, queue, copy, given, keep_ids)
            given.add((copy.partition.id, name))
            payload = msgspec.Raw(copy.payload)
            items.append(PushItem(queue.name, copy.partition.name, payload, name, copy.trace_id or ""))
        stored = await self._pusher.store_in(transaction, items, producer)
        messages = [
            Redriven(copy.transaction_id, item.transaction_id, message_id)
            for copy, item, (message_id, _) in zip(copies, items, stored.messages, strict=True)
        ]
        return _Sent(messages, 0, stored)

    async def _free_id(
        self, transaction: Transaction, queue: Queue, copy: Copy, given: set[tuple[int, str]], keep_ids: bool
    ) -> str:
        """The id of a copy: its own if that is free, else the first free one that says it is a retry."""
        partition, window = copy.partition, self._window(queue)
        if window <= 0:
            return copy.transaction_id
        young = time.time() - copy.created_at.timestamp() < window + _CLOCK_MARGIN
        if (
            keep_ids
            and not young
            and (partition.id, copy.transaction_id) not in given
            and not await self._is_stored(transaction, partition, copy.transaction_id, window)
        ):
            return copy.transaction_id
        covered = self._dedup.covers_window(partition, window)
        for name in _retry_ids(copy.transaction_id):
            if (partition.id, name) in given:
                continue
            # A number left out costs nothing, so what the filter may hold is passed over without looking.
            if (
                self._certainly_new(partition, name)
                if covered
                else not await self._is_stored(transaction, partition, name, window)
            ):
                return name
        raise Conflict(f"transaction {copy.transaction_id!r} was retried too often")

    async def _is_stored(self, transaction: Transaction, partition: Partition, name: str, window: float) -> bool:
        if self._dedup.covers_window(partition, window) and self._certainly_new(partition, name):
            return False
        found = await find_message(transaction, self._envelope, partition.id, name)
        if found is None:
            return False
        return time.time() - found.segment.created_at.timestamp() < window + _CLOCK_MARGIN

    def _certainly_new(self, partition: Partition, name: str) -> bool:
        return not self._dedup.filter.may_contain([transaction_hash(name, partition.id)])

    def _window(self, queue: Queue) -> float:
        own = queue.dedup_window_seconds
        return self._dedup_window if own is None else float(own)


def _retry_ids(transaction_id: str) -> Iterator[str]:
    """`order-7:retry-1`, `order-7:retry-2`, …; they go on from the number that the id has already."""
    match = _RETRIED.fullmatch(transaction_id)
    base, last = (match[1], int(match[2])) if match else (transaction_id, 0)
    for number in range(last + 1, last + 10_001):
        suffix = f":retry-{number}"
        yield base[: LONGEST_NAME - len(suffix)] + suffix

"""Replay of spooled pushes: how the drainer stores their records, as segments with the message ids already answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import asyncpg
import msgspec

from queen.broker.events import Event, pushed
from queen.broker.heartbeat import MaintenanceModes
from queen.broker.push.pusher import Pusher
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.append_batch import AppendBatch, ItemOutcome
from queen.log.catalog import Catalog
from queen.log.slices import PushSlice, Target, items_of
from queen.spool.drainer import Drainer, PositionMoved, RecordsRefused, Span, advance, forward_refused
from queen.spool.quarantine import FailedRecords
from queen.spool.record import Record
from queen.spool.spool import Spool
from queen.storage.database import Database, retry_transaction
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment, Segment, pack_segment

_RETRY_SECONDS: Final = 30.0
_OPEN_SECONDS: Final = 0.5

_encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class _SpooledSender:
    """Stands for the request of a spooled push, which was answered when it was spooled."""

    blocks: frozenset[bytes]
    subject: str | None = None


class SpoolDrainer(Drainer):
    """Drains the spool of pushes of this host, unless push maintenance is on."""

    def __init__(
        self,
        spool: Spool,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        envelope: Envelope,
        modes: MaintenanceModes,
        publish: Callable[[Sequence[Event]], None],
        *,
        interval: float,
        most_records: int,
    ) -> None:
        self.records = PushRecords(spool.failed, database, catalog, pusher, envelope, publish)
        super().__init__(
            spool,
            database,
            self.records,
            name="spool",
            poll_seconds=interval,
            batch_records=most_records,
            retry_seconds=_RETRY_SECONDS,
            open_seconds=_OPEN_SECONDS,
            paused=lambda: not modes.known or modes.push_maintenance,
        )


class PushRecords:
    """Stores records of the spool as segments."""

    def __init__(
        self,
        failed: FailedRecords,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        envelope: Envelope,
        publish: Callable[[Sequence[Event]], None],
    ) -> None:
        self._failed = failed
        self._database = database
        self._catalog = catalog
        self._pusher = pusher
        self._envelope = envelope
        self._publish = publish
        self.send_on: Callable[[Record], Awaitable[bool]] | None = None
        """With several shards: stores a record on the shard that its queue has moved to."""

    async def store(self, spans: Sequence[Span], records: Sequence[Record]) -> None:
        try:
            slices = [self._slice(record) for record in records]
            settle = await retry_transaction(lambda: self._store(spans, records, slices))
        except (DatabaseUnavailable, Overloaded, PositionMoved):
            raise
        except (QueenError, asyncpg.PostgresError, EnvelopeError, MalformedSegment) as error:
            raise RecordsRefused(str(error) or type(error).__name__) from error
        settle()

    async def divert(self, span: Span, record: Record, error: RecordsRefused) -> None:
        if not await self.forward(record, error):
            # Should an attempt have stored some messages after all, the next one finds them by their ids.
            kept = msgspec.structs.replace(record, tried=[*record.tried, record.block])
            await asyncio.to_thread(self._failed.add, kept, str(error))
        await advance(self._database, [span])

    async def forward(self, record: Record, error: RecordsRefused) -> bool:
        send_on = self.send_on
        return send_on is not None and await forward_refused(
            lambda: send_on(record), error.__cause__, f"queue {record.queue!r}"
        )

    def order_key(self, record: Record) -> Target:
        return record.queue, record.partition

    def announce(self, records: Sequence[Record]) -> None:
        events = []
        for queue_name, partition_name in {(record.queue, record.partition) for record in records}:
            queue = self._catalog.cached_queue(queue_name)
            partition = self._catalog.cached_partition_in(queue, partition_name) if queue is not None else None
            if partition is not None:
                events.append(pushed(partition.queue_id, partition.id, 1))
        self._publish(events)

    async def take_over(self, record: Record) -> None:
        """Store a record from the spool of another shard, which an earlier attempt may have stored already."""
        await self.store([], [msgspec.structs.replace(record, tried=[*record.tried, record.block])])

    async def _store(
        self, spans: Sequence[Span], records: Sequence[Record], slices: Sequence[PushSlice]
    ) -> Callable[[], None]:
        await self._catalog.ensure_partitions({part.target for part in slices})
        batches = self._pusher.batches_of(slices)
        waited = max(0.001, time.time() - min(record.at for record in records))
        for batch in batches:
            batch.waited = waited
        async with self._database.transaction() as transaction:
            times = await self._pusher.append_in(transaction, batches)
            # Before the commit: after a crash in between they are recognised by their ids when retried.
            await asyncio.to_thread(self._quarantine_refused, dict(zip(slices, records, strict=True)), batches)
            await advance(transaction, spans)
        return lambda: self._pusher.settle_batches(batches, times)

    def _quarantine_refused(self, records: dict[PushSlice, Record], batches: Sequence[AppendBatch]) -> None:
        """Quarantine messages that do not fit their queue. Raises `QueenError` for a record none of which fits."""
        for batch in batches:
            outcomes = iter(batch.outcomes or ())
            for part in batch.slices:
                refused = [
                    index
                    for index, outcome in zip(range(part.count), outcomes, strict=False)
                    if outcome is ItemOutcome.REFUSED
                ]
                if len(records) == 1 and len(refused) == part.count:
                    raise QueenError(batch.refusal)
                for run in _runs(refused):
                    self._failed.add(self._excerpt(records[part], part, run), batch.refusal)

    def _slice(self, record: Record) -> PushSlice:
        """The messages of a record, with their ids."""
        plain = self._envelope.open(record.sealed)
        segment = Segment(0, datetime.fromtimestamp(record.at, UTC), IdBlock.parse(record.block), plain)
        segment.check()
        return PushSlice(
            _SpooledSender(_possible_blocks(record, segment.block)),
            (record.queue, record.partition),
            items_of(segment, (record.queue, record.partition)),
            None,
            block=segment.block,
            subjects=[segment.producer(index) for index in range(segment.count)],
        )

    def _excerpt(self, record: Record, part: PushSlice, run: range) -> Record:
        """Some messages of a record, which keep their ids."""
        items = part.items[run.start : run.stop]
        assert part.block is not None
        assert part.subjects is not None
        block = part.block.behind(run.start).pack()
        plain = pack_segment(
            [_encode(item.transaction_id) for item in items],
            [item.payload for item in items],
            [item.trace_id or None for item in items],
            part.subjects[run.start : run.stop],
        )
        sealed = self._envelope.seal(plain, encrypt=self._envelope.can_encrypt)
        return msgspec.structs.replace(
            record, block=block, count=len(items), tried=[*record.tried, block], sealed=sealed, reason=""
        )


def _possible_blocks(record: Record, block: IdBlock) -> frozenset[bytes]:
    """The first message ids of segments in which an earlier attempt may have stored messages of a record."""
    if record.block not in record.tried:
        return frozenset(record.tried)
    # It may have been stored in part: then its segments begin anywhere in it.
    return frozenset([*record.tried, *(block.behind(index).pack() for index in range(record.count))])


def _runs(indexes: Sequence[int]) -> list[range]:
    """Ranges of consecutive numbers."""
    runs: list[range] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs

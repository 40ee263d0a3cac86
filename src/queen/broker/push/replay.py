"""Replay: what lies in the spool goes to PostgreSQL, in order, once.

How far a file was replayed is written in the very transaction that stores its messages. Whatever dies in between, the
next attempt goes on exactly where the last one that committed ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import asyncpg
import msgspec

from queen.broker.heartbeat import MaintenanceModes
from queen.broker.push.pusher import Pusher, QueueChanged
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.append_batch import AppendBatch, ItemOutcome
from queen.log.catalog import Catalog
from queen.log.slices import PushSlice, Target, items_of
from queen.spool.quarantine import Failed
from queen.spool.reader import Taken
from queen.spool.record import Record
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.storage.shard_setup import ELSEWHERE
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment, Segment, pack_segment


class SpoolPositions:
    """For the one process of a host that replays a spool: where to go on, and which files can go."""

    def __init__(
        self, spool: Spool, database: Database, *, keep_seconds: int = 0, remember_files: bool = False
    ) -> None:
        """`keep_seconds`: how long a file stays that is not needed any more. `remember_files`: copies of it may too."""
        self._reader = spool.reader
        self._database = database
        self._keep_seconds = keep_seconds
        self._forget = "spool_retire" if remember_files else "spool_forget"
        self.begun = False
        self.unsure = False
        """Set while something is being stored: should that fail, nobody knows how far it came."""

    async def begin(self) -> None:
        """Find the files, and how far they were replayed before, by whomever."""
        reader = self._reader
        await asyncio.to_thread(reader.begin, {})
        progress = await self.progress(reader.file_ids())
        await asyncio.to_thread(reader.begin, progress)
        # Some may have nothing left that could be replayed.
        await self.remove_finished()
        await asyncio.to_thread(reader.clear_if_drained)
        self.begun, self.unsure = True, False

    async def find_place(self) -> None:
        """The last attempt may have been committed, or not."""
        progress = await self.progress(self._reader.file_ids())
        await asyncio.to_thread(self._reader.rewind, progress)
        self.unsure = False

    async def progress(self, file_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, int]:
        if not file_ids:
            return {}
        rows = await self._database.fetch("spool_progress", list(file_ids))
        # The driver's UUIDs are equal to Python's but slower to compare.
        return {uuid.UUID(int=row["file_id"].int): row["position"] for row in rows}

    async def remove_finished(self) -> None:
        """Remove the files of which everything is stored or set aside."""
        gone = await asyncio.to_thread(self._reader.remove_finished, self._keep_seconds)
        if gone:
            await self._database.fetch(self._forget, gone)


log = logging.getLogger(__name__)

_LARGEST_BATCH_BYTES = 4 << 20
_FAILED_RETRY_SECONDS = 30.0
_PAUSE_SECONDS = 0.5
_ATTEMPTS = 5

_encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class _SpooledSender:
    """Whoever sent it was answered long ago."""

    blocks: frozenset[bytes]
    subject: str | None = None


@dataclass(slots=True)
class _Batch:
    """Records that are stored together, and up to where their files are replayed thereby."""

    records: Sequence[Record]
    positions: Mapping[uuid.UUID, int]
    parts: list[PushSlice] = field(default_factory=list)


class SpoolDrainer:
    """Empties the spool of this host, if no other worker of it does."""

    def __init__(
        self,
        spool: Spool,
        database: Database,
        catalog: Catalog,
        pusher: Pusher,
        envelope: Envelope,
        modes: MaintenanceModes,
        *,
        interval: float,
        most_records: int,
    ) -> None:
        self._spool = spool
        self._database = database
        self._catalog = catalog
        self._pusher = pusher
        self._envelope = envelope
        self._modes = modes
        self._interval = interval
        self._most_records = most_records
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._ledger = SpoolPositions(spool, database)
        self._failed_at = 0.0
        self.send_on: Callable[[Record], Awaitable[bool]] | None = None
        """With several shards: stores a record on the shard that its queue has moved to."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End after the batch that is under way; what is left is replayed by the next process."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def retry_failed(self) -> None:
        """What was set aside is tried again at once."""
        self._failed_at = -_FAILED_RETRY_SECONDS

    async def _run(self) -> None:
        pause = self._interval
        while not await self._stopped_within(pause):
            pause = self._interval
            try:
                await self._round()
            except (DatabaseUnavailable, Overloaded) as error:
                log.warning("replay of the spool has to wait: %s", error)
                pause = _PAUSE_SECONDS
            except Exception:
                # Nobody else would try again.
                log.exception("replay of the spool failed; it is tried again")
                pause = _PAUSE_SECONDS

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False

    async def _round(self) -> None:
        """Replay all that is due, unless it must wait."""
        if self._database.availability.down or not self._modes.known or self._modes.push_maintenance:
            return
        if not self._spool.may_replay():
            return
        board = self._spool.board
        if not self._ledger.begun:
            await self._ledger.begin()
        if board.engaged and board.due:
            await self._drain()
        elif self._spool.reader.has_files:
            # Replayed while it was still being written to: it can go when its worker has finished it.
            await asyncio.to_thread(self._spool.reader.clear_if_drained)
            await self._ledger.remove_finished()
        if board.trouble and not board.records:
            board.set_trouble(False)
        if time.monotonic() - self._failed_at > _FAILED_RETRY_SECONDS:
            self._failed_at = time.monotonic()
            await self._retry_failed()

    async def _drain(self) -> None:
        reader = self._spool.reader
        begun, messages = time.monotonic(), 0
        if self._ledger.unsure:
            await self._ledger.find_place()
        while not self._modes.push_maintenance and not self._stopping.is_set():
            taken = await asyncio.to_thread(reader.take, self._most_records, _LARGEST_BATCH_BYTES)
            if not taken:
                break
            self._ledger.unsure = True
            await self._store_taken(taken)
            self._ledger.unsure = False
            if self._spool.board.trouble:
                self._spool.board.set_trouble(False)
            await self._ledger.remove_finished()
            messages += sum(one.record.count for one in taken)
        else:
            return
        await self._ledger.remove_finished()
        await asyncio.to_thread(reader.clear_if_drained)
        if messages:
            seconds = time.monotonic() - begun
            self._spool.board.note_rate(messages / max(seconds, 0.001))
            log.info("replayed %d messages from the spool in %.1f s", messages, seconds)

    async def _store_taken(self, taken: Sequence[Taken]) -> None:
        """Store records together; when they are refused, each alone, so that only the guilty one is set aside."""
        batch = _Batch([one.record for one in taken], {one.file_id: one.end for one in taken})
        try:
            await self._store(batch)
        except (DatabaseUnavailable, Overloaded):
            raise
        except (QueenError, asyncpg.PostgresError, EnvelopeError, MalformedSegment) as error:
            if len(taken) > 1:
                for one in taken:
                    await self._store_taken([one])
                return
            if await self._sent_on(taken[0].record, error):
                await self._database.fetch("spool_advance", list(batch.positions), list(batch.positions.values()))
            else:
                await self._set_aside(taken[0].record, error, batch.positions)
        self._spool.reader.settle(taken)

    async def take_over(self, record: Record) -> None:
        """Store a record of somebody else's spool, whose attempts before may have done so already."""
        await self._store(_Batch([msgspec.structs.replace(record, tried=[*record.tried, record.block])], {}))

    async def _sent_on(self, record: Record, error: Exception) -> bool:
        """Whether a record was refused because its queue lives on another shard, and that has it now."""
        if self.send_on is None or not isinstance(error, asyncpg.PostgresError) or error.sqlstate != ELSEWHERE:
            return False
        try:
            return await self.send_on(record)
        except (QueenError, asyncpg.PostgresError) as refused:
            log.warning("a record for queue %s cannot be sent on to its shard now: %s", record.queue, refused)
            return False

    async def _set_aside(self, record: Record, error: Exception, positions: Mapping[uuid.UUID, int]) -> None:
        reason = str(error) or type(error).__name__
        # Should this attempt turn out to be the last but one, the next finds the messages by their ids.
        kept = msgspec.structs.replace(record, tried=[*record.tried, record.block])
        await asyncio.to_thread(self._spool.failed.add, kept, reason)
        await self._database.fetch("spool_advance", list(positions), list(positions.values()))

    async def _retry_failed(self) -> None:
        """What was refused may be welcome by now."""
        refused: set[Target] = set()
        for failed in await asyncio.to_thread(lambda: list(self._spool.failed.read())):
            target = failed.record.queue, failed.record.partition
            if target in refused:
                # Not before what was refused earlier.
                continue
            if failed.file_id not in await self._ledger.progress({failed.file_id}):
                try:
                    await self._store(_Batch([failed.record], {failed.file_id: 1}), again=failed)
                except (DatabaseUnavailable, Overloaded):
                    raise
                except (QueenError, asyncpg.PostgresError, EnvelopeError, MalformedSegment) as error:
                    if not await self._sent_on(failed.record, error):
                        log.debug("%s is still refused: %s", failed.path, error)
                        refused.add(target)
                        continue
            await asyncio.to_thread(self._spool.failed.remove, failed)
            await self._database.fetch("spool_forget", [failed.file_id])

    async def _store(self, batch: _Batch, again: Failed | None = None) -> None:
        batch.parts = [self._part(record) for record in batch.records]
        targets = {part.target for part in batch.parts}
        for attempt in range(_ATTEMPTS):
            await self._catalog.ensure_partitions(targets)
            try:
                settle = await self._store_once(batch, again)
            except (QueueChanged, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                # Nothing of the attempt is left; what the queue is now is found by the next.
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                settle()
                return

    async def _store_once(self, batch: _Batch, again: Failed | None) -> Callable[[], None]:
        lots = self._pusher.batches_of(batch.parts)
        waited = max(0.001, time.time() - min(record.at for record in batch.records))
        for lot in lots:
            lot.waited = waited
        async with self._database.transaction() as transaction:
            times = await self._pusher.append_in(transaction, lots)
            # Before the commit: a crash now leaves them twice, and they are recognised by their ids when tried again.
            await asyncio.to_thread(self._keep_refused, batch, lots, again)
            await transaction.fetch("spool_advance", list(batch.positions), list(batch.positions.values()))
        return lambda: self._pusher.settle_batches(lots, times)

    def _keep_refused(self, batch: _Batch, lots: Sequence[AppendBatch], again: Failed | None) -> None:
        """Set aside what does not fit its queue."""
        records = dict(zip(batch.parts, batch.records, strict=True))
        for lot in lots:
            fates = iter(lot.outcomes or ())
            for part in lot.slices:
                refused = [
                    index for index, fate in zip(range(part.count), fates, strict=False) if fate is ItemOutcome.REFUSED
                ]
                if refused and again is not None and len(refused) == part.count:
                    raise QueenError(lot.refusal)
                for run in _runs(refused):
                    self._spool.failed.add(self._excerpt(records[part], part, run), lot.refusal)

    def _part(self, record: Record) -> PushSlice:
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
        return Record(
            record.order,
            record.at,
            record.queue,
            record.partition,
            block,
            len(items),
            [*record.tried, block],
            sealed,
        )


def _possible_blocks(record: Record, block: IdBlock) -> frozenset[bytes]:
    """The first message ids of segments in which an earlier attempt may have stored messages of a record."""
    if record.block not in record.tried:
        return frozenset(record.tried)
    # It may have been stored in part: then its segments begin anywhere in it.
    return frozenset([*record.tried, *(block.behind(index).pack() for index in range(record.count))])


def _runs(indexes: Sequence[int]) -> list[range]:
    """Stretches of numbers that follow each other."""
    runs: list[range] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs

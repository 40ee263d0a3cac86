"""The drainer: stores the records of a spool in PostgreSQL, in order, each once.

How far a file is stored is written in the transaction that stores its records. Whatever fails in between, the next
attempt, by this process or another, continues exactly where the last committed one ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import asyncpg

from queen.errors import QueenError
from queen.spool.reader import Taken
from queen.spool.record import Record
from queen.spool.spool import Spool
from queen.storage.database import Database, Fetcher
from queen.storage.shard_setup import ELSEWHERE

log = logging.getLogger(__name__)

_LARGEST_BATCH_BYTES: Final = 4 << 20
_PAUSE_SECONDS: Final = 0.5
_KEPT_CHECK_SECONDS: Final = 60.0
_BACKLOG_SECONDS: Final = 5.0
"""Records that waited longer are a backlog, and storing them is worth a line in the log."""


class PositionMoved(QueenError):
    """Another process has stored part of a file, or this one has without being answered; nothing was stored."""


class RecordsRefused(QueenError):
    """PostgreSQL, or the queue, does not accept one of the records; nothing was stored."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, in bytes: what has been stored ends at `since`, and will end at `upto`."""

    file_id: uuid.UUID
    since: int
    upto: int


async def advance(fetcher: Fetcher, spans: Sequence[Span]) -> None:
    """Move the positions of files, in the transaction that stores their records. Raises `PositionMoved`."""
    if not spans:
        return
    rows = await fetcher.fetch(
        "spool_advance",
        [span.file_id for span in spans],
        [span.since for span in spans],
        [span.upto for span in spans],
    )
    if len(rows) < len(spans):
        raise PositionMoved("part of the file has been stored by another process")


class RecordStore(Protocol):
    """How the records of one spool become rows."""

    async def store(self, spans: Sequence[Span], records: Sequence[Record]) -> None:
        """Store records, in order, in one transaction with `advance`. Raises `PositionMoved` or `RecordsRefused`."""
        ...

    async def divert(self, span: Span, record: Record, error: RecordsRefused) -> None:
        """Store what can be stored of a record that is refused; quarantine the rest."""
        ...

    async def forward(self, record: Record, error: RecordsRefused) -> bool:
        """Whether a refused record belongs to another shard, and is stored there now."""
        ...

    def order_key(self, record: Record) -> Hashable:
        """Quarantined records with the same key are retried in order."""
        ...

    def announce(self, records: Sequence[Record]) -> None:
        """Wake what waits for records that an attempt of unknown outcome may have stored."""
        ...


class BreakerState(IntEnum):
    """What a circuit breaker lets through: everything, one attempt, nothing."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after three failures in a row; after `open_seconds` one attempt decides whether it closes."""

    def __init__(
        self,
        on_change: Callable[[BreakerState], None],
        open_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._open_seconds = open_seconds
        self._clock = clock
        self._failures = 0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED

    def allows(self) -> bool:
        """Whether an attempt may be made now."""
        if self.state is BreakerState.OPEN and self._clock() - self._opened_at >= self._open_seconds:
            self._become(BreakerState.HALF_OPEN)
        return self.state is not BreakerState.OPEN

    def half_open(self) -> None:
        """The cause of the failures may be over: the next attempt need not wait."""
        if self.state is BreakerState.OPEN:
            self._become(BreakerState.HALF_OPEN)

    def succeeded(self) -> None:
        self._failures = 0
        self._become(BreakerState.CLOSED)

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES or self.state is BreakerState.HALF_OPEN:
            self._opened_at = self._clock()
            self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(state)


_FAILURES: Final = 3


class Positions:
    """How far the files of a spool are stored, for the one process of a host that drains it."""

    def __init__(self, spool: Spool, database: Database, keep_seconds: int, retire: bool) -> None:
        self._reader = spool.reader
        self._database = database
        self._keep_seconds = keep_seconds
        self._forget = "spool_retire" if retire else "spool_forget"
        self.loaded = False
        self.uncertain = False
        """Set while records are being stored: after a failure it is unknown whether they were."""

    async def load(self) -> None:
        """Find the files, and their positions."""
        reader = self._reader
        await asyncio.to_thread(reader.begin, {})
        await asyncio.to_thread(reader.begin, await self.of(reader.file_ids()))
        # Nothing may be left to store in some.
        await self.remove_finished()
        await asyncio.to_thread(reader.clear_if_drained)
        self.loaded, self.uncertain = True, False

    async def resume(self) -> None:
        """After an attempt whose outcome is unknown: continue where PostgreSQL says."""
        await asyncio.to_thread(self._reader.rewind, await self.of(self._reader.file_ids()))
        self.uncertain = False

    async def of(self, file_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, int]:
        """The positions of files that have one."""
        if not file_ids:
            return {}
        rows = await self._database.fetch("spool_progress", list(file_ids))
        # The driver's UUIDs are equal to Python's but slower to compare.
        return {uuid.UUID(int=row["file_id"].int): row["position"] for row in rows}

    async def remove_finished(self) -> None:
        """Remove the files of which everything is stored or quarantined."""
        removed = await asyncio.to_thread(self._reader.remove_finished, self._keep_seconds)
        if removed:
            await self._database.fetch(self._forget, removed)


class Drainer:
    """Empties a spool of this host, in the one worker that holds its replay lock."""

    def __init__(
        self,
        spool: Spool,
        database: Database,
        store: RecordStore,
        *,
        name: str,
        poll_seconds: float,
        batch_records: int,
        retry_seconds: float,
        open_seconds: float,
        flush_seconds: float = 0.0,
        keep_seconds: int = 0,
        retire: bool = False,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name` is for the log. `retry_seconds`: between attempts at quarantined records. `open_seconds`: of the
        circuit breaker. `flush_seconds`: how long `stop` goes on storing. `keep_seconds`: how long a stored file is
        kept. `retire`: positions outlive their files, as copies of these may. `paused` suspends it.
        """
        self._spool = spool
        self._database = database
        self._store = store
        self._name = name
        self._poll_seconds = poll_seconds
        self._batch_records = batch_records
        self._retry_seconds = retry_seconds
        self._flush_seconds = flush_seconds
        self._keep_seconds = keep_seconds
        self._paused = paused
        self.positions = Positions(spool, database, keep_seconds, retire)
        self.breaker = Breaker(self._breaker_changed, open_seconds)
        self.on_stored: Callable[[Sequence[Span]], Awaitable[None]] | None = None
        """Called with what has been stored, or quarantined."""
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._was_down = False
        self._moved = False
        self._unknown: Sequence[Record] = ()
        self._retried_at = -retry_seconds
        self._kept_checked_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Store what can be stored within `flush_seconds`; the rest is left to another worker or the next start."""
        self._stopping.set()
        self._wake.set()
        if self._task is not None:
            if self._flush_seconds:
                await asyncio.wait([self._task], timeout=self._flush_seconds)
                self._task.cancel()
            await asyncio.wait([self._task])

    def wake(self) -> None:
        """Records were written."""
        self._wake.set()

    def retry_failed(self) -> None:
        """Retry quarantined records in the next round."""
        self._retried_at = -self._retry_seconds

    async def _run(self) -> None:
        while True:
            # Before the round: what is written during it may come too late for it.
            self._wake.clear()
            last = self._stopping.is_set()
            if last and not self._flush_seconds:
                return
            succeeded = await self._try_round()
            if last:
                return
            if succeeded:
                await _wait(self._wake, self._poll_seconds)
            else:
                await _wait(self._stopping, _PAUSE_SECONDS)

    async def _try_round(self) -> bool:
        """Run a round if one may run now; False when it failed."""
        down = self._database.availability.down
        if self._was_down and not down:
            self.breaker.half_open()
        self._was_down = down
        if down or self._paused() or not self._spool.may_replay() or not self.breaker.allows():
            return True
        try:
            await self._round()
        except PositionMoved as error:
            log.info("%s: %s; continuing from the stored position", self._name, error)
            # The second time in a row, the position went back, as by a failover that lost commits: start over from it.
            self.positions.loaded = not self._moved
            self._moved = not self._moved
            return True
        except (QueenError, asyncpg.PostgresError, OSError) as error:
            log.warning("%s: draining suspended: %s", self._name, error)
        except Exception:
            log.exception("%s: draining failed", self._name)
        else:
            return True
        self.breaker.failed()
        return False

    def _breaker_changed(self, state: BreakerState) -> None:
        level = logging.INFO if state is BreakerState.CLOSED else logging.WARNING
        log.log(level, "%s: circuit breaker %s", self._name, state.name.lower().replace("_", "-"))
        self._spool.state.note_breaker(state)

    async def _round(self) -> None:
        state, reader = self._spool.state, self._spool.reader
        if not self.positions.loaded:
            state.note_breaker(self.breaker.state)
            await self.positions.load()
            self._announce_unknown()
        if state.engaged and state.due:
            await self._drain()
        elif reader.has_files:
            # Stored while it was still being written: it is removed once its worker has finished it.
            await asyncio.to_thread(reader.clear_if_drained)
            await self.positions.remove_finished()
        if state.outage and not state.records:
            state.set_outage(False)
        now = time.monotonic()
        if now - self._retried_at > self._retry_seconds:
            self._retried_at = now
            await self._retry_quarantined()
        if self._keep_seconds and now - self._kept_checked_at > _KEPT_CHECK_SECONDS:
            self._kept_checked_at = now
            await asyncio.to_thread(reader.remove_kept, self._keep_seconds)

    async def _drain(self) -> None:
        reader, state = self._spool.reader, self._spool.state
        started, messages, oldest = time.monotonic(), 0, time.time()
        if self.positions.uncertain:
            await self.positions.resume()
            self._announce_unknown()
        while not self._paused() and (self._flush_seconds or not self._stopping.is_set()):
            taken = await asyncio.to_thread(reader.take, self._batch_records, _LARGEST_BATCH_BYTES)
            if not taken:
                await self.positions.remove_finished()
                await asyncio.to_thread(reader.clear_if_drained)
                break
            self.positions.uncertain = True
            await self._store_taken(taken)
            self.positions.uncertain = self._moved = False
            self.breaker.succeeded()
            if state.outage:
                state.set_outage(False)
            await self.positions.remove_finished()
            messages += sum(one.record.count for one in taken)
            oldest = min(oldest, taken[0].record.at)
            state.note_rate(messages / max(time.monotonic() - started, 0.001))
        if messages and time.time() - oldest > _BACKLOG_SECONDS:
            seconds, age = time.monotonic() - started, time.time() - oldest
            log.info("%s: stored %d messages in %.1f s; the oldest was %.0f s old", self._name, messages, seconds, age)

    async def _store_taken(self, taken: Sequence[Taken]) -> None:
        """Store records together; when they are refused, in halves, until the refused one is found."""
        upto = {one.file_id: one.end for one in taken}
        since = {one.file_id: one.tail.settled for one in taken}
        spans = [Span(file_id, since[file_id], upto[file_id]) for file_id in since]
        self._unknown = [one.record for one in taken]
        try:
            await self._store.store(spans, self._unknown)
        except RecordsRefused as error:
            if len(taken) > 1:
                middle = len(taken) // 2
                await self._store_taken(taken[:middle])
                await self._store_taken(taken[middle:])
                return
            await self._store.divert(spans[0], taken[0].record, error)
        self._unknown = ()
        self._spool.reader.settle(taken)
        if self.on_stored is not None:
            await self.on_stored(spans)

    def _announce_unknown(self) -> None:
        """The attempt that failed last may have been committed: then its records are passed over from now on."""
        unknown, self._unknown = self._unknown, ()
        if unknown:
            self._store.announce(unknown)

    async def _retry_quarantined(self) -> None:
        """Store quarantined records that are accepted by now."""
        refused: set[Hashable] = set()
        quarantine = self._spool.failed
        for failed in await asyncio.to_thread(lambda: list(quarantine.read())):
            key = self._store.order_key(failed.record)
            if key in refused:
                continue
            try:
                await self._store.store([Span(failed.file_id, 0, 1)], [failed.record])
            except PositionMoved:
                log.debug("%s was stored by an earlier attempt", failed.path)
            except RecordsRefused as error:
                if not await self._store.forward(failed.record, error):
                    log.debug("%s is still refused: %s", failed.path, error)
                    refused.add(key)
                    continue
            await asyncio.to_thread(quarantine.remove, failed)
            await self._database.fetch("spool_forget", [failed.file_id])


async def forward_refused(send: Callable[[], Awaitable[bool]], cause: BaseException | None, what: str) -> bool:
    """Whether something was refused because it lives on another shard, and `send` has stored it there."""
    if not isinstance(cause, asyncpg.PostgresError) or cause.sqlstate != ELSEWHERE:
        return False
    try:
        return await send()
    except (QueenError, asyncpg.PostgresError) as error:
        log.warning("%s: record not forwarded to its shard: %s", what, error)
        return False


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

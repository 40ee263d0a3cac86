"""The flusher: what the log of this host holds becomes items in PostgreSQL, in bulk, in order, once.

How far a file was flushed is written in the very transaction that stores its items. Whatever dies in between, the next
attempt goes on exactly where the last one that committed ended, be it made by this process, another, or after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

import asyncpg

from queen.broker.push.replay import SpoolPositions
from queen.broker.topics.enqueue import OnFed
from queen.broker.topics.wal_store import Moved, SendOn, Stretch, WalStore, is_readable
from queen.concurrency import BackgroundTask
from queen.errors import QueenError, RedisUnavailable
from queen.log.topics import TopicCatalog
from queen.redis.interfaces import Copied, Copies
from queen.spool.files import HEADER_BYTES
from queen.spool.reader import Taken
from queen.spool.record import Record, decode_record
from queen.spool.spool import Spool
from queen.storage.database import Availability, Database

_FAILURES: Final = 3
_OPEN_SECONDS: Final = 10.0


class BreakerState(IntEnum):
    """What a breaker lets through: everything, one attempt, nothing."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after three failures in a row; ten seconds later one attempt decides whether it closes."""

    def __init__(self, on_change: Callable[[BreakerState], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._failures = 0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED

    def allows(self) -> bool:
        """Whether something may be tried now."""
        if self.state is BreakerState.OPEN and self._clock() - self._opened_at >= _OPEN_SECONDS:
            self._become(BreakerState.HALF_OPEN)
        return self.state is not BreakerState.OPEN

    def invite(self) -> None:
        """There is reason to believe that it works again: the next attempt need not wait."""
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


log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 5.0
_AT_ONCE: Final = 50


class Rescuer:
    """In the worker that flushes the log of this host: looks for what other hosts do not get done."""

    def __init__(
        self, wal: Spool, copies: Copies, ledger: SpoolPositions, store: WalStore, availability: Availability
    ) -> None:
        self._wal = wal
        self._copies = copies
        self._ledger = ledger
        self._store = store
        self._availability = availability
        self._stuck: dict[str, tuple[int, float]] = {}
        """Files of others: how far they are stored, and since when no further."""
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._wal.replays or self._availability.down:
                continue
            try:
                await self._look()
            except (QueenError, asyncpg.PostgresError, OSError) as error:
                log.debug("the logs of other hosts could not be looked after: %s", error)
            except Exception:
                # Nobody else on this host would look.
                log.exception("looking after the logs of other hosts failed; it is tried again")

    async def _look(self) -> None:
        files = await self._copies.files()
        stored = await self._ledger.progress({uuid.UUID(file_id) for file_id in files})
        own = await asyncio.to_thread(self._wal.file_names)
        now = asyncio.get_running_loop().time()
        stuck: dict[str, tuple[int, float]] = {}
        for file_id in files:
            position = stored.get(uuid.UUID(file_id), HEADER_BYTES)
            # What came after its file was flushed, or while nobody could be told.
            await self._copies.trim(file_id, position)
            known, since = self._stuck.get(file_id, (position, now))
            if file_id in own or known != position:
                since = now
            elif now - since >= _PATIENCE_SECONDS:
                position = await self._rescue(file_id, position)
            stuck[file_id] = (position, since)
        self._stuck = stuck

    async def _rescue(self, file_id: str, position: int) -> int:
        """Store what there is of a file; returns how far that is."""
        begun = position
        while records := _in_a_row(await self._copies.read(file_id, position, _AT_ONCE), position):
            stretch = Stretch(uuid.UUID(file_id), position, records[-1].end)
            try:
                await self._store.store([stretch], [decode_record(copied.body) for copied in records])
            except Moved:
                break
            position = stretch.upto
            await self._copies.trim(file_id, position)
        if position > begun:
            log.warning(
                "bytes %d to %d of %s, a log of another host, were stored in its stead", begun, position, file_id
            )
        return position


def _in_a_row(records: Sequence[Copied], position: int) -> list[Copied]:
    """Those that follow each other from a byte on: what is missing in between is for their own host to store."""
    following: list[Copied] = []
    for record in records:
        if record.start != position:
            break
        following.append(record)
        position = record.end
    return following


_POLL_SECONDS: Final = 0.1
_PAUSE_SECONDS: Final = 0.5
_LAST_SECONDS: Final = 5.0
_MOST_RECORDS: Final = 100
_LARGEST_BYTES: Final = 4 << 20
_KEPT_LOOK_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 300.0


class Flusher:
    """Empties the log of this host, if no other worker of it does."""

    def __init__(
        self,
        wal: Spool,
        database: Database,
        catalog: TopicCatalog,
        on_fed: OnFed,
        copies: Copies | None,
        *,
        keep_seconds: int,
    ) -> None:
        """`keep_seconds`: how long a file of the log stays once all of it is in PostgreSQL."""
        self._wal = wal
        self._database = database
        self._store_records = WalStore(database, catalog, wal.failed, on_fed)
        self._keep_seconds = keep_seconds
        self._copies = copies
        self._ledger = SpoolPositions(wal, database, keep_seconds=keep_seconds, remember_files=copies is not None)
        self._wake = asyncio.Event()
        self._stopping = False
        self._was_away = False
        self._kept_looked_at = 0.0
        self._retried_at = -_RETRY_SECONDS
        self._others = WalStore(database, catalog, wal.failed, on_fed)
        self._taking_over = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.breaker = Breaker(self._breaker_changed)
        self._rescuer = (
            Rescuer(wal, copies, self._ledger, WalStore(database, catalog, wal.failed, on_fed), database.availability)
            if copies is not None
            else None
        )

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        if self._rescuer is not None:
            self._rescuer.start()

    def send_on(self, send_on: SendOn) -> None:
        """With several shards: how items are stored whose topics have moved to another."""
        self._store_records.send_on = send_on
        self._others.send_on = send_on

    def wake(self) -> None:
        """Something was written."""
        self._wake.set()

    async def stop(self) -> None:
        """Flush what can be flushed soon; the rest is left to another worker, or to the next start."""
        if self._rescuer is not None:
            await self._rescuer.stop()
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_SECONDS)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            # Before the look: whoever writes, or says that it is the last, may be too late for it.
            self._wake.clear()
            last = self._stopping
            failed = not await self._try_round()
            if last:
                return
            if failed:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _try_round(self) -> bool:
        """Whether there is no need to wait before the next round."""
        away = self._database.availability.down
        if self._was_away and not away:
            self.breaker.invite()
        self._was_away = away
        if away or not self._wal.may_replay() or not self.breaker.allows():
            return True
        try:
            await self._round()
        except Moved:
            # The next round finds out how far they are.
            log.info("others have stored items of this host's log")
        except (QueenError, asyncpg.PostgresError, OSError) as error:
            log.warning("buffered items have to wait: %s", error)
            self.breaker.failed()
            return False
        except Exception:
            # Nobody else would try again.
            log.exception("flushing buffered items failed; it is tried again")
            self.breaker.failed()
            return False
        return True

    def _breaker_changed(self, state: BreakerState) -> None:
        log.log(
            logging.INFO if state is BreakerState.CLOSED else logging.WARNING,
            "the circuit breaker between the log of buffered items and PostgreSQL is %s",
            state.name.lower().replace("_", "-"),
        )
        self._wal.board.note_state(state)

    async def _round(self) -> None:
        board, reader = self._wal.board, self._wal.reader
        if not self._ledger.begun:
            # What the one said that flushed before is over.
            board.note_state(self.breaker.state)
            await self._ledger.begin()
        if time.monotonic() - self._retried_at > _RETRY_SECONDS:
            self._retried_at = time.monotonic()
            await self._retry_refused()
        if board.engaged:
            await self._drain()
        elif reader.has_files:
            # Flushed while it was still being written to: it can go when its worker has finished it.
            await asyncio.to_thread(reader.clear_if_drained)
            await self._ledger.remove_finished()
        if self._keep_seconds and time.monotonic() - self._kept_looked_at > _KEPT_LOOK_SECONDS:
            self._kept_looked_at = time.monotonic()
            await asyncio.to_thread(reader.remove_kept, self._keep_seconds)

    async def _retry_refused(self) -> None:
        """What PostgreSQL refused may be welcome by now; else it stays set aside."""
        for failed in await asyncio.to_thread(lambda: list(self._wal.failed.read())):
            if not is_readable(failed.record):
                continue
            if not await self._store_alone(self._store_records, failed.record):
                await asyncio.to_thread(self._wal.failed.remove, failed)
            await self._database.fetch("spool_forget", [failed.file_id])

    async def take_over(self, record: Record) -> None:
        """Store an item of another shard's log, once, however often it is sent."""
        async with self._taking_over:
            await self._store_alone(self._others, record)
        await self._database.fetch("spool_retire", [uuid.UUID(bytes=record.block)])

    async def _store_alone(self, store: WalStore, record: Record) -> bool:
        """Store a record that is in no file; whether it is set aside instead."""
        try:
            return bool(await store.store([Stretch(uuid.UUID(bytes=record.block), 0, 1)], [record]))
        except Moved:
            # Nobody heard that it was stored before.
            return False

    async def _drain(self) -> None:
        reader = self._wal.reader
        begun, items = time.monotonic(), 0
        if self._ledger.unsure:
            await self._ledger.find_place()
        while taken := await asyncio.to_thread(reader.take, _MOST_RECORDS, _LARGEST_BYTES):
            self._ledger.unsure = True
            await self._store(taken)
            self._ledger.unsure = False
            self.breaker.succeeded()
            await self._ledger.remove_finished()
            items += sum(one.record.count for one in taken)
            self._wal.board.note_rate(items / max(time.monotonic() - begun, 0.001))
        await asyncio.to_thread(reader.clear_if_drained)

    async def _store(self, taken: Sequence[Taken]) -> None:
        """Store records and settle them."""
        since = {one.file_id: one.tail.settled for one in taken}
        upto = {one.file_id: one.end for one in taken}
        stretches = [Stretch(file_id, since[file_id], upto[file_id]) for file_id in since]
        await self._store_records.store(stretches, [one.record for one in taken])
        self._wal.reader.settle(taken)
        if self._copies is not None:
            await self._trim(self._copies, stretches)

    async def _trim(self, copies: Copies, stretches: Sequence[Stretch]) -> None:
        try:
            for stretch in stretches:
                await copies.trim(str(stretch.file_id), stretch.upto)
        except RedisUnavailable as error:
            # Whoever finds them sees that they are stored.
            log.debug("copies of what was flushed are left: %s", error)

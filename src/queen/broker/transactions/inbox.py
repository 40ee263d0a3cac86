"""The inbox: what transactions of other sessions have pushed by SQL is appended once they have committed.

A session that pushes cannot hold the row of a partition, because its transaction may last. It writes to `queen.inbox`,
and one worker, elected over all hosts, moves rows from there to the log: removed and appended in one transaction, so
each message is stored once, whatever dies.

Rows are taken as their transactions become visible, by rounds. A round has the snapshot of one moment and takes all
that is visible in it, in the order of ids. If a transaction had committed before another pushed, then its rows are
visible wherever those of the other are and have lower ids, so it comes first. Those that ran side by side come in the
order of their last pushes, each in one piece as far as it fits into a batch.

A busy worker polls; an idle one is notified. Pushes learn which from a sequence, because
a NOTIFY in each transaction would have all commits of the database wait for one another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import asyncpg

from queen.broker.heartbeat import MaintenanceModes
from queen.broker.maintenance.election import Election, Session
from queen.broker.transactions.inbox_append import InboxAppender, QueuesHeld
from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.storage.database import (
    BUSY_ERRORS,
    CONFLICT_ERRORS,
    AdvisoryLock,
    Database,
    Record,
    TransactionConflict,
)
from queen.storage.shard_setup import BEING_LAID_OUT, ELSEWHERE

log = logging.getLogger(__name__)

_CHANNEL: Final = "queen_inbox"
_ASLEEP, _AWAKE = 1, 2

_BATCH_ROWS: Final = 2000
_BATCH_BYTES: Final = 2 << 20
_WORTHWHILE_ROWS: Final = 400
_FEW_ROWS: Final = 16
_NAP_SECONDS: Final = 0.005
_LONG_NAP_SECONDS: Final = 0.015
"""A worker that is awake lets rows gather before it looks again: briefly where the last look found few, not at all
where it found enough. In between, a batch costs more than its rows: fewer batches leave the CPU to pushes."""
_LINGER_SECONDS: Final = 0.05
"""How long a worker polls without finding rows before it is notified again."""
_BUSY_TRANSACTIONS: Final = 3
_BUSY_SECONDS: Final = 0.1
"""A worker that sees this number of transactions in this time, each with a notification, polls instead."""
_WRITER_NAPS: Final = (0.005, 0.05)
_SWEEP_SECONDS: Final = 30.0
_BETWEEN_TERMS: Final = 1.0
_STOP_SECONDS: Final = 2.0
_PATIENT_ATTEMPTS: Final = 5
_RETRY_SECONDS: Final = 0.05
_HELD_SECONDS: Final = 1.0

_CONFLICTS: tuple[type[BaseException], ...] = (
    TransactionConflict,
    Overloaded,
    *BUSY_ERRORS,
    *CONFLICT_ERRORS,
)


class _Snapshot(NamedTuple):
    """A snapshot of PostgreSQL: transactions from `end` on had not ended, and neither had those `running`."""

    oldest: int
    end: int
    running: Sequence[int]


class InboxDrainer:
    """Drains the inbox of one database while this worker is elected for it."""

    def __init__(
        self,
        database: Database,
        elected: asyncio.Event,
        modes: MaintenanceModes,
        appender: InboxAppender,
        *,
        poll_seconds: float,
    ) -> None:
        """`elected`: this worker runs the background jobs, and so drains the inbox, too; none of the others asks."""
        self._elected = elected
        self._modes = modes
        self.appender = appender
        self._poll_seconds = poll_seconds
        self._election = Election(database, AdvisoryLock.INBOX)
        self._background = BackgroundTask()
        self._stopping = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._notified = asyncio.Event()
        self.forward: Callable[[Record], Awaitable[bool]] | None = None
        """With several shards: stores a row on the shard that its queue has moved to."""
        self._seen: _Snapshot | None = None
        self._high = self._taken_by = 0
        """The highest id that was taken, and a transaction that is younger than all that drew an id up to it."""
        self._held: dict[str, float] = {}
        self._taken = 0
        """How many rows the last batch had."""
        self._full = False
        """Whether the last batch was as large as one may be: then there may be more."""
        self._failures = 0
        self._transactions: list[float] = []
        """When the last transactions were appended."""

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        """Finish the batch that is under way."""
        self._stopping = True
        self._notified.set()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            pass
        await self._background.stop()

    async def _serve(self) -> None:
        while not self._stopping:
            await self._elected.wait()
            session = await self._election.win()
            self._ended.clear()
            log.info("elected: this worker appends what is pushed by SQL")
            try:
                await self._run(session)
            except DatabaseUnavailable as error:
                log.warning("connection with the lock of the inbox was lost; another worker takes over: %s", error)
            except BUSY_ERRORS as error:
                log.warning("inbox: append failed, retrying: %s", error)
            except Exception:
                log.exception("inbox: append failed; retrying")
            finally:
                await session.close()
                self._ended.set()
            await asyncio.sleep(_BETWEEN_TERMS)

    async def _run(self, session: Session) -> None:
        """Until this worker is stopped, or not elected any more."""
        self._begin()
        (row,) = await session.fetch("inbox_last_id")
        await session.listen(_CHANNEL, self._notified.set)
        await session.fetch("inbox_set_awake", _ASLEEP)
        await self._round(session)
        # All that was visible is taken, and a lower id that was not is of a transaction that was running then.
        if row["last_id"] > self._high:
            self._high, self._taken_by = row["last_id"], row["taken_by"]
        swept_at = -_SWEEP_SECONDS
        while self._is_on:
            if await self._is_due():
                await self._append_until_empty(session)
            elif self._now() - swept_at > _SWEEP_SECONDS:
                swept_at = self._now()
                await self._sweep(session)
            else:
                await self._round(session)
            if self._is_busy():
                await self._stay_awake(session)

    def _begin(self) -> None:
        self._seen, self._high, self._taken_by = None, 0, 0
        self._held.clear()
        self._transactions.clear()
        self._notified.clear()
        self._failures = 0

    @property
    def _is_on(self) -> bool:
        return not self._stopping and self._elected.is_set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _is_due(self) -> bool:
        """Wait for a notification, but not for longer than the interval of polling or until a queue is held no more."""
        until = min([self._poll_seconds, *(at - self._now() for at in self._held.values())])
        try:
            async with asyncio.timeout(max(0.0, until)):
                await self._notified.wait()
        except TimeoutError:
            return False
        self._notified.clear()
        return True

    def _is_busy(self) -> bool:
        latest = self._transactions[-_BUSY_TRANSACTIONS:]
        return len(latest) == _BUSY_TRANSACTIONS and latest[0] > self._now() - _BUSY_SECONDS

    async def _append_until_empty(self, session: Session) -> None:
        while self._is_on and await self._round(session) and not self._is_busy():
            pass

    async def _stay_awake(self, session: Session) -> None:
        """Look for rows again and again, without notifications, until there have been none for a while."""
        while self._is_on:
            await session.fetch("inbox_set_awake", _AWAKE)
            last = self._now()
            while self._is_on and self._now() - last < _LINGER_SECONDS:
                if await self._round(session):
                    last = self._now()
                if self._taken < _WORTHWHILE_ROWS:
                    await asyncio.sleep(_NAP_SECONDS if self._taken < _FEW_ROWS else _LONG_NAP_SECONDS)
            self._transactions.clear()
            self._notified.clear()
            await session.fetch("inbox_set_awake", _ASLEEP)
            if await self._await_writers(session):
                return

    async def _await_writers(self, session: Session) -> bool:
        """Until writing transactions are over: they may have read that this worker is awake, and will not notify it.

        False: so much else has come meanwhile that it should be.
        """
        writers = await self._writers(session)
        nap, longest = _WRITER_NAPS
        while self._is_on:
            await self._append_until_empty(session)
            if self._is_busy():
                return False
            if not writers:
                return True
            await asyncio.sleep(nap)
            nap = min(longest, nap * 1.5)
            # In this order: one that is over now is visible to the round that follows.
            writers &= await self._writers(session)
        return True

    async def _writers(self, session: Session) -> set[str]:
        return {row["writer"] for row in await session.fetch("inbox_writers")}

    async def _round(self, session: Session) -> bool:
        """Append all that is visible at one moment; whether there was anything."""
        if self._modes.push_maintenance or not self._modes.known:
            self._seen = None
            return False
        self._release_held()
        seen = self._seen
        since: tuple[Any, ...] = (0, (), [*self._held], 0, 0)
        if seen is not None:
            since = (self._high, seen.running, [*self._held], seen.end, self._taken_by)
        (row,) = await session.fetch("inbox_look", *since)
        snapshot = _Snapshot(*row["snapshot"])
        appended = False
        self._taken = 0
        if row["waiting"]:
            self._seen = None
            if not await self._append_round(session, since, snapshot):
                return True
            appended = True
        self._seen = snapshot
        return appended

    async def _append_round(self, session: Session, since: tuple[Any, ...], snapshot: _Snapshot) -> bool:
        """Append a round, batch by batch. False: it has to be begun again from the oldest row."""
        position = 0
        while self._is_on:
            taken = await self._append_batch(
                session, "inbox_take", *since, tuple(snapshot), position, _BATCH_ROWS, _BATCH_BYTES
            )
            if taken is None:
                return False
            if taken:
                position = taken[-1]
            if not self._full:
                return True
        return False

    async def _sweep(self, session: Session) -> None:
        """Append what no round has found: rows that were restored from a backup, with numbers of other transactions."""
        if not (self._modes.push_maintenance or not self._modes.known):
            await self._append_batch(session, "inbox_take_all", list(self._held), _BATCH_ROWS, _BATCH_BYTES)

    async def _append_batch(self, session: Session, statement: str, *args: Any) -> list[int] | None:
        """Append what the statement takes; the ids of that, ascending. None: the round has to be begun again."""
        rows: list[Record] = []
        try:
            async with session.transaction():
                rows = await session.fetch(statement, *args)
                self._taken = len(rows)
                # A character may take four bytes.
                self._full = len(rows) == _BATCH_ROWS or 4 * sum(len(row["body"]) for row in rows) >= _BATCH_BYTES
                if not rows:
                    return []
                appended = await self.appender.append(session, _in_order(rows))
        except DatabaseUnavailable:
            raise
        except QueuesHeld as held:
            self._hold(held.queues, held.seconds, held)
            return None
        except _CONFLICTS as error:
            self._failures += 1
            if self._failures < _PATIENT_ATTEMPTS:
                log.debug("inbox: append failed, retrying: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                return None
            await self._append_apart(session, sorted(row["id"] for row in rows))
            return None
        except Exception as error:
            log.debug("inbox: append of %d rows failed, retrying them in halves: %s", len(rows), error)
            await self._append_apart(session, sorted(row["id"] for row in rows))
            return None
        self._failures = 0
        self.appender.settle(appended)
        transactions = min(_BUSY_TRANSACTIONS, len({row["xid"] for row in rows}))
        self._transactions = [*self._transactions[-_BUSY_TRANSACTIONS:], *[self._now()] * transactions]
        ids = sorted(row["id"] for row in rows)
        if ids[-1] > self._high:
            self._high, self._taken_by = ids[-1], rows[0]["taken_by"]
        return ids

    async def _append_apart(self, session: Session, ids: Sequence[int]) -> None:
        """Append rows by halves, so that the one that cannot be appended is found and the others are."""
        self._failures = 0
        rows: list[Record] = []
        try:
            async with session.transaction():
                rows = await session.fetch("inbox_take_some", ids, list(self._held))
                appended = await self.appender.append(session, _in_order(rows))
        except DatabaseUnavailable:
            raise
        except QueuesHeld as held:
            self._hold(held.queues, held.seconds, held)
            await self._append_apart(session, ids)
            return
        except Exception as error:
            if len(rows) == 1:
                await self._set_aside(session, rows[0], error)
                return
            if len(ids) == 1:
                raise
            middle = len(ids) // 2
            await self._append_apart(session, ids[:middle])
            await self._append_apart(session, ids[middle:])
            return
        self.appender.settle(appended)

    async def _set_aside(self, session: Session, row: Record, error: Exception) -> None:
        """A row that is not appended now: it goes to another shard, waits with all of its queue, or is refused."""
        state = error.sqlstate if isinstance(error, asyncpg.PostgresError) else None
        if state == ELSEWHERE and await self._is_forwarded(session, row):
            return
        if state in (ELSEWHERE, BEING_LAID_OUT) or isinstance(error, _CONFLICTS):
            self._hold([row["queue"]], _HELD_SECONDS, error)
            return
        reason = str(error) or type(error).__name__
        log.error("inbox: row %d for %r is refused, see queen.inbox_refused: %s", row["id"], row["queue"], reason)
        await session.fetch("inbox_refuse", row["id"], reason)

    async def _is_forwarded(self, session: Session, row: Record) -> bool:
        """Whether another shard has stored the row, and it is removed here."""
        if self.forward is None:
            return False
        try:
            async with session.transaction():
                rows = await session.fetch("inbox_take_some", [row["id"]], [])
                if not rows or not await self.forward(rows[0]):
                    raise _NotForwarded
        except DatabaseUnavailable:
            # Of the other shard, perhaps: if it is this one, the next statement says so.
            return False
        except (QueenError, asyncpg.PostgresError, _NotForwarded) as error:
            log.warning("inbox: row %d for %r is not forwarded: %s", row["id"], row["queue"], error)
            return False
        return True

    def _hold(self, queues: Collection[str], seconds: float, reason: Exception) -> None:
        """Append nothing to queues for a while; what comes for them meanwhile stays behind what waits."""
        level = logging.WARNING if seconds >= _HELD_SECONDS else logging.DEBUG
        for queue in queues:
            log.log(level, "inbox: rows for %r wait for %g s: %s", queue, seconds, reason)
            self._held[queue] = self._now() + seconds

    def _release_held(self) -> None:
        now = self._now()
        over = [queue for queue, until in self._held.items() if until <= now]
        for queue in over:
            del self._held[queue]
        if over:
            # Their rows lie among those that have been taken.
            self._seen = None


class _NotForwarded(Exception):
    """The other shard did not store it."""


def _in_order(rows: list[Record]) -> list[Record]:
    """Transactions in the order of their last pushes, and the rows of each in the order in which it pushed them."""
    rows.sort(key=_id)
    last = {row["xid"]: row["id"] for row in rows}
    rows.sort(key=lambda row: last[row["xid"]])
    return rows


def _id(row: Record) -> int:
    id: int = row["id"]
    return id

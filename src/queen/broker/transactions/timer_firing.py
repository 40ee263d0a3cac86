"""Firing timers: those that are due are removed, and their messages appended, in one transaction.

Every worker fires at the times of the timers that it scheduled itself; the one that runs the background jobs looks for
all others, such as those of ended workers, every second while there are any. The first of them takes a timer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from queen.broker.heartbeat import MaintenanceModes
from queen.broker.state.timers import Timers
from queen.broker.transactions.inbox_append import Appended, InboxAppender, QueuesHeld
from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, Overloaded
from queen.storage.database import Database, Record, Transaction, retry_transaction
from queen.wire.envelope import Envelope

log = logging.getLogger(__name__)

_BATCH: Final = 500
_POLL_SECONDS: Final = 1.0
_IDLE_POLL_SECONDS: Final = 5.0
"""While there are no timers."""
_MOST_ALARMS: Final = 10_000
"""Beyond this number of its own timers a worker leaves them to the poll."""
_PAUSE_SECONDS: Final = 1.0
"""After PostgreSQL was unavailable."""


class TimerFiring:
    """Fires the timers of one shard."""

    def __init__(
        self,
        database: Database,
        elected: asyncio.Event,
        modes: MaintenanceModes,
        timers: Timers,
        appender: InboxAppender,
        envelope: Envelope,
    ) -> None:
        """`elected`: this worker runs the background jobs."""
        self._database = database
        self._elected = elected
        self._modes = modes
        self._appender = appender
        self._envelope = envelope
        self._alarms: list[float] = []
        self._poll_seconds = _POLL_SECONDS
        self._woken = asyncio.Event()
        self._background = BackgroundTask()
        self._watcher = BackgroundTask()
        self._meter = timers.meter
        timers.on_scheduled = self.scheduled

    def start(self) -> None:
        self._background.start(self._serve())
        self._watcher.start(self._watch_election())

    async def stop(self) -> None:
        await self._watcher.stop()
        await self._background.stop()

    def scheduled(self, due: datetime) -> None:
        """A timer of this worker is due at a time."""
        if len(self._alarms) >= _MOST_ALARMS:
            return
        at = due.timestamp()
        if not self._alarms or at < self._alarms[0]:
            self._woken.set()
        heapq.heappush(self._alarms, at)

    async def _watch_election(self) -> None:
        await self._elected.wait()
        self._woken.set()

    async def _serve(self) -> None:
        while True:
            is_due = await self._wait()
            try:
                if is_due or await self._find_due():
                    while await self._fire():
                        pass
            except DatabaseUnavailable as error:
                log.debug("timers wait for PostgreSQL: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
            except Overloaded as error:
                log.warning("timers could not be fired, retrying: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:
                log.exception("timers could not be fired; retrying")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _wait(self) -> bool:
        """Until an alarm is due or, where this worker is elected, for the interval of polling; whether one is due."""
        self._woken.clear()
        waits = [self._poll_seconds] if self._elected.is_set() else []
        if self._alarms:
            # The clock of PostgreSQL decides; a moment later it has come there, too.
            waits.append(max(0.0, self._alarms[0] - _now()) + 0.002)
        try:
            async with asyncio.timeout(min(waits) if waits else None):
                await self._woken.wait()
        except TimeoutError:
            pass
        is_due = False
        while self._alarms and self._alarms[0] <= _now():
            heapq.heappop(self._alarms)
            is_due = True
        return is_due

    async def _find_due(self) -> bool:
        """Whether any timer is due."""
        if not self._elected.is_set():
            return False
        rows = await self._database.fetch("timers_next")
        self._poll_seconds = _POLL_SECONDS if rows else _IDLE_POLL_SECONDS
        return bool(rows) and rows[0]["due_in"] <= 0

    async def _fire(self, held: Collection[str] = ()) -> bool:
        """Fire what is due; whether there may be more. Timers of queues that are `held` wait."""
        if self._modes.push_maintenance or not self._modes.known:
            return False
        taken: list[Record] = []
        try:
            appended = await retry_transaction(lambda: self._fire_batch(taken, held))
        except DatabaseUnavailable:
            raise
        except QueuesHeld as error:
            log.debug("timers of %s wait: %s", ", ".join(error.queues), error)
            return await self._fire({*held, *error.queues})
        except Exception as error:
            log.debug("firing %d timers failed, retrying them in halves: %s", len(taken), error)
            await self._fire_apart(list(taken))
            return True
        self._settle(appended)
        return len(taken) == _BATCH

    def _settle(self, appended: Appended) -> None:
        self._appender.settle(appended)
        for outcome, count in (
            ("pushed", appended.stored),
            ("duplicate", appended.duplicates),
            ("dead_letter", appended.dead),
        ):
            if count:
                self._meter.count("timer", "fire", outcome, count)

    async def _fire_batch(self, taken: list[Record], held: Collection[str]) -> Appended:
        async with self._database.transaction() as transaction:
            taken[:] = await transaction.fetch("timers_take", _BATCH, list(held))
            return await self._append(transaction, taken)

    async def _fire_apart(self, rows: Sequence[Record]) -> None:
        """Fire timers one by one, so that one whose message cannot be appended does not keep the others."""
        for row in rows:
            try:
                appended = await retry_transaction(partial(self._fire_one, row))
            except DatabaseUnavailable:
                raise
            except Exception as error:
                self._meter.count("timer", "fire", "retry")
                log.warning("timer %r of queue %r cannot be pushed: %s", row["key"], row["queue"], error)
                await self._database.fetch("timers_delay", row["queue"], row["key"], str(error))
            else:
                self._settle(appended)

    async def _fire_one(self, row: Record) -> Appended:
        async with self._database.transaction() as transaction:
            return await self._append(transaction, await transaction.fetch("timers_take_one", row["queue"], row["key"]))

    async def _append(self, transaction: Transaction, timers: Sequence[Record]) -> Appended:
        appended = Appended()
        rows = [self._inbox_row(one) for one in timers]
        await self._appender.append_messages(transaction, rows, appended, lambda row: row["producer_sub"])
        return appended

    def _inbox_row(self, timer: Record) -> dict[str, Any]:
        """A timer in the form of a row of the inbox."""
        return {
            "id": timer["id"],
            "queue": timer["queue"],
            "partition": timer["partition"],
            "transaction_ids": [timer["transaction_id"]],
            "trace_id": None,
            "pushed_at": timer["deliver_at"],
            "producer_sub": timer["producer_sub"],
            "body": b"[%b]" % self._envelope.open(timer["body"]),
        }


def _now() -> float:
    return datetime.now().timestamp()

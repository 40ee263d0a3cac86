"""Timers: scheduling, cancelling and listing them; `broker.transactions.timer_firing` pushes their messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec
from msgspec import Raw

from queen.broker.state.key_values import MOST_COUNTED, hold_queues
from queen.errors import Conflict, NotFound
from queen.log.catalog import Catalog
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, Record, retry_transaction, storable
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.fields import Pagination
from queen.wire.ids import IdSource
from queen.wire.push import DEFAULT_PARTITION
from queen.wire.state.timers import (
    Cancel,
    PendingTimer,
    PendingTimers,
    TimerAnswer,
    TimerList,
    TimerOperation,
    TimerResult,
    TimerRow,
    TimerView,
    payload_of,
)
from queen.wire.times import iso_micros


class Timers:
    """The timers of one shard."""

    def __init__(
        self, database: Database, catalog: Catalog, envelope: Envelope, ids: IdSource, meter: Meter, *, sharded: bool
    ) -> None:
        """`sharded`: there are other shards, to which the queue of a timer may move."""
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._ids = ids
        self.meter = meter
        self._sharded = sharded
        self.on_scheduled: Callable[[datetime], None] = lambda due: None
        """Called after the commit, with the time at which a timer is due."""

    async def run(self, operations: Sequence[TimerOperation], subject: str | None = None) -> TimerAnswer:
        """Run operations, all or nothing. `subject` is the producer of the timers' messages."""
        try:
            return TimerAnswer(await retry_transaction(lambda: self._run(operations, subject)))
        except Exception:
            for one in operations:
                self.meter.count("timer", "cancel" if isinstance(one, Cancel) else "schedule", "error")
            raise

    async def prepare(self, operations: Sequence[TimerOperation]) -> None:
        """Before a transaction: where there are several shards, a timer has its queue, by which it is found."""
        if self._sharded and operations:
            await self._catalog.ensure_partitions(
                {(one.queue, DEFAULT_PARTITION if isinstance(one, Cancel) else one.partition) for one in operations}
            )

    async def run_in(
        self, fetcher: Fetcher, operations: Sequence[TimerOperation], subject: str | None, first: int = 0
    ) -> list[TimerResult]:
        """Do operations in a transaction; results are numbered from `first` on. `settle` follows the commit."""
        if not operations:
            return []
        if self._sharded:
            await self._hold(fetcher, sorted({one.queue for one in operations}))
        results: dict[tuple[str, str], TimerResult] = {}
        for index, one in enumerate(operations, first):
            results[one.queue, one.timer_key] = TimerResult(
                index, False, "absent", one.queue, one.timer_key, one.txn or None
            )
        await self._schedule(fetcher, [one for one in operations if not isinstance(one, Cancel)], subject, results)
        cancelled = [one for one in operations if isinstance(one, Cancel)]
        if cancelled:
            rows = await fetcher.fetch(
                "timers_cancel", [one.queue for one in cancelled], [one.timer_key for one in cancelled]
            )
            for row in rows:
                result = results[row["queue"], row["key"]]
                result.ok, result.status, result.txn = True, "cancelled", row["transaction_id"]
        return list(results.values())

    def settle(self, results: Sequence[TimerResult]) -> None:
        """After the commit: those that are due soon are fired at their time."""
        for result in results:
            kind = "cancel" if result.status in ("cancelled", "absent") else "schedule"
            self.meter.count("timer", kind, result.status)
            if isinstance(result.deliver_at, str):
                self.on_scheduled(datetime.fromisoformat(result.deliver_at))

    async def peek(self, queue: str, key: str) -> TimerView:
        await self._find(queue)
        rows = await self._database.fetch("timers_peek", queue, key)
        if not rows:
            return TimerView(False)
        row = rows[0]
        try:
            payload = self._envelope.open(row["body"])
        except EnvelopeError as error:
            raise Conflict(f"the payload of timer {key!r} cannot be read: {error}") from error
        return TimerView(
            True,
            queue,
            key,
            str(row["id"]),
            row["partition"],
            row["transaction_id"],
            iso_micros(row["deliver_at"]),
            Raw(payload),
            row["attempts"],
            row["last_error"],
        )

    async def page(self, queue: str, after: str, limit: int) -> TimerList:
        await self._find(queue)
        rows = await self._database.fetch("timers_list", queue, storable(after), limit + 1)
        shown = [_row(row) for row in rows[:limit]]
        truncated = len(rows) > limit
        return TimerList(shown, truncated, shown[-1].timer_key if truncated else None)

    async def pending(self, queue: str, prefix: str, limit: int, offset: int) -> PendingTimers:
        """A page of the timers of a queue (empty: of all) by the time they are due."""
        rows = await self._database.fetch("timers_page", queue, prefix, limit, offset)
        (count,) = await self._database.fetch("timers_count", queue, prefix, MOST_COUNTED)
        timers = [PendingTimer(**msgspec.structs.asdict(_row(row)), queue=row["queue"]) for row in rows]
        return PendingTimers(timers, count["found"], count["found"] < MOST_COUNTED, Pagination(limit, offset))

    async def _run(self, operations: Sequence[TimerOperation], subject: str | None) -> list[TimerResult]:
        await self.prepare(operations)
        async with self._database.transaction() as transaction:
            results = await self.run_in(transaction, operations, subject)
        self.settle(results)
        return results

    async def _schedule(
        self,
        fetcher: Fetcher,
        operations: Sequence[TimerOperation],
        subject: str | None,
        results: dict[tuple[str, str], TimerResult],
    ) -> None:
        scheduled = [one for one in operations if not isinstance(one, Cancel)]
        if not scheduled:
            return
        ids = [one.txn or self._ids.uuid() for one in scheduled]
        names = [uuid.uuid4() for _ in scheduled]
        rows = await fetcher.fetch(
            "timers_schedule",
            [one.queue for one in scheduled],
            [one.timer_key for one in scheduled],
            names,
            [one.partition for one in scheduled],
            ids,
            [await self._sealed(one.queue, payload_of(one)) for one in scheduled],
            [one.delay_ms / 1000 for one in scheduled],
            subject,
        )
        due = {(row["queue"], row["key"]): row for row in rows}
        for one, txn, name in zip(scheduled, ids, names, strict=True):
            key = (one.queue, one.timer_key)
            result, row = results[key], due[key]
            result.ok, result.status = True, "rescheduled" if row["rescheduled"] else "scheduled"
            result.txn, result.message_id, result.deliver_at = txn, str(name), iso_micros(row["deliver_at"])

    async def _sealed(self, queue_name: str, payload: bytes) -> bytes:
        queue = await self._catalog.queue(queue_name)
        encrypt = queue is not None and queue.encryption_enabled
        if encrypt and not self._envelope.can_encrypt:
            raise Conflict(f"queue {queue_name!r} is encrypted, and the server has no QUEEN_ENCRYPTION_KEY")
        return self._envelope.seal(payload, encrypt=encrypt)

    async def _find(self, queue: str) -> None:
        """Raises `NotFound` where the queue has moved to another shard."""
        if self._sharded:
            await self._catalog.ensure_partitions({(queue, DEFAULT_PARTITION)})
            await self._hold(self._database, [queue])

    async def _hold(self, fetcher: Fetcher, queues: Sequence[str]) -> None:
        gone = await hold_queues(fetcher, self._catalog, queues)
        if gone:
            raise NotFound(f"queue {gone[0]!r} is not on this shard")


def _row(row: Record) -> TimerRow:
    return TimerRow(
        row["key"],
        str(row["id"]),
        row["partition"],
        row["transaction_id"],
        iso_micros(row["deliver_at"]),
        iso_micros(row["scheduled_at"]),
        row["attempts"],
        row["last_error"],
    )

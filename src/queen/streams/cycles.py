"""Cycles: a batch of one partition is processed by the chain and committed in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from queen.streams.chain import Chain
from queen.streams.folding import fold_sessions, fold_windows
from queen.streams.gates import Gate, pass_gate
from queen.streams.operators import Foreach, Reduce, Sink
from queen.streams.query import Query
from queen.streams.records import (
    WATERMARK_KEY,
    Batch,
    Emit,
    Message,
    Outcome,
    Record,
    Rows,
    now_ms,
    parse_iso_ms,
    watermark_of,
)
from queen.streams.windows import OpenPartition, OpenWindows, Session, SpanWindow, Window


async def deliver(chain: Chain, emits: Sequence[Emit], partition: str, partition_id: str) -> list[dict[str, Any]]:
    """Call the function of a `foreach`, or return the items to push to the sink."""
    made = await _apply(chain, emits, partition, partition_id)
    if isinstance(chain.end, Sink):
        return chain.end.push_items(made, partition)
    if isinstance(chain.end, Foreach):
        await chain.end.run(made, partition, partition_id)
    return []


async def _apply(chain: Chain, emits: Sequence[Emit], partition: str, partition_id: str) -> list[Emit]:
    made = list(emits)
    for operator in chain.after:
        before, made = made, []
        for emit in before:
            values = await operator.values(emit.value, emit.value, emit.context(partition, partition_id))
            # None leaves the value unchanged.
            made += [emit if value is None else replace(emit, value=value) for value in values]
    return made


Report: TypeAlias = Callable[[Exception, dict[str, Any]], Awaitable[None]]
"""Called with an error and its context."""


@dataclass(slots=True)
class _Timed:
    """Records with their times, without late ones, and the clock that closes windows."""

    records: list[tuple[Record, int]]
    clock: int | None
    watermark: int | None
    late: int


class Cycles:
    """Runs the cycles of one query."""

    def __init__(self, chain: Chain, query: Query, metrics: Metrics, windows: OpenWindows, report: Report) -> None:
        self._chain = chain
        self._query = query
        self._metrics = metrics
        self._windows = windows
        self._report = report

    async def run(self, batch: Batch) -> None:
        """Run one cycle. Raises `StateChanged` on a concurrent change by another runner: the batch is redelivered."""
        records = await self._records(batch)
        partition = self._windows.partition(batch.partition_id, batch.partition)
        async with partition.busy:
            await self._attempt(batch, records, partition)

    async def flush(self, partition: OpenPartition, group: str) -> None:
        """Emit windows that have ended while no messages arrive."""
        window, reducer = self._chain.window, self._chain.reducer
        if window is None or reducer is None or window.by_event_time:
            return
        async with partition.busy:
            clock = now_ms()
            ripe_at = clock - window.grace_ms
            # All state of a partition found at the start is read: this runner does not know when its windows end.
            until = None if partition.unread else ripe_at
            rows = await self._query.read_prefix(partition.id, window.prefix, until)
            outcome = await _fold(window, reducer, rows, [], clock)
            if outcome.emits:
                await self._commit_flush(partition, group, outcome)
            partition.unread = False
            self._windows.note(partition, ripe_at, outcome.ends)

    async def _commit_flush(self, partition: OpenPartition, group: str, outcome: Outcome) -> None:
        items = await deliver(self._chain, outcome.emits, partition.name, partition.id)
        await self._query.commit(partition.id, group, changes=outcome.changes, items=items, ack=None)
        self._metrics.add(flushCyclesTotal=1, stateOpsTotal=len(outcome.changes), pushItemsTotal=len(items))

    async def _records(self, batch: Batch) -> list[Record]:
        """The output of the operators before a window or gate, with keys."""
        records: list[Record] = []
        for index, message in enumerate(batch.messages):
            values: list[Any] = [message.get("data")]
            for operator in self._chain.before:
                values = [made for value in values for made in await operator.values(message, value, None)]
            if not values:
                continue
            key = await self._chain.key_by.key(message) if self._chain.key_by else batch.partition_id
            records += [Record(message, index, key, value) for value in values]
        return records

    async def _attempt(self, batch: Batch, records: Sequence[Record], partition: OpenPartition) -> None:
        if self._chain.gate is not None:
            await self._run_gate(self._chain.gate, batch, records)
        elif self._chain.window is not None:
            await self._run_window(self._chain.window, batch, records, partition)
        else:
            emits = [Emit(record.key, record.value) for record in records]
            await self._commit(batch, Outcome(emits=emits), batch.messages)

    async def _run_gate(self, gate: Gate, batch: Batch, records: Sequence[Record]) -> None:
        rows = await self._query.read_keys(batch.partition_id, {record.key for record in records})
        passed = await pass_gate(
            gate, rows, records, now_ms=now_ms(), partition_id=batch.partition_id, partition=batch.partition
        )
        consumed = batch.messages if passed.stopped_at is None else batch.messages[: passed.stopped_at]
        self._metrics.add(gateDenialsTotal=passed.denied)
        if not consumed:
            # No ack: the gate is called again when the lease expires.
            return
        await self._commit(batch, passed.outcome, consumed, release=passed.stopped_at is None)
        self._metrics.add(gateAllowsTotal=passed.allowed)

    async def _run_window(
        self, window: Window, batch: Batch, records: Sequence[Record], partition: OpenPartition
    ) -> None:
        reducer = self._chain.reducer
        placed = await self._timed(window, batch, records)
        if reducer is None:
            assert isinstance(window, SpanWindow)
            emits = [Emit(record.key, record.value, span) for record, ms in placed for span in window.spans(ms)]
            await self._commit(batch, Outcome(emits=emits), batch.messages)
            return
        rows, timed = await self._read(window, batch, placed)
        outcome = await _fold(window, reducer, rows, timed.records, timed.clock)
        outcome.late = timed.late
        if timed.watermark is not None:
            stored = rows.get(WATERMARK_KEY)
            outcome.upsert(WATERMARK_KEY, {"eventTimeMs": timed.watermark}, stored.version if stored else None)
        await self._commit(batch, outcome, batch.messages)
        closed_to = timed.clock - window.grace_ms if timed.clock is not None else None
        self._windows.note(partition, closed_to, outcome.ends)

    async def _read(self, window: Window, batch: Batch, placed: Sequence[tuple[Record, int]]) -> tuple[Rows, _Timed]:
        """The state of the batch's keys and of ended windows, and the records without late ones."""
        own = self._query.read_keys(batch.partition_id, _state_keys(window, placed))
        if window.by_event_time:
            rows = await own
            timed = _drop_late(window, placed, watermark_of(rows))
            return rows | await self._ended(window, batch, timed.clock), timed
        timed = _Timed(list(placed), _processing_clock(window, batch), None, 0)
        rows, ended = await asyncio.gather(own, self._ended(window, batch, timed.clock))
        return rows | ended, timed

    async def _ended(self, window: Window, batch: Batch, clock: int | None) -> Rows:
        if clock is None:
            return {}
        return await self._query.read_prefix(batch.partition_id, window.prefix, clock - window.grace_ms)

    async def _timed(self, window: Window, batch: Batch, records: Sequence[Record]) -> list[tuple[Record, int]]:
        """Each record with its time; records without a valid time are reported and skipped."""
        placed = []
        for record in records:
            try:
                placed.append((record, await window.time_of(record.message)))
            except ValueError as error:
                await self._report(error, {"phase": "window-apply", "partition": batch.partition_id})
        return placed

    async def _commit(
        self, batch: Batch, outcome: Outcome, consumed: Sequence[Message], *, release: bool = True
    ) -> None:
        items = await deliver(self._chain, outcome.emits, batch.partition, batch.partition_id)
        ack = {
            "transactionId": consumed[-1].get("transactionId"),
            "leaseId": batch.lease_id,
            "status": "completed",
            "count": len(consumed),
        }
        await self._query.commit(
            batch.partition_id, batch.group, changes=outcome.changes, items=items, ack=ack, release=release
        )
        self._metrics.add(
            cyclesTotal=1,
            messagesTotal=len(consumed),
            stateOpsTotal=len(outcome.changes),
            pushItemsTotal=len(items),
            lateEventsTotal=outcome.late,
        )
        self._metrics.mark("lastCycleAt")


async def _fold(
    window: Window, reducer: Reduce, rows: Rows, placed: Sequence[tuple[Record, int]], clock: int | None
) -> Outcome:
    if isinstance(window, Session):
        return await fold_sessions(window, reducer, rows, placed, clock)
    assert isinstance(window, SpanWindow)
    spans = [(record, span) for record, ms in placed for span in window.spans(ms)]
    return await fold_windows(window, reducer, rows, spans, clock)


def _state_keys(window: Window, placed: Sequence[tuple[Record, int]]) -> set[str]:
    """The keys of the state that a batch changes."""
    keys = {WATERMARK_KEY} if window.by_event_time else set()
    if isinstance(window, Session):
        return keys | {window.state_key(record.key) for record, _ in placed}
    assert isinstance(window, SpanWindow)
    return keys | {window.state_key(span, record.key) for record, ms in placed for span in window.spans(ms)}


def _drop_late(window: Window, placed: Sequence[tuple[Record, int]], watermark: int | None) -> _Timed:
    """Event time: records older than the watermark are late; then the watermark advances, and never goes back."""
    kept = [(record, ms) for record, ms in placed if watermark is None or ms >= watermark or not window.drops_late]
    newest = max((ms for _, ms in placed), default=None)
    reached = [ms for ms in (watermark, newest - window.lateness_ms if newest is not None else None) if ms is not None]
    clock = max(reached, default=None)
    return _Timed(kept, clock, clock, len(placed) - len(kept))


def _processing_clock(window: Window, batch: Batch) -> int | None:
    """Processing time: the newest `createdAt` of the batch; for sessions, the local clock."""
    if isinstance(window, Session):
        return now_ms()
    times = [parse_iso_ms(str(message.get("createdAt"))) for message in batch.messages]
    return max((ms for ms in times if ms is not None), default=None)


class Metrics:
    """Counters, with the names used by all Queen SDKs."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(
            (
                "cyclesTotal",
                "flushCyclesTotal",
                "messagesTotal",
                "pushItemsTotal",
                "stateOpsTotal",
                "lateEventsTotal",
                "errorsTotal",
                "gateAllowsTotal",
                "gateDenialsTotal",
            ),
            0,
        )
        self._last: dict[str, str | None] = dict.fromkeys(("lastCycleAt", "lastFlushAt", "lastError"))

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counts[name] += count

    def mark(self, name: str) -> None:
        """Set a timestamp to now."""
        self._last[name] = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def failed(self, error: BaseException) -> None:
        self._counts["errorsTotal"] += 1
        self._last["lastError"] = str(error) or type(error).__name__

    def snapshot(self) -> dict[str, Any]:
        return {**self._counts, **self._last}

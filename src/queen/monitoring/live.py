"""The live feed: counters once a second, and changes as they happen, computed once for all listeners of a worker.

Without listeners nothing is done. Reading what all queues hold, and what happened to each of them, takes longer the
more there are: each gets a bounded share of the time, and comes less often where it takes long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import asyncpg
import msgspec

from queen.broker.broker import Broker
from queen.broker.events import Event, EventKind
from queen.broker.inspect.queue_stats import QueueStats
from queen.broker.topics.topics import NAME_SEPARATOR
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.metrics.counters import LATENCY_SECONDS, Histogram
from queen.metrics.report import Report
from queen.monitoring.recorder import Recorder
from queen.storage.database import Record
from queen.wire.api.monitoring.events import (
    DeadLetterEvent,
    GroupEvent,
    LiveDepth,
    LiveMaintenance,
    LiveQueue,
    LiveRates,
    LiveShard,
    LiveSpool,
    LiveTotals,
    LiveView,
    LiveWorker,
    QueueEvent,
    QuotaEvent,
    TopicEvent,
)
from queen.wire.times import iso_millis

log = logging.getLogger(__name__)

_TICK_SECONDS: Final = 1.0
_GATHER_SECONDS: Final = 0.05
"""Changes that come within this time are sent together."""
_MOST_EVENTS: Final = 200
"""More changes at once are one `resync`."""
_MOST_QUEUES: Final = 50
_MOST_UNSENT: Final = 256 * 1024
"""A listener that has left more unread is dropped."""
_LONGEST_SECONDS: Final = 900.0
"""After so many seconds a listener has to connect again: its permissions may have changed."""
_DEPTH_SHARE: Final = 40.0
"""Of all workers together: each of them counts for its own listeners."""
_QUEUES_SHARE: Final = 50.0
_RETRY: Final = b"retry: 2000\n\n"

_encode: Final = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Where a listener is written to."""

    @property
    def unsent(self) -> int: ...

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Listener:
    """A client of the feed, until its time or its number of `counters` is over."""

    writer: Writer
    until: float
    """Loop time."""
    left: int | None = None


@dataclass(slots=True)
class _LastReport:
    """A worker as of its last report, and how fast it was going then."""

    at: float
    totals: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(slots=True)
class _QueueRates:
    """What each queue had counted at the last look, and what came of comparing."""

    looked_at: float = 0.0
    due: float = 0.0
    counted: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    busiest: list[LiveQueue] = field(default_factory=list)


class LiveFeed:
    """The feed of one worker."""

    def __init__(
        self,
        brokers: Sequence[Broker],
        recorder: Recorder,
        queue_stats: Sequence[QueueStats],
        places_changed: Callable[[], asyncio.Event] | None = None,
    ) -> None:
        """`queue_stats` are those of the brokers' queues.

        `places_changed` gives what is set when something has moved to another shard, where there are several.
        """
        self._brokers = brokers
        self._recorder = recorder
        self._queue_stats = queue_stats
        self._places_changed = places_changed
        self._moved = asyncio.Event()
        self._listeners: set[Listener] = set()
        self._background = BackgroundTask()
        self._depth_task: asyncio.Task[None] | None = None
        self._running = False
        self._closed = False
        self._last = b""
        self._last_at = 0.0
        self._events: dict[bytes, None] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._last_reports: dict[int, _LastReport] = {}
        self._queues = _QueueRates()
        self._depth: LiveDepth | None = None
        self._counted: list[list[Record]] = []
        self._depth_due = 0.0
        self._modes: LiveMaintenance | None = None
        self._shards: list[LiveShard] = []
        for broker in brokers:
            kinds = (EventKind.QUEUE_CHANGED, EventKind.QUEUE_GONE, EventKind.GROUP_CHANGED)
            broker.notifications.subscribe(dict.fromkeys(kinds, self._changed))
            kinds = (EventKind.TOPIC_CHANGED, EventKind.QUOTAS_CHANGED, EventKind.MODES_CHANGED)
            broker.notifications.subscribe(dict.fromkeys(kinds, self._changed), own=False)
            broker.topics.on_change = self._changed
            broker.changes.on_entries = self._logged

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def join(self, writer: Writer, *, seconds: float = _LONGEST_SECONDS, limit: int | None = None) -> Listener:
        """Begin to write to a listener: the counters now, and everything from now on."""
        now = asyncio.get_running_loop().time()
        listener = Listener(writer, now + min(seconds, _LONGEST_SECONDS), limit)
        if self._closed:
            writer.close()
            return listener
        self._listeners.add(listener)
        writer.write(_RETRY)
        if now - self._last_at < _TICK_SECONDS:
            self._send_counters([listener], self._last)
        if not self._running:
            self._running = True
            self._background.start(self._run())
        return listener

    def leave(self, listener: Listener) -> None:
        """It does not listen any more."""
        self._listeners.discard(listener)

    def close(self) -> None:
        """End all streams; none begins from now on."""
        self._closed = True
        for listener in self._listeners:
            listener.writer.close()
        self._listeners.clear()

    async def stop(self) -> None:
        self.close()
        await self._background.stop()
        if self._depth_task is not None:
            self._depth_task.cancel()
            await asyncio.wait([self._depth_task])

    async def _run(self) -> None:
        """Tick while there are listeners."""
        loop = asyncio.get_running_loop()
        # Changes before the first listener are not sent.
        self._forget()
        try:
            while self._listeners:
                began = loop.time()
                try:
                    await self._tick()
                except Exception:
                    # The next one may do better, and listeners see by the time that this one is missing.
                    log.exception("live counters could not be gathered")
                await asyncio.sleep(max(0.0, began + _TICK_SECONDS - loop.time()))
        finally:
            self._running = False

    def _forget(self) -> None:
        self._last_reports.clear()
        self._queues = _QueueRates()
        self._modes, self._shards = None, []
        if self._places_changed is not None:
            self._moved = self._places_changed()

    async def _tick(self) -> None:
        reports = await self._recorder.live_reports()
        now = asyncio.get_running_loop().time()
        if now >= self._depth_due and (self._depth_task is None or self._depth_task.done()):
            self._depth_task = asyncio.create_task(self._read_depth(_DEPTH_SHARE * max(1, len(reports))))
        self._note_state()
        self._note_queues(reports, now)
        self._last, self._last_at = _frame("counters", self._view(reports)), now
        for listener in [one for one in self._listeners if one.until <= now]:
            self._end(listener)
        self._send_counters(list(self._listeners), self._last)

    def _view(self, reports: Sequence[Report]) -> LiveView:
        totals, rates = self._rates(reports)
        spools = [broker.spool.stats() for broker in self._brokers]
        return LiveView(
            at=_now(),
            rates=LiveRates(*(round(rate, 1) for rate in rates)),
            totals=LiveTotals(*totals),
            parked=sum(round(report.last("parked")) for report in reports),
            in_flight=sum(round(report.last("in_flight")) for report in reports),
            push_latency_ms=_push_latency(reports),
            depth=self._depth,
            workers=[_worker(report) for report in reports],
            shards=self._shards,
            maintenance=self._modes or LiveMaintenance(False, False),
            spool=LiveSpool(
                sum(stats.messages for stats in spools),
                sum(stats.bytes for stats in spools),
                sum(stats.failed_records for stats in spools),
            ),
            queues=self._queues.busiest,
        )

    def _rates(self, reports: Iterable[Report]) -> tuple[list[int], list[float]]:
        """What all workers have counted, and how fast; the report of another worker may be the one of before."""
        totals, rates = [0] * 6, [0.0] * 6
        for report in reports:
            counted, last = _counted(report), self._last_reports.get(report.worker_id)
            if last is None:
                last = self._last_reports[report.worker_id] = _LastReport(report.at, counted, (0.0,) * 6)
            elif report.at > last.at:
                grown = zip(counted, last.totals, strict=True)
                speeds = tuple(max(0, after - before) / (report.at - last.at) for after, before in grown)
                self._last_reports[report.worker_id] = last = _LastReport(report.at, counted, speeds)
            for place in range(6):
                totals[place] += counted[place]
                rates[place] += last.rates[place]
        return totals, rates

    def _note_state(self) -> None:
        """Notice what has switched since the last tick."""
        modes = self._brokers[0].modes
        maintenance = LiveMaintenance(modes.push_maintenance, modes.pop_maintenance)
        if self._modes is not None and maintenance != self._modes:
            self._emit("maintenance", maintenance)
        self._modes = maintenance
        shards = []
        for number, broker in enumerate(self._brokers):
            availability = broker.database.availability
            shards.append(LiveShard(number, not availability.down, availability.reason if availability.down else ""))
        for before, after in zip(self._shards, shards, strict=False):
            if before.up != after.up:
                self._emit("database", after)
        self._shards = shards
        if self._places_changed is not None and self._moved.is_set():
            self._moved = self._places_changed()
            self._emit("shards", {})

    def _note_queues(self, reports: Sequence[Report], now: float) -> None:
        """Compare the counters of each queue with the last sample, unless that took too long recently."""
        queues = self._queues
        if now < queues.due:
            return
        began = time.perf_counter()
        counted: dict[str, tuple[int, int, int, int]] = {}
        for report in reports:
            for name, tally in report.queues.items():
                own = (
                    tally.push_messages,
                    tally.pop_messages,
                    tally.ack_success + tally.auto_acked,
                    tally.dead_letters,
                )
                others = counted.get(name)
                counted[name] = (
                    own
                    if others is None
                    else (own[0] + others[0], own[1] + others[1], own[2] + others[2], own[3] + others[3])
                )
        if queues.looked_at:
            seconds = max(0.001, now - queues.looked_at)
            busy: list[LiveQueue] = []
            for name, after in counted.items():
                before = queues.counted.get(name, (0, 0, 0, 0))
                if after != before:
                    push, pop, ack = (round(max(0, after[i] - before[i]) / seconds, 1) for i in range(3))
                    busy.append(LiveQueue(name, push, pop, ack))
                    if after[3] > before[3]:
                        self._emit("deadLetter", DeadLetterEvent(name, after[3] - before[3]))
            busy.sort(key=lambda queue: (-(queue.push + queue.pop + queue.ack), queue.queue))
            queues.busiest = busy[:_MOST_QUEUES]
        queues.looked_at, queues.counted = now, counted
        queues.due = now + _QUEUES_SHARE * (time.perf_counter() - began)

    async def _read_depth(self, times: float) -> None:
        """Sum up what all queues hold; the pause until the next time is `times` as long as it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        counted: list[list[Record]] = []
        for queue_stats in self._queue_stats:
            try:
                counted.append(await queue_stats())
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("depth of a shard not read: %s", error)
        if counted != self._counted:
            self._counted = counted
            self._depth = _depth(counted) if counted else None
        self._depth_due = loop.time() + times * (loop.time() - began)

    def _changed(self, event: Event) -> None:
        """A notification of this or another worker."""
        if not self._listeners:
            return
        kind, name = event[0], event[5]
        if kind == EventKind.QUEUE_CHANGED:
            self._emit("queue", QueueEvent(name, "created" if event[4] else "changed"))
        elif kind == EventKind.QUEUE_GONE:
            self._emit("queue", QueueEvent(name, "deleted"))
        elif kind == EventKind.GROUP_CHANGED:
            self._emit("group", GroupEvent(name))
        elif kind == EventKind.TOPIC_CHANGED:
            namespace, _, topic = name.partition(NAME_SEPARATOR)
            self._emit("topic", TopicEvent(namespace, topic))
        elif kind == EventKind.QUOTAS_CHANGED:
            self._emit("quota", QuotaEvent(name))

    def _logged(self, entries: Sequence[Record]) -> None:
        """Entries of the change log: what no notification may have said."""
        if self._listeners:
            for entry in entries:
                if entry["kind"] in (EventKind.QUEUE_CHANGED, EventKind.GROUP_CHANGED):
                    self._changed((entry["kind"], 0, 0, 0, 0, entry["name"]))

    def _emit(self, name: str, data: Any) -> None:
        self._events[_frame(name, data)] = None
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        frames, self._events = list(self._events), {}
        if len(frames) > _MOST_EVENTS:
            frames = [_frame("resync", {})]
        self._send(list(self._listeners), b"".join(frames))

    def _send_counters(self, listeners: Iterable[Listener], frame: bytes) -> None:
        self._send(listeners, frame)
        for listener in listeners:
            if listener.left is not None:
                listener.left -= 1
                if listener.left <= 0:
                    self._end(listener)

    def _send(self, listeners: Iterable[Listener], data: bytes) -> None:
        for listener in listeners:
            if listener.writer.unsent > _MOST_UNSENT:
                log.info("a listener to live events was dropped: it left %d bytes unread", listener.writer.unsent)
                self._listeners.discard(listener)
                listener.writer.abort()
            else:
                listener.writer.write(data)

    def _end(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        listener.writer.close()


def _frame(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))


def _counted(report: Report) -> tuple[int, ...]:
    total = report.total
    return (
        total.push_messages,
        total.pop_messages,
        total.ack_success + total.auto_acked,
        total.ack_failed,
        total.dead_letters,
        total.http_responses,
    )


def _worker(report: Report) -> LiveWorker:
    return LiveWorker(
        report.worker_id,
        report.pid,
        round((report.last("cpu_user") + report.last("cpu_system")) / 100, 1),
        round(report.last("rss_bytes")),
        round(report.last("loop_lag_ms"), 1),
        round(report.last("parked")),
        round(report.last("in_flight")),
        round(max(0.0, time.time() - report.at), 1),
    )


def _push_latency(reports: Sequence[Report]) -> float | None:
    """Milliseconds that 99 % of the pushes of this host took at most."""
    latency = Histogram.of(LATENCY_SECONDS)
    for report in reports:
        latency.add(report.histograms["push_latency"])
    bound = latency.quantile(0.99)
    return None if bound is None else round(bound * 1000, 3)


def _depth(counted: Sequence[list[Record]]) -> LiveDepth:
    """The sum over the queues of all shards, as of the oldest count."""
    rows = [row for shard in counted for row in shard]
    sums = (sum(row[name] for row in rows) for name in ("partitions", "stored", "pending", "dead_letters"))
    at = min((row["at"] for row in rows), default=datetime.now(UTC))
    return LiveDepth(iso_millis(at), len(rows), *sums)


def _now() -> str:
    return iso_millis(datetime.now(UTC))

"""Reports: what a worker has counted and sampled, shared with the other workers of its host."""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from queen.files import replace
from queen.metrics.counters import Durations, Gauge, Histogram, Tally, WorkerTally

Row: TypeAlias = dict[str, Any]
"""One row of history, by the names of its columns."""


class Report(msgspec.Struct):
    """What a worker has counted and sampled. A restarted worker continues the report of its predecessor.

    `life` names the run of counters, `flush` the next flush of it to PostgreSQL, `base` and `queue_bases` where the
    counters stood at the last one: what was counted since then is in no table yet.
    """

    life: str
    host: str
    port: int
    worker_id: int
    pid: int
    started_at: float
    at: float
    flush: int
    flushed_at: float
    total: WorkerTally
    base: WorkerTally
    queues: dict[str, Tally]
    queue_bases: dict[str, Tally]
    histograms: dict[str, Histogram]
    gauges: dict[str, Gauge]
    """Sampled since the last flush."""
    parked: dict[str, Gauge]
    """Pops that waited, by queue, sampled since the last flush."""
    statuses: dict[int, int]
    """HTTP responses by status."""
    cpu_seconds: tuple[float, float] = (0.0, 0.0)
    """User and system time of the process."""
    rates: tuple[float, float] = (0.0, 0.0)
    """HTTP responses and messages per second, over the last minute."""
    topics: dict[str, int] = {}
    """Items of topics by `topic_label`."""
    topic_requests: dict[str, Durations] = {}
    """Requests about topics by `topic_label`."""

    notification_errors: dict[str, int] = {}
    """Notifications that could not be handled, by the kind of their event."""
    done: dict[str, int] = {}
    """What was done beside messages: `what`, `kind` and `outcome` in a line each."""
    connections: dict[str, int] = {}
    """Open connections by `peer` and the route that serves their request (or nothing), in a line each."""
    unsent: Report | None = None
    """The previous flush, until it is stored."""

    def last(self, gauge: str) -> float:
        """The newest sample of a gauge."""
        sampled = self.gauges.get(gauge)
        return sampled.last if sampled is not None else 0.0

    def copy(self) -> Report:
        """A snapshot of it."""
        return decode_report(encode_report(self))

    def worker_rows(self) -> list[Row]:
        """What was counted and sampled since the last flush that is known to be stored."""
        row = (
            self._span()
            | {"port": self.port, "pid": self.pid}
            | self.total.since(self.base).row()
            | {name: gauge.row() for name, gauge in self.gauges.items()}
        )
        return [*(self.unsent.worker_rows() if self.unsent is not None else ()), row]

    def queue_rows(self) -> list[Row]:
        """The same for each active queue."""
        rows = self.unsent.queue_rows() if self.unsent is not None else []
        span = self._span()
        for name in sorted(self.queues.keys() | self.parked.keys()):
            counted = self.queues.get(name, _NOTHING).since(self.queue_bases.get(name, _NOTHING))
            parked = self.parked.get(name)
            if counted == _NOTHING and (parked is None or parked.highest == 0):
                continue
            mean = parked.mean if parked is not None else 0.0
            rows.append(span | {"queue_name": name, "parked": mean} | counted.row())
        return rows

    def life_row(self) -> Row:
        """The worker and its totals."""
        return {
            "life": self.life,
            "host": self.host,
            "port": self.port,
            "worker_id": self.worker_id,
            "pid": self.pid,
            "flush": self.flush,
            "started_at": _iso(self.started_at),
            **self.total.row(),
        }

    def _span(self) -> Row:
        return {
            "life": self.life,
            "flush": self.flush,
            "host": self.host,
            "worker_id": self.worker_id,
            "at": _iso(self.flushed_at),
            "seconds": max(0.001, self.at - self.flushed_at),
        }


_NOTHING = Tally()
ALIVE_SECONDS: Final = 30.0
"""A report that is older is of a worker that has ended."""
_decoder = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


def decode_report(data: bytes) -> Report:
    """Raises `msgspec.DecodeError` (of which `ValidationError` is one) for anything but a report."""
    return _decoder.decode(data)


def new_life() -> str:
    return str(uuid.uuid4())


def _iso(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat()


log = logging.getLogger(__name__)


class SnapshotStore:
    """Where a worker publishes its report and reads those of the other workers of its host: a file each."""

    def __init__(self, directory: Path, worker_id: int, workers: int) -> None:
        self._directory = directory
        self._worker_id = worker_id
        self._workers = workers
        self._free = asyncio.Lock()

    async def publish(self, report: Report) -> None:
        """Replace the report of this worker atomically."""
        path, content = self._path(self._worker_id), encode_report(report)
        async with self._free:
            # In a thread: a slow disk must not block the event loop.
            await asyncio.to_thread(replace, path, content)

    def own(self) -> Report | None:
        """The last report of this worker or of its predecessor."""
        return self._read(self._worker_id)

    async def others(self) -> list[Report]:
        """The published reports of the other workers."""
        if self._workers == 1:
            return []
        return await asyncio.to_thread(self._read_others)

    def _read_others(self) -> list[Report]:
        reports = [self._read(peer) for peer in range(self._workers) if peer != self._worker_id]
        return [report for report in reports if report is not None]

    def _read(self, worker_id: int) -> Report | None:
        try:
            return decode_report(self._path(worker_id).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            # A worker of another version may have written it.
            log.warning("report of worker %d is unreadable: %s", worker_id, error)
            return None

    def _path(self, worker_id: int) -> Path:
        return self._directory / f"worker-{worker_id}.report"

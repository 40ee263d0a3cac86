"""What a worker tells the other workers of its host: all it has counted, and how it is."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

from queen.metrics.durations import Durations
from queen.metrics.gauge import Gauge
from queen.metrics.histogram import Histogram
from queen.metrics.tally import Tally, WorkerTally

Row: TypeAlias = dict[str, Any]
"""One row of history, by the names of its columns."""


class Report(msgspec.Struct):
    """A worker at one moment. A worker that is started again goes on from the report of the one before.

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
    """HTTP answers by status."""
    cpu_seconds: tuple[float, float] = (0.0, 0.0)
    """User and system time of the process."""
    rates: tuple[float, float] = (0.0, 0.0)
    """HTTP answers and messages per second, over the last minute."""
    topics: dict[str, int] = {}
    """Items of topics by `topic_label`."""
    topic_requests: dict[str, Durations] = {}
    """Requests about topics by `topic_label`."""

    unsent: Report | None = None
    """The flush before, as long as it is not known to be stored."""

    def last(self, gauge: str) -> float:
        """The newest sample of a gauge."""
        sampled = self.gauges.get(gauge)
        return sampled.last if sampled is not None else 0.0

    def copy(self) -> Report:
        """The same, of which nothing changes any more."""
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
        """The same for each queue with which anything happened."""
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
        """Who this worker is, and all it ever counted."""
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

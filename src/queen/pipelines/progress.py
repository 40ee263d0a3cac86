"""What Spark says of a running query, as numbers for people."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from queen.errors import QueenError, SettingsError
from queen.pipelines.declaration import Declaration, Sink, SourceKind
from queen.pipelines.session import Connection
from queen.pipelines.sinks import OBSERVED
from queen.spark.logs import Position, ShardLog
from queen.spark.offsets import Place, from_json
from queen.wire.pipelines import QueryStatus

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0


class QueueEnds:
    """Looked up every few seconds at most, from PostgreSQL; nothing where it is not known."""

    def __init__(self, declaration: Declaration, connection: Connection) -> None:
        named = [source.target.split(",") for source in declaration.sources if source.kind is SourceKind.QUEUE]
        self._queues = sorted({name.strip() for names in named for name in names})
        self._log = ShardLog(connection.databases) if connection.databases and self._queues else None
        self._next = 0.0

    def look(self) -> list[Position] | None:
        """None when it is not time yet, or when they cannot be had."""
        if self._log is None or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _SECONDS
        try:
            return self._log.positions(self._queues)
        except QueenError as error:
            # The queries that read them say what is wrong, if anything is.
            log.debug("lags are not known: %s", error)
            return None


_MOST_FAILURES: Final = 6
# PostgreSQL or the server is away, or the machine is too busy to start a process within Spark's ten seconds.
_PASSING: Final = re.compile(
    "failed to connect back|worker to connect back|CANNOT_OPEN_SOCKET"
    "|is not reachable|is unavailable|went away|DatabaseAway|Connection refused|connection failed"
    "|server closed the connection|the database system is (starting up|shutting down)"
)


class QueryWatch:
    """Follows one query, and starts it again when it failed for a reason that passes."""

    def __init__(self, sink: Sink, start: Callable[[], StreamingQuery]) -> None:
        self.sink = sink
        self.status = QueryStatus(name=sink.name, sink=str(sink))
        self._start = start
        self._query = start()
        self._seen: tuple[int, str] | None = None
        self._done: list[Place] | None = None
        self._stopped = False
        self._failures = 0
        self._again_at: float | None = None

    @property
    def active(self) -> bool:
        return self._again_at is not None or self._query.isActive

    @property
    def beginning(self) -> bool:
        """Whether it has not got at its sources yet."""
        return self._query.isActive and self._query.status["message"].startswith("Initializing")

    @property
    def failure(self) -> str | None:
        """Why it ended; None while it runs or will again, when it is done, and when it was stopped."""
        if self._stopped or self._again_at is not None or self._query.isActive:
            return None
        error = self._query.exception()
        return None if error is None else _cause(str(error))

    def stop(self) -> None:
        self._again_at = None
        if self._query.isActive:
            self._stopped = True
            try:
                self._query.stop()
            except (PySparkException, Py4JError) as error:
                # It takes its time; what it does meanwhile is not done twice, thanks to its checkpoint.
                log.warning("sink '%s' has not stopped yet: %s", self.sink.name, _cause(str(error)))

    def keep_up(self) -> None:
        """Start it again, after a while, if it ended for a reason that passes; its checkpoint knows where it was."""
        now = time.monotonic()
        if self._again_at is not None:
            if now >= self._again_at:
                self._again_at = None
                self._query = self._start()
            return
        failure = self.failure
        if failure is None or not _PASSING.search(failure) or self._failures >= _MOST_FAILURES:
            return
        self._again_at = now + 2.0**self._failures
        self._failures += 1
        log.warning("sink '%s' failed and is started again in a moment: %s", self.sink.name, failure)

    def look(self, ends: Sequence[Position] | None) -> None:
        """Take in what has happened since the last look. `ends`: where its queues end now, if that is known."""
        last = self._query.lastProgress
        # A look at the last report is cheap; all of those that are kept are read only when there is a new one.
        if last is not None and _key(last) != self._seen:
            for report in self._unseen():
                self._take(report)
            self._seen = _key(last)
        if ends is not None and self._done is not None:
            self.status.lag = behind(self._done, ends)

    def _unseen(self) -> list[Any]:
        reports = list(self._query.recentProgress)
        seen = [number for number, report in enumerate(reports) if _key(report) == self._seen]
        return reports[seen[-1] + 1 :] if seen else reports

    def _take(self, report: Any) -> None:
        status = self.status
        places = _places(report.sources, "endOffset")
        if places is not None:
            self._done = places
            status.lag = behind(places, _places(report.sources, "latestOffset") or ())
        watermark = (report.eventTime or {}).get("watermark")
        if watermark is not None and not watermark.startswith("1970-01-01"):
            status.watermark = watermark
        # A report of a trigger that found nothing to do is none of a batch.
        if "addBatch" not in report.durationMs:
            status.rows_per_second = 0.0
            return
        self._failures = 0
        seconds = report.batchDuration / 1000
        status.batches += 1
        status.rows += report.numInputRows
        status.written += _observed(report)
        status.batch_seconds = round(seconds, 3)
        status.rows_per_second = round(report.numInputRows / seconds, 1) if seconds else 0.0
        status.late += sum(operator.numRowsDroppedByWatermark for operator in report.stateOperators)
        status.state_rows = sum(operator.numRowsTotal for operator in report.stateOperators)


def behind(done: Sequence[Place], ends: Iterable[Place | Position]) -> int:
    """How many messages there are up to the ends that are not done."""
    reached = {(place.queue, place.id): place.offset for place in done}
    queues = {place.queue for place in done}
    return sum(max(0, _end(end) - reached.get((end.queue, end.id), 0)) for end in ends if end.queue in queues)


def _end(end: Place | Position) -> int:
    return end.offset if isinstance(end, Place) else end.next


def _key(report: Any) -> tuple[int, str]:
    return report.batchId, report.timestamp


def _observed(report: Any) -> int:
    row = report.observedMetrics.get(OBSERVED)
    return int(row["rows"]) if row is not None else 0


def _places(sources: Any, which: str) -> list[Place] | None:
    """How far each partition of the queues is; None where no source is a queue."""
    found: list[Place] | None = None
    for source in sources:
        try:
            places = from_json(msgspec.json.decode(getattr(source, which) or "null"))
        except (msgspec.DecodeError, SettingsError):
            # The source is no queue.
            continue
        found = (found or []) + places
    return found


def _cause(text: str) -> str:
    """The part of Spark's message that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "Exception: " in line]
    return errors[-1] if errors else lines[0]

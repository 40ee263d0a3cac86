"""Progress of running queries: rows, rates, lag, watermark."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from queen.errors import QueenError, SettingsError
from queen.pipelines.declaration import Declaration, SourceKind
from queen.pipelines.errors import cause_of
from queen.pipelines.queries.fan_out import OBSERVED, FanOut
from queen.pipelines.session import Connection
from queen.spark.options import names_in
from queen.spark.source.logs import ShardLog
from queen.spark.source.offsets import PartitionOffsets, StreamOffset, count_between, decode_offset
from queen.wire.pipelines import QueryStatus

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0


class QueueEnds:
    """Looked up every few seconds at most, from PostgreSQL; nothing where it is not known."""

    def __init__(self, declaration: Declaration, connection: Connection) -> None:
        named = [names_in(source.target) for source in declaration.sources if source.kind is SourceKind.QUEUE]
        self._queues = {name for names in named for name in names}
        kind = SourceKind.QUEUE_PATTERN
        self._patterns = [re.compile(source.target) for source in declaration.sources if source.kind is kind]
        wanted = connection.databases and (self._queues or self._patterns)
        self._log = ShardLog(connection.databases) if wanted else None
        self._next = 0.0

    def look(self) -> StreamOffset | None:
        """None when it is not time yet, or when they cannot be had."""
        if self._log is None or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _SECONDS
        try:
            ends = self._log.ends(sorted(self._queues | self._matching(self._log)))
            return {one.queue: PartitionOffsets(one.ids, one.next) for one in ends}
        except QueenError as error:
            # The queries that read the queues report what is wrong, if anything is.
            log.debug("cannot look up the lag: %s", error)
            return None

    def _matching(self, queues: ShardLog) -> set[str]:
        """The queues that patterns name now."""
        names = queues.queue_names() if self._patterns else ()
        return {name for name in names if any(pattern.fullmatch(name) for pattern in self._patterns)}


_MOST_FAILURES: Final = 6
# PostgreSQL or the server is unavailable, or the machine is too busy to start a process within Spark's ten seconds.
_TRANSIENT: Final = re.compile(
    "failed to connect back|worker to connect back|CANNOT_OPEN_SOCKET"
    "|is unavailable|is not reachable|Connection refused|connection failed"
    "|server closed the connection|terminating connection due to|connection is (closed|lost)"
    "|the database system is (starting up|shutting down|in recovery|not yet accepting)"
    "|was moved to shard|has left this shard|is being moved"
)
# PostgreSQL answered, and will say the same the next time.
_PERMANENT: Final = re.compile(
    r'refuses the connection|authentication failed|no password supplied|(role|database) "[^"]*" does not exist'
)


class QueryWatch:
    """Follows one query, and starts it again when it failed for a transient reason."""

    def __init__(
        self, name: str, sinks: Sequence[QueryStatus], fan_out: FanOut | None, start: Callable[[], StreamingQuery]
    ) -> None:
        """`sinks`: the status of each of its sinks; without `fan_out` there is one, whose rows Spark counts."""
        self.name = name
        self.sinks = sinks
        self._fan_out = fan_out
        self._start = start
        self._query = start()
        self._seen: tuple[int, str] | None = None
        self._done: StreamOffset | None = None
        self._stopped = False
        self._late = 0
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
        return None if error is None else cause_of(error)

    @property
    def failed_sinks(self) -> list[str]:
        """The sink that it failed at; all of them, where none was being written to."""
        at = self._fan_out.at if self._fan_out is not None else None
        return [at] if at is not None else [status.name for status in self.sinks]

    @property
    def written(self) -> Mapping[str, int]:
        """Rows written since the run began, by sink; dead letters are one of them."""
        if self._fan_out is not None:
            return self._fan_out.written
        return {status.name: status.written for status in self.sinks}

    def stop(self) -> None:
        self._again_at = None
        if self._query.isActive:
            self._stopped = True
            try:
                self._query.stop()
            except (PySparkException, Py4JError) as error:
                # Whatever it still writes is in its checkpoint, and not written twice.
                log.warning("query '%s' is still stopping: %s", self.name, cause_of(error))

    def restart_if_needed(self) -> str | None:
        """Start it again, after a while, if it failed for a transient reason; its checkpoint knows where it was.

        Returns why it failed if it will not be started again.
        """
        now = time.monotonic()
        if self._again_at is None:
            failure = self.failure
        elif now < self._again_at:
            return None
        else:
            self._again_at = None
            failure = self._restart()
        if failure is None:
            return None
        if not _is_transient(failure) or self._failures >= _MOST_FAILURES:
            return failure
        pause = 2.0**self._failures
        self._again_at = now + pause
        self._failures += 1
        names = ", ".join(f"'{name}'" for name in self.failed_sinks)
        log.warning("sink %s failed; restarting it in %.0f s: %s", names, pause, failure)
        return None

    def _restart(self) -> str | None:
        """Returns why it did not start: what its sinks need may be unavailable still."""
        try:
            self._query = self._start()
        except (QueenError, PySparkException, Py4JError) as error:
            return cause_of(error)
        return None

    def look(self, ends: StreamOffset | None) -> None:
        """Take in what has happened since the last look. `ends`: where its queues end now, if that is known."""
        last = self._query.lastProgress
        # A look at the last report is cheap; all of those that are kept are read only when there is a new one.
        if last is not None and _key(last) != self._seen:
            for report in self._unseen():
                self._take(report)
            self._seen = _key(last)
        if ends is not None and self._done is not None:
            self._set_lag(behind(self._done, ends))
        if self._fan_out is not None:
            late, self._late = self._fan_out.late - self._late, self._fan_out.late
            for status in self.sinks:
                status.written = self._fan_out.written[status.name]
                status.late += late

    def _unseen(self) -> list[Any]:
        reports = list(self._query.recentProgress)
        seen = [number for number, report in enumerate(reports) if _key(report) == self._seen]
        return reports[seen[-1] + 1 :] if seen else reports

    def _take(self, report: Any) -> None:
        done = _offsets(report.sources, "endOffset")
        if done is not None:
            self._done = done
            self._set_lag(behind(done, _offsets(report.sources, "latestOffset") or {}))
        # A report of a trigger that found nothing to do is none of a batch.
        is_batch = "addBatch" in report.durationMs
        if is_batch:
            self._failures = 0
        for status in self.sinks:
            _note(status, report, is_batch)
            if is_batch and self._fan_out is None:
                status.written += _observed(report)

    def _set_lag(self, lag: int) -> None:
        for status in self.sinks:
            status.lag = lag


def _note(status: QueryStatus, report: Any, is_batch: bool) -> None:
    watermark = (report.eventTime or {}).get("watermark")
    if watermark is not None and not watermark.startswith("1970-01-01"):
        status.watermark = watermark
    if not is_batch:
        status.rows_per_second = 0.0
        return
    seconds = report.batchDuration / 1000
    status.batches += 1
    status.rows += report.numInputRows
    status.batch_seconds = round(seconds, 3)
    status.rows_per_second = round(report.numInputRows / seconds, 1) if seconds else 0.0
    status.late += sum(operator.numRowsDroppedByWatermark for operator in report.stateOperators)
    status.state_rows = sum(operator.numRowsTotal for operator in report.stateOperators)


def behind(done: StreamOffset, ends: StreamOffset) -> int:
    """How many messages there are up to the ends that are not done."""
    return count_between(done, {queue: end for queue, end in ends.items() if queue in done})


def _key(report: Any) -> tuple[int, str]:
    return report.batchId, report.timestamp


def _observed(report: Any) -> int:
    row = report.observedMetrics.get(OBSERVED)
    return int(row["rows"]) if row is not None else 0


def _offsets(sources: Any, which: str) -> StreamOffset | None:
    """How far each partition of the queues is; None where no source is a queue."""
    found: StreamOffset | None = None
    for source in sources:
        try:
            offset = decode_offset(msgspec.json.decode(getattr(source, which) or "null"))
        except (msgspec.DecodeError, SettingsError, AttributeError):
            # The source is not a queue.
            continue
        found = (found or {}) | offset
    return found


def _is_transient(failure: str) -> bool:
    return _TRANSIENT.search(failure) is not None and _PERMANENT.search(failure) is None

"""What is said when something fails, and how a run goes on: without Spark, with what Spark says."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
import rich.console

from queen.cli.pipelines.run import status_table, sums
from queen.errors import DatabaseUnavailable
from queen.pipelines.errors import PipelineError, cause_of
from queen.pipelines.queries.progress import QueryWatch
from queen.pipelines.run import describe_failures
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus

_STREAM = """\
[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_DATA_SOURCE_ERROR] Failed when Python data
source instance planned partitions: Traceback (most recent call last):
  File "/site-packages/queen/spark/source/stream.py", line 120, in partitions
    spans = self._log.positions(queues)
{last}
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: leads.kept [id = 1, runId = 2]
Current Committed Offsets: {{PythonMicroBatchStream: {{"format":2,"queues":{{"orders":"c$@(aWh"}}}}}}
"""


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("queen.errors.NotFound: there is no queue orders", "there is no queue orders"),
        ("queen.errors.Conflict: offsets 1 to 2 were removed", "offsets 1 to 2 were removed"),
        ("queen.wire.envelope.NoEncryptionKey: a key is needed", "a key is needed"),
        ("queen.log.stages.StageLost: write it again", "write it again"),
        ("ValueError: not a number: 'x'", "ValueError: not a number: 'x'"),
        (
            "pyspark.errors.exceptions.base.ArithmeticException: [DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012",
            "Division by zero.",
        ),
        (
            'psycopg.errors.UndefinedTable: relation "t" does not exist',
            'psycopg.errors.UndefinedTable: relation "t" does not exist',
        ),
    ],
)
def test_the_cause_of_a_failed_query_is_found(last: str, cause: str) -> None:
    assert cause_of(_STREAM.format(last=last)) == cause


def test_what_can_be_done_about_a_failure_follows_its_cause() -> None:
    lost = "offsets 1 to 2 were removed. Set failOnDataLoss to false to go on without them"
    busy = "java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back"
    assert describe_failures({"a": lost, "b": lost}).startswith(f"sinks 'a', 'b' failed: {lost}. Here: --no-fail-on-")
    assert describe_failures({"a": busy}).startswith(f"sink 'a' failed: {busy}. Spark waits 10 s for it, and this mach")
    assert describe_failures({"a": "division by zero"}) == "sink 'a' failed: division by zero"


class JavaError:
    """As py4j shows an exception of the JVM."""

    def __init__(self, text: str, cause: JavaError | None = None) -> None:
        self._text, self._cause = text, cause

    def toString(self) -> str:  # noqa: N802
        return self._text

    def getCause(self) -> JavaError | None:  # noqa: N802
        return self._cause


class SparkError(Exception):
    _origin: JavaError | None = None


def test_a_cause_that_only_the_jvm_knows_is_found() -> None:
    error = SparkError("Exception thrown in awaitResult: ")
    error._origin = JavaError(
        "org.apache.spark.SparkException: Exception thrown in awaitResult: ",
        JavaError("java.lang.RuntimeException: part-0.parquet is not a Parquet file"),
    )
    assert cause_of(error) == "java.lang.RuntimeException: part-0.parquet is not a Parquet file"
    # Of several causes the innermost counts, unless it says no more than that something failed.
    error._origin = JavaError(
        "java.io.IOException: cannot read part-0.parquet",
        JavaError(
            "java.net.ConnectException: Connection refused",
            JavaError("org.apache.spark.SparkException: Job aborted due to stage failure: lost task 0.0"),
        ),
    )
    assert cause_of(error) == "java.net.ConnectException: Connection refused"
    assert cause_of("[TABLE_OR_VIEW_NOT_FOUND] The table or view `x` cannot be found.\nVerify it;\n'Project [*]") == (
        "The table or view `x` cannot be found. Verify it"
    )
    error = SparkError(
        '\n[UNSUPPORTED_DATATYPE] Unsupported data type "LNOG". SQLSTATE: 0A000 (line 1, pos 3)\n\n== SQL ==\n'
    )
    error._origin = JavaError('org.apache.spark.sql.catalyst.parser.ParseException: \n[UNSUPPORTED_DATATYPE] "LNOG"')
    assert cause_of(error) == 'Unsupported data type "LNOG". (line 1, pos 3)'
    error = SparkError("")
    error._origin = JavaError("org.apache.spark.sql.AnalysisException: [A_B.C] no `x`. SQLSTATE: 42703; line 1 pos 0;")
    assert cause_of(error) == "no `x`.; line 1 pos 0"
    assert cause_of("") == "Spark does not say why"
    assert len(cause_of("queen.errors.NotFound: " + "x" * 10_000)) <= 1000


class Query:
    """A streaming query as Spark shows it, which fails on request."""

    lastProgress = None  # noqa: N815

    def __init__(self) -> None:
        self.error: str | None = None

    @property
    def isActive(self) -> bool:  # noqa: N802
        return self.error is None

    def exception(self) -> Any:
        return SparkError(self.error)


def test_a_query_that_fails_for_a_transient_reason_is_restarted_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries: list[Query] = []
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def start() -> Any:
        queries.append(Query())
        return queries[-1]

    watch = QueryWatch("kept", [QueryStatus(name="kept", sources=["events"])], None, start)
    assert watch.restart_if_needed() is None
    queries[0].error = "queen.errors.DatabaseUnavailable: PostgreSQL at x:5432/q is unavailable: connection refused"
    # It has failed, and only the next look decides what is done about it.
    assert watch.failure is not None
    assert watch.restart_if_needed() is None
    assert watch.active and watch.failure is None
    now += 2.0
    assert watch.restart_if_needed() is None
    assert len(queries) == 2
    refused = 'PostgreSQL at x:5432/q refuses the connection: connection failed: password authentication failed for "a"'
    queries[1].error = f"queen.errors.SettingsError: {refused}"
    assert watch.restart_if_needed() == refused
    assert not watch.active


def test_a_query_whose_sinks_are_still_unavailable_when_it_is_restarted_is_restarted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[Query] = []
    problems = [
        DatabaseUnavailable("PostgreSQL at x:5432/q is unavailable: the database system is starting up"),
        PipelineError("table public.kept cannot be written: connection failed: Connection refused"),
    ]
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def start() -> Any:
        if starts and problems:
            raise problems.pop()
        starts.append(Query())
        return starts[-1]

    watch = QueryWatch("kept", [QueryStatus(name="kept", sources=["events"])], None, start)
    starts[0].error = "queen.errors.DatabaseUnavailable: PostgreSQL at x:5432/q is unavailable: connection refused"
    for _ in range(6):
        assert watch.restart_if_needed() is None
        assert watch.active
        now += 8.0
    assert len(starts) == 2 and not problems

    problems.append(PipelineError("table public.kept cannot be written: permission denied for table kept"))
    starts[1].error = starts[0].error
    assert watch.restart_if_needed() is None
    now += 64.0
    assert watch.restart_if_needed() == "table public.kept cannot be written: permission denied for table kept"
    assert not watch.active


def _status(**queries: QueryStatus) -> PipelineStatus:
    now = time.time()
    return PipelineStatus(
        name="leads",
        state=PipelineState.RUNNING,
        pid=1,
        file="leads.yaml",
        master="local",
        started_at=now,
        updated_at=now,
        queries=list(queries.values()),
    )


def test_rows_are_counted_once_however_many_sinks_there_are() -> None:
    status = _status(
        one=QueryStatus(name="one", sources=["a"], rows=100, written=100),
        two=QueryStatus(name="two", sources=["a"], rows=90, written=3),
        both=QueryStatus(name="both", sources=["a", "b"], rows=150, written=1),
    )
    assert status.rows == 150
    assert sums(status) == "150 rows read, 104 written, 0 dead letters"
    # The same source, read for two sinks, one of which is behind.
    status.queries.pop()
    assert status.rows == 100


@pytest.mark.parametrize("width", [80, 160])
def test_numbers_are_whole_in_a_narrow_terminal(width: int) -> None:
    query = QueryStatus(
        name="a_sink_with_a_rather_long_name",
        sink="queue some-queue-with-a-long-name",
        rows=123_456_789,
        rows_per_second=54_321.0,
        lag=9_876_543,
        written=123_456_788,
        late=12_345,
        state_rows=765_432,
        batches=54_321,
        batch_seconds=12.5,
        watermark="2026-11-16T10:00:00.000Z",
    )
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(status_table(_status(q=query), width))
    text = out.getvalue()
    for number in ("123456789", "54321", "9876543", "123456788", "12345", "765432", "12.5 s", query.watermark):
        assert number is not None and number in text

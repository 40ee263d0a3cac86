"""One read of a source serves all sinks that can be fed by it, each of them once; which sinks share a query."""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from queen.pipelines.declaration import Declaration, OutputMode, Sink, SinkKind
from queen.pipelines.errors import PipelineError, Where
from queen.pipelines.loading import load
from queen.pipelines.queries.fan_out import with_short_errors
from queen.pipelines.queries.planning import Key, Query, lay_out, plan, read_layout
from queen.pipelines.session import Connection
from queen.wire.pipelines import PipelineState
from tests.pipelines.running import Runner
from tests.support.api import Api
from tests.support.database import Connection as Database
from tests.support.database import stored_messages
from tests.support.proxy import proxied

EVENTS = 200
FIRST = 151


async def test_three_sinks_are_fed_by_one_read_and_a_sink_that_fails_makes_no_other_write_twice(
    runner: Runner, api: Api, dsn: str, connection: Database
) -> None:
    draw = random.Random(1)
    events = [{"n": n, "text": draw.randbytes(1000).hex()} for n in range(EVENTS)]
    # A segment is read as a whole: these are as large as the batches.
    await api.push("events", *events[:FIRST])
    await api.push("events", *events[FIRST:], "bad")
    await connection.execute("CREATE TABLE public.numbers (n int CHECK (n < 160))")
    file = runner.file(
        """\
        pipeline: shared
        sources: {events: {queue: events, schema: "n int, text string", rows_per_batch: 151, group: shared}}
        steps:
          numbers: {sql: SELECT n FROM events}
          odd: {sql: SELECT * FROM numbers WHERE n % 2 = 1}
        sinks:
          copies: {from: odd, queue: odd}
          table: {from: numbers, postgres: public.numbers}
          files: {from: events, parquet: DIR/files}
        """
    )
    async with proxied(dsn) as proxy:
        queues = Connection(api.url, databases=(proxy.dsn,))
        options = {"databaseUrls": proxy.dsn, "queue": "events"}
        payloads = runner.spark.read.format("queen").options(**options).load().select("payload")
        assert len(await asyncio.to_thread(payloads.collect)) == EVENTS + 1
        once, proxy.answered_bytes = proxy.answered_bytes, 0
        with pytest.raises(PipelineError, match=r"sink 'table' failed: .*numbers_n_check"):
            await runner.run(file, queues)
        await connection.execute("ALTER TABLE public.numbers DROP CONSTRAINT numbers_n_check")
        status = await runner.run(file, queues)
    assert status.state is PipelineState.DONE
    # The batch that failed was read a second time; all else once, for three sinks and the dead letters.
    assert once < proxy.answered_bytes < 1.7 * once
    assert status.rows == EVENTS + 1 - FIRST
    assert [(query.name, query.rows) for query in status.queries] == [
        (name, status.rows) for name in ("copies", "table", "files")
    ]
    odd = [json.loads(one.payload)["n"] for one in await stored_messages(connection, "odd")]
    assert sorted(odd) == list(range(1, EVENTS, 2))
    stored = await connection.fetch("SELECT n FROM public.numbers")
    assert sorted(row["n"] for row in stored) == list(range(EVENTS))
    assert runner.rows("files", "n") == sorted(((n,) for n in range(EVENTS)), key=repr)
    (dead,) = [json.loads(one.payload) for one in await stored_messages(connection, "shared-dead-letters")]
    assert (dead["step"], dead["record"], dead["offset"]) == ("events", '"bad"', EVENTS)


async def test_a_query_for_each_sink_is_opened_as_it_was_and_a_new_sink_reads_from_the_start(runner: Runner) -> None:
    text = """\
        pipeline: grown
        sources: {events: {files: DIR/in, schema: n int}}
        sinks:
          a: {from: events, parquet: DIR/a}
          b: {from: events, parquet: DIR/b}
        dead_letters: {parquet: DIR/dead}
        """
    checkpoints = runner.state.checkpoints("grown")
    checkpoints.mkdir(parents=True)
    # As they were before sinks had queries in common, when nothing was noted of them.
    names = ("a", "b", "dead_letters")
    note = checkpoints / "queries.json"
    note.write_text(json.dumps([{"name": name, "trunk": "", "sinks": [name]} for name in names]))
    runner.batch({"n": 1}, "bad")
    await runner.run(runner.file(text))
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == ["a", "b", "dead_letters"]
    note.unlink()
    runner.batch({"n": 2}, "bad")
    more = text.replace("        dead_letters", "          c: {from: events, parquet: DIR/c}\n        dead_letters")
    status = await runner.run(runner.file(more))
    for name in ("a", "b", "c"):
        assert runner.rows(name, "n") == [(1,), (2,)]
    assert len(runner.rows("dead", "record")) == 2
    assert [query.rows for query in status.queries] == [2, 2, 4]

    await runner.run(runner.file(text), fresh=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["from-events", "queries.json"]
    assert runner.rows("a", "n") == [(1,), (1,), (2,), (2,)]
    assert len(runner.rows("dead", "record")) == 4


_EVENTS: Key = ("events", OutputMode.APPEND)
_COUNTS: Key = ("counts", OutputMode.APPEND)
_CHANGES: Key = ("counts", OutputMode.UPDATE)


def _shown(queries: list[Query]) -> dict[str, list[str]]:
    return {query.name: query.sinks for query in queries}


def test_sinks_of_one_trunk_and_mode_share_a_query_and_stay_with_it() -> None:
    first = lay_out({"a": _EVENTS, "b": _EVENTS, "c": _COUNTS, "d": _CHANGES, "e": _CHANGES}, [])
    assert _shown(first) == {"from-events": ["a", "b"], "c": ["c"], "from-counts-update": ["d", "e"]}
    # One goes, one is new, and one changes its trunk.
    second = lay_out({"a": _EVENTS, "c": _COUNTS, "d": _COUNTS, "e": _CHANGES, "f": _EVENTS, "g": _EVENTS}, first)
    assert _shown(second) == {
        "from-events": ["a"],
        "c": ["c"],
        "from-counts-update": ["e"],
        "from-events-2": ["f", "g"],
        "d": ["d"],
    }
    # What was renamed is the same query; a sink that was alone goes on where it ended when it comes back.
    third = lay_out({"a": ("orders", OutputMode.APPEND)}, second)
    assert _shown(third) == {"from-events": ["a"], "c": ["c"], "d": ["d"]}
    assert third[0].trunk == "orders"


def test_sinks_share_what_looks_at_each_row_for_itself(runner: Runner) -> None:
    file = runner.file(
        """\
        pipeline: many
        sources: {events: {queue: events, schema: "n int, at timestamp", event_time: at, lateness: 1 minute}}
        steps:
          hot: {sql: SELECT * FROM events WHERE n > 10}
          both: {sql: SELECT n FROM hot UNION ALL SELECT -n FROM events}
          totals: {sql: "SELECT n % 10 AS digit, count(*) AS count FROM hot GROUP BY n % 10"}
          counts: {from: hot, tumbling: 1 minute, aggregate: {n: count(*)}}
          large: {sql: SELECT * FROM counts WHERE n > 5}
        sinks:
          a: {from: events, console: true}
          b: {from: both, console: true, mode: update}
          c: {from: totals, console: true, mode: update}
          d: {from: counts, console: true}
          e: {from: large, console: true}
          f: {from: counts, console: true, mode: update}
        """
    )
    planned = plan(runner.session(), load(file), Connection("http://localhost:1", databases=("postgresql://nowhere",)))
    assert _shown(planned.layout) == {"from-events": ["a", "b"], "c": ["c"], "from-counts": ["d", "e"], "f": ["f"]}
    # The dead letters of the source are written by the query that has its rows; late rows by those that leave them out.
    assert {query.name: query.judges for query in planned.queries if query.judges} == {"from-events": {"events"}}
    late = {query.name for query in planned.queries if query.side is not None and query.side.taps}
    assert late == {"from-counts", "f"}
    assert [query.name for query in planned.queries if query.direct] == ["c"]


def test_what_reads_a_source_twice_leaves_its_dead_letters_to_a_query_of_their_own(runner: Runner) -> None:
    file = runner.file(
        """\
        pipeline: paired
        sources: {events: {queue: events, schema: "n int, at timestamp", event_time: at, lateness: 1 minute}}
        steps:
          others: {sql: "SELECT n AS m, at AS then FROM events"}
          pairs: {join: [events, others], on: n = m AND then BETWEEN at AND at + INTERVAL 1 MINUTE}
        sinks: {out: {from: pairs, console: true}}
        """
    )
    planned = plan(runner.session(), load(file), Connection("http://localhost:1", databases=("postgresql://nowhere",)))
    assert _shown(planned.layout) == {"out": ["out"], "dead_letters": ["dead_letters"]}
    out, dead_letters = planned.queries
    assert dead_letters.direct and not out.judges
    # Late rows leave where they are left out, which is once on each side.
    assert out.side is not None and [(tap.node, tap.late) for tap in out.side.taps] == [("pairs", True)] * 2


def test_late_rows_of_a_step_that_is_used_twice_are_left_to_spark(runner: Runner) -> None:
    file = runner.file(
        """\
        pipeline: twice
        sources: {events: {queue: events, schema: "n int, at timestamp", event_time: at, lateness: 1 minute}}
        steps:
          once: {from: events, dedup: [n]}
          others: {sql: "SELECT n AS m, at AS then FROM once"}
          pairs: {join: [once, others], on: n = m AND then BETWEEN at AND at + INTERVAL 1 MINUTE}
        sinks: {out: {from: pairs, console: true}}
        """
    )
    planned = plan(runner.session(), load(file), Connection("http://localhost:1", databases=("postgresql://nowhere",)))
    # What leaves one use of the step would take the place of what leaves the other.
    out, _ = planned.queries
    assert out.trunk == "pairs" and out.side is None and out.direct


def test_what_was_noted_of_queries_is_read_and_what_cannot_be_read_is_said_with_the_remedy(tmp_path: Path) -> None:
    here = Where(tmp_path, 1)
    sinks = tuple(Sink(name, here, "events", SinkKind.CONSOLE, "") for name in ("a", "b"))
    declaration = Declaration("p", here, (), (), sinks)
    assert read_layout(tmp_path, declaration) == []
    (tmp_path / "b" / "offsets").mkdir(parents=True)
    assert _shown(read_layout(tmp_path, declaration)) == {"b": ["b"]}
    (tmp_path / "queries.json").write_text("{")
    with pytest.raises(PipelineError, match=r"cannot be read .*: put it back, or begin again with --fresh"):
        read_layout(tmp_path, declaration)


def _as_spark_hears_of_it(spark: SparkSession, fail: Callable[[], object]) -> Any:
    with pytest.raises(PipelineError) as failed:
        with_short_errors(lambda rows, batch: fail())(spark.range(1), 0)
    jvm: Any = spark._jvm
    return jvm.py4j.Py4JException("".join(traceback.format_exception(failed.value)))


def test_spark_tells_a_stop_from_a_failure_by_an_error_however_long_it_was(runner: Runner) -> None:
    spark = runner.session()
    jvm, context = spark._jvm, spark.sparkContext._jsc.sc()
    assert jvm is not None
    of_stop = jvm.org.apache.spark.sql.execution.streaming.runtime.StreamExecution.isInterruptionException

    long = _as_spark_hears_of_it(spark, lambda: jvm.java.util.Objects.requireNonNull(None, "x" * 60_000))
    assert "java.lang.NullPointerException: xxx" in long.getMessage()
    # With the error as it was this ended in a StackOverflowError.
    assert not of_stop(long, context)

    def interrupted() -> None:
        jvm.java.lang.Thread.currentThread().interrupt()
        jvm.java.lang.Thread.sleep(1)

    assert of_stop(_as_spark_hears_of_it(spark, interrupted), context)

    spark.sparkContext.setJobGroup("stopped", "")
    try:
        context.cancelJobGroupAndFutureJobs("stopped")
        assert of_stop(_as_spark_hears_of_it(spark, spark.range(1).count), context)
    finally:
        spark.sparkContext._jsc.clearJobGroup()

"""Windows, joins, dedup and what becomes of records that are late or cannot be used, on a real Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queen.pipelines.errors import DeclarationError
from queen.pipelines.loading import load
from queen.pipelines.queries.planning import plan
from queen.pipelines.session import Connection
from queen.wire.pipelines import PipelineState
from tests.pipelines.running import Runner

_SOURCE = """\
      files: DIR/in
      files_per_batch: 1
      schema: user string, n int, at timestamp
      event_time: at
      lateness: 10 seconds
"""


def _event(minute: int, second: int, user: str = "a", n: int = 1) -> dict[str, Any]:
    return {"user": user, "n": n, "at": f"2026-01-01T00:{minute:02d}:{second:02d}Z"}


async def test_windows_of_every_kind_close_when_the_watermark_has_passed_and_leave_out_late_rows(
    runner: Runner,
) -> None:
    runner.batch(_event(0, 5), _event(0, 50), _event(1, 10))
    # Late, but not by more than the lateness.
    runner.batch(_event(0, 59, n=10), _event(0, 10, "b"))
    runner.batch(_event(30, 0))
    runner.batch(_event(30, 1))
    # The watermark is at 29:50: the windows of the first minutes are closed, and so is one of two that c is in. One
    # session of d would have ended at the very watermark, the other later.
    runner.batch(
        *(_event(0, 30, n=1000), _event(0, 30, n=1001), _event(0, 31, n=1002)),
        *(_event(28, 30, "c", 5), _event(29, 20, "d", 3), _event(29, 21, "d", 4)),
    )
    runner.batch(_event(59, 0))
    file = runner.file(
        f"""\
        pipeline: windows
        sources:
          events:
{_SOURCE.replace("      ", "            ")}
        steps:
          tumbling: {{from: events, tumbling: 1 minute, by: [user], aggregate: {{total: sum(n)}}}}
          sliding: {{from: events, sliding: 2 minutes, every: 1 minute, by: [user], aggregate: {{total: sum(n)}}}}
          sessions: {{from: events, session: 30 seconds, by: [user], aggregate: {{total: sum(n), events: count(*)}}}}
        sinks:
          by_tumbling: {{from: tumbling, parquet: DIR/tumbling}}
          by_sliding: {{from: sliding, parquet: DIR/sliding}}
          by_session: {{from: sessions, parquet: DIR/sessions}}
        dead_letters: {{parquet: DIR/late}}
        """
    )
    status = await runner.run(file)
    assert status.state is PipelineState.DONE

    shown = "date_format(window_start, 'mm:ss')", "date_format(window_end, 'mm:ss')"
    exprs = [f"{text} AS e{number}" for number, text in enumerate(shown)]

    def closed(name: str, *columns: str) -> list[tuple[Any, ...]]:
        frame = runner.spark.read.parquet(str(runner.directory / name)).selectExpr(*exprs, *columns)
        return sorted(tuple(row) for row in frame.collect())

    assert closed("tumbling", "user", "total") == [
        ("00:00", "01:00", "a", 12),
        ("00:00", "01:00", "b", 1),
        ("01:00", "02:00", "a", 1),
        ("29:00", "30:00", "d", 7),
        ("30:00", "31:00", "a", 2),
    ]
    assert closed("sliding", "user", "total") == [
        ("00:00", "02:00", "a", 13),
        ("00:00", "02:00", "b", 1),
        ("01:00", "03:00", "a", 1),
        ("28:00", "30:00", "c", 5),
        ("28:00", "30:00", "d", 7),
        ("29:00", "31:00", "a", 2),
        ("29:00", "31:00", "d", 7),
        ("30:00", "32:00", "a", 2),
        ("59:00", "01:00", "a", 12),
        ("59:00", "01:00", "b", 1),
    ]
    assert closed("sessions", "user", "total", "events") == [
        ("00:05", "00:35", "a", 1, 1),
        ("00:10", "00:40", "b", 1, 1),
        ("00:50", "01:40", "a", 12, 3),
        ("29:21", "29:51", "d", 4, 1),
        ("30:00", "30:31", "a", 2, 2),
    ]
    # Each row that a window lacks is kept, also where Spark counts those of a key and window as one.
    kept: dict[str, list[int]] = {}
    for step, error, record in runner.rows("late", "step", "error", "record"):
        assert error.startswith("late: its time 2026-01-01T00:") and error.endswith("watermark 2026-01-01T00:29:50Z")
        kept.setdefault(step, []).append(json.loads(record)["n"])
    assert {step: sorted(found) for step, found in kept.items()} == {
        "tumbling": [5, 1000, 1001, 1002],
        "sliding": [5, 1000, 1001, 1002],
        "sessions": [3, 5, 1000, 1001, 1002],
    }
    assert {query.name: query.late for query in status.queries} == {"by_tumbling": 4, "by_sliding": 4, "by_session": 5}
    assert status.dead_letters == 13
    tumbling = next(query for query in status.queries if query.name == "by_tumbling")
    assert (tumbling.rows, tumbling.written) == (14, 5)
    assert tumbling.watermark == "2026-01-01T00:58:50.000Z"


async def test_streams_are_joined_within_a_stretch_of_time_and_repeated_rows_are_left_out(runner: Runner) -> None:
    for second in (0, 40):
        runner.batch(
            {"order": second, "at": f"2026-01-01T00:00:{second:02d}Z"},
            {"order": second, "at": f"2026-01-01T00:00:{second:02d}Z"},
            folder="orders",
        )
    runner.batch({"order": 0, "paid_at": "2026-01-01T00:00:10Z", "amount": 7}, folder="payments")
    # Too late for its order, by the condition.
    runner.batch({"order": 40, "paid_at": "2026-01-01T00:05:00Z", "amount": 8}, folder="payments")
    # After these, the watermark of both is at 00:09:00; what comes after that is late.
    for _ in range(2):
        runner.batch({"order": 600, "at": "2026-01-01T00:10:00Z"}, folder="orders")
        runner.batch({"order": 601, "paid_at": "2026-01-01T00:10:00Z", "amount": 9}, folder="payments")
    late, not_yet = ({"order": n, "at": f"2026-01-01T00:09:0{n - 1}Z"} for n in (1, 2))
    runner.batch(late, not_yet, folder="orders")
    runner.batch({"order": 2, "paid_at": "2026-01-01T00:08:59Z", "amount": 10}, folder="payments")
    file = runner.file(
        """\
        pipeline: joined
        sources:
          orders:
            files: DIR/orders
            files_per_batch: 1
            schema: order int, at timestamp
            event_time: at
            lateness: 1 minute
          payments:
            files: DIR/payments
            files_per_batch: 1
            schema: order int, paid_at timestamp, amount int
            event_time: paid_at
            lateness: 1 minute
        steps:
          unique: {from: orders, dedup: [order]}
          paid:
            join: [unique, payments]
            on: unique.order = payments.order AND paid_at BETWEEN at AND at + INTERVAL 1 MINUTE
        sinks:
          once: {from: unique, parquet: DIR/once}
          matched: {from: paid, parquet: DIR/matched}
        dead_letters: {parquet: DIR/late}
        """
    )
    status = await runner.run(file)
    assert runner.rows("once", "order") == [(0,), (2,), (40,), (600,)]
    # Two queries leave out repeated orders, and both leave out the one that is late.
    assert [(step, json.loads(record)["order"]) for step, record in runner.rows("late", "step", "record")] == [
        ("paid", 2),
        ("unique", 1),
        ("unique", 1),
    ]
    assert {query.name: query.late for query in status.queries} == {"once": 1, "matched": 2}
    assert runner.rows("matched", "order", "amount", "payments_order") == [(0, 7, 0)]


_BAD_RECORDS = """
from queen.pipelines import Pipeline

p = Pipeline("strict", dead_letters={"parquet": "DIR/dead"})
p.source("events", files="DIR/in", schema="user string NOT NULL, n int, at timestamp", files_per_batch=1,
         expect={"a time": "at IS NOT NULL"})

@p.each(schema="user string, half int")
def halved(events):
    if events["user"] == "nobody":
        return None
    if events["user"] == "twins":
        return [{"user": "castor", "half": 1}, {"user": "pollux", "half": 1}]
    if events["user"] == "letters":
        return {"user": "letters", "half": "a half"}
    return {"user": events["user"], "half": 10 // events["n"]}

@p.step(expect={"not odd": "half % 2 = 0 OR user <> 'odd'"})
def checked(halved):
    return halved.where("user <> 'ignored'")

p.sink("good", "checked", parquet="DIR/good")
"""


async def test_records_that_cannot_be_used_become_dead_letters_and_the_rest_goes_on(runner: Runner) -> None:
    runner.batch(
        _event(0, 1, "fine", 2),
        "this is no JSON",
        {"user": "worded", "n": "many", "at": "2026-01-01T00:00:00Z"},
        {"n": 1, "at": "2026-01-01T00:00:00Z"},
        {"user": "timeless", "n": 1},
    )
    runner.batch(
        _event(0, 2, "zero", 0),
        _event(0, 3, "letters"),
        _event(0, 4, "nobody"),
        _event(0, 5, "twins"),
        _event(0, 6, "odd", 10),
        _event(0, 7, "ignored"),
        _event(0, 8, "last", 1),
    )
    status = await runner.run(runner.file(_BAD_RECORDS, "strict.py"))
    assert runner.rows("good", "user", "half") == [("castor", 1), ("fine", 5), ("last", 10), ("pollux", 1)]
    dead = {(step, error[:30]): record for step, error, record in runner.rows("dead", "step", "error", "record")}
    assert set(dead) == {
        ("events", "the payload does not fit the s"),
        ("events", "field 'user' is missing"),
        ("events", "expectation 'a time' is not me"),
        ("halved", "ZeroDivisionError: integer div"),
        ("halved", dead_key(dead, "letters")),
        ("checked", "expectation 'not odd' is not m"),
    }
    assert len(runner.rows("dead", "step")) == status.dead_letters == 7
    assert '"user":"zero"' in dead["halved", "ZeroDivisionError: integer div"]


def dead_key(dead: dict[tuple[str, str], str], user: str) -> str:
    """How Arrow words it is its own business."""
    return next(error for (_, error), record in dead.items() if f'"user":"{user}"' in record)


async def test_a_run_resumes_where_the_last_one_ended_unless_fresh(runner: Runner) -> None:
    file = runner.file(
        """\
        pipeline: again
        sources: {events: {files: DIR/in, schema: n int}}
        sinks: {all: {from: events, parquet: DIR/all}}
        """
    )
    runner.batch({"n": 1})
    await runner.run(file)
    runner.batch({"n": 2})
    status = await runner.run(file)
    assert runner.rows("all", "n") == [(1,), (2,)]
    assert [query.rows for query in status.queries] == [1]
    await runner.run(file, fresh=True)
    assert runner.rows("all", "n") == [(1,), (1,), (2,), (2,)]


async def test_state_is_read_whatever_checksum_a_kill_has_left_beside_it(runner: Runner) -> None:
    file = runner.file(
        f"""\
        pipeline: counted
        sources:
          events:
{_SOURCE.replace("      ", "            ")}
        steps: {{counts: {{from: events, tumbling: 1 minute, aggregate: {{total: sum(n)}}}}}}
        sinks: {{all: {{from: counts, parquet: DIR/all}}}}
        """
    )
    runner.batch(_event(0, 1))
    await runner.run(file)
    state = runner.state.checkpoints("counted") / "all" / "state"
    files = [path for path in state.rglob("*.delta") if not path.name.startswith(".")]
    assert files
    for path in files:
        path.with_name(f".{path.name}.crc").write_bytes(b"crc\0\0\0\2\0\1\2\3\4")
    runner.batch(_event(0, 2))
    runner.batch(_event(5, 0))
    runner.batch(_event(5, 1))
    await runner.run(file)
    assert runner.rows("all", "total") == [(2,)]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("{sql: SELECT nothing FROM events}", "pipeline.yaml:3: 'x': "),
        ("{sql: SELECT n FRM events}", "pipeline.yaml:3: step 'x' reads from no source"),
        ("{sql: SELECT n FROM events WHERE (}", "pipeline.yaml:3: 'x': "),
        ("{from: events, dedup: [nothing]}", "pipeline.yaml:3: 'x': "),
    ],
)
async def test_problems_that_only_spark_finds_are_reported_with_their_line(
    runner: Runner, step: str, expected: str
) -> None:
    file = runner.file(
        f"sources: {{events: {{files: DIR/in, schema: n int}}}}\nsteps:\n  x: {step}\n"
        "sinks: {all: {from: x, console: true}}\n"
    )
    runner.batch({"n": 1})
    with pytest.raises(DeclarationError) as refused:
        await runner.run(file)
    assert expected in str(refused.value)
    assert "JVM" not in str(refused.value)


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        ("{from: events, queue: out, partition: nothing}", "pipeline.yaml:3: sink 'x': "),
        ("{from: events, topic: a/b, priority: n +}", "pipeline.yaml:3: sink 'x': "),
        ("{from: events, delta: DIR/t, key: [n], delete_when: nothing}", "pipeline.yaml:3: sink 'x': "),
        ("{from: events, console: true}\ndead_letters: {queue: e, partition: nothing}", "4: sink 'dead_letters': "),
    ],
)
async def test_an_expression_of_a_sink_is_checked_before_anything_runs(
    runner: Runner, sink: str, expected: str
) -> None:
    file = runner.file(f"sources: {{events: {{files: DIR/in, schema: n int}}}}\nsinks:\n  x: {sink}\n")
    runner.batch({"n": 1})
    with pytest.raises(DeclarationError) as refused:
        plan(runner.spark, load(file), Connection("http://localhost:1"))
    assert expected in str(refused.value)

"""Rows that Spark leaves out of SQL and DataFrame steps because they are late: each is a dead letter, and no other."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from queen.pipelines.queries import late_rows
from queen.pipelines.session import Connection
from tests.pipelines.running import Runner
from tests.support.api import Api
from tests.support.database import Connection as Database
from tests.support.database import stored_messages

Letters = dict[str, list[Any]]


def _event(at: str, user: str, n: int) -> dict[str, Any]:
    return {"user": user, "n": n, "at": f"2026-01-01T00:{at}Z"}


def _letters(runner: Runner, key: str) -> Letters:
    """Of the records that were late, by step."""
    found: Letters = {}
    for step, error, record in runner.rows("late", "step", "error", "record"):
        assert error.startswith("late: its time 2026-01-01T00:")
        found.setdefault(step, []).append(json.loads(record)[key])
    return {step: sorted(keys) for step, keys in found.items()}


_WINDOWS = """
from queen.pipelines import Pipeline

p = Pipeline("windows", dead_letters={"parquet": "DIR/late"})
p.source("events", files="DIR/in", files_per_batch=1, schema="user string, n int, at timestamp", event_time="at",
         lateness="10 seconds")

p.sql("tumbling", '''
    WITH few AS (SELECT at, user, n FROM events WHERE n < 5000)
    SELECT date_format(window.start, 'mm:ss') AS start, user, sum(n) AS total
    FROM few GROUP BY window(at, '1 minute'), user HAVING user <> 'hidden'
''')
p.sql("sliding", '''
    SELECT date_format(w.start, 'mm:ss') AS start, user, sum(n) AS total
    FROM (SELECT window(at, '2 minutes', '1 minute') AS w, user, explode(array(n, n)) AS n FROM events)
    GROUP BY w, user
''')
p.sql("uneven", '''
    SELECT date_format(w.start, 'mm:ss') AS start, user, sum(n) AS total
    FROM (SELECT window(at, '90 seconds', '1 minute') AS w, user, n FROM events)
    WHERE w.start > TIMESTAMP '2026-01-01T00:00:00Z' GROUP BY w, user
''')
p.sql("sessions", '''
    SELECT date_format(session_window.start, 'mm:ss') AS start, user, sum(n) AS total
    FROM events WHERE user <> 'hidden' GROUP BY session_window(at, '30 seconds'), user
''')
p.sql("nested", '''
    SELECT date_format(window(window_time(w), '10 minutes').start, 'mm:ss') AS start, 'all' AS user, sum(n) AS total
    FROM (SELECT window(at, '1 minute') AS w, sum(n) AS n FROM events GROUP BY window(at, '1 minute'))
    GROUP BY window(window_time(w), '10 minutes')
''')

@p.step
def rolled(events):
    from pyspark.sql import functions as f
    time = f.window("at", "1 minute").alias("time")
    totals = events.rollup(time, "user").agg(f.sum("n").alias("total"))
    return totals.where("time IS NOT NULL AND user IS NOT NULL").selectExpr(
        "date_format(time.start, 'mm:ss') AS start", "user", "total"
    )

for step in ("tumbling", "sliding", "uneven", "sessions", "nested", "rolled"):
    p.sink(f"of_{step}", step, parquet=f"DIR/{step}")
"""


async def test_rows_that_are_late_for_a_window_in_sql_are_kept_and_those_that_a_filter_removes_are_not(
    runner: Runner,
) -> None:
    runner.batch(_event("00:05", "a", 1))
    runner.batch(_event("30:00", "a", 2))
    runner.batch(_event("30:01", "a", 3))
    # The watermark is at 29:50. b is late for each, c for one of two, d for none but a session; two are alike.
    runner.batch(
        *(_event("00:30", "b", 1000), _event("00:30", "b", 1000), _event("00:31", "b", 6000)),
        *(_event("28:30", "c", 5), _event("29:10", "d", 7), _event("00:30", "hidden", 8)),
    )
    runner.batch(_event("59:00", "a", 9))
    status = await runner.run(runner.file(_WINDOWS, "windows.py"))

    columns = "start", "user", "total"
    assert runner.rows("tumbling", *columns) == [("00:00", "a", 1), ("29:00", "d", 7), ("30:00", "a", 5)]
    assert runner.rows("rolled", *columns) == runner.rows("tumbling", *columns)
    assert runner.rows("sliding", *columns) == [
        *(("00:00", "a", 2), ("28:00", "c", 10), ("28:00", "d", 14), ("29:00", "a", 10), ("29:00", "d", 14)),
        *(("30:00", "a", 10), ("59:00", "a", 2)),
    ]
    # c and d are in a window that has ended at 29:30, and d is in one more; those of b are filtered out.
    assert runner.rows("uneven", *columns) == [("29:00", "a", 5), ("29:00", "d", 7), ("30:00", "a", 5)]
    assert runner.rows("sessions", *columns) == [("00:05", "a", 1), ("30:00", "a", 5)]
    assert runner.rows("nested", *columns) == [("00:00", "all", 1), ("20:00", "all", 7), ("30:00", "all", 5)]
    late = [5, 8, 1000, 1000, 6000]
    assert _letters(runner, "n") == {
        "tumbling": [5, 1000, 1000],
        # A row that is made of another is late for itself.
        "sliding": [5, 5, 8, 8, 1000, 1000, 1000, 1000, 6000, 6000],
        "uneven": [5, 7],
        "sessions": [5, 7, 1000, 1000, 6000],
        "nested": late,
        "rolled": late,
    }
    # Spark had none left to leave out: it would count them as well.
    assert {query.name: query.late for query in status.queries} == {
        "of_tumbling": 3,
        "of_sliding": 10,
        "of_uneven": 2,
        "of_sessions": 5,
        "of_nested": 5,
        "of_rolled": 5,
    }
    assert status.dead_letters == 30


_JOINS = """
from queen.pipelines import Pipeline

p = Pipeline("joins", dead_letters={"parquet": "DIR/late"})
p.source("orders", files="DIR/orders", files_per_batch=1, schema="id int, at timestamp", event_time="at",
         lateness="1 minute")
p.source("payments", files="DIR/payments", files_per_batch=1, schema="id int, paid_at timestamp, amount int",
         event_time="paid_at", lateness="1 minute")

p.sql("paid", '''
    SELECT o.id, amount FROM orders o LEFT JOIN payments p
    ON o.id = p.id AND paid_at BETWEEN at AND at + INTERVAL 1 MINUTE WHERE amount < 100
''')
p.sql("timeless", "SELECT o.id FROM orders o JOIN payments p ON o.id = p.id")
p.sql("times", "SELECT DISTINCT id, at FROM orders WHERE id <> 5")

@p.step
def firsts(orders):
    return orders.dropDuplicates(["id"])

@p.step
def recent(orders):
    return orders.dropDuplicatesWithinWatermark(["id"]).select("id")

@p.step
def counted(orders):
    import pandas

    def count(key, batches, state):
        seen = (state.get[0] if state.exists else 0) + sum(len(batch) for batch in batches)
        state.update((seen,))
        yield pandas.DataFrame({"id": [key[0]], "seen": [seen]})

    return orders.groupBy("id").applyInPandasWithState(
        count, "id int, seen int", "seen int", "append", "EventTimeTimeout"
    )

for step in ("paid", "timeless", "times", "firsts", "recent", "counted"):
    p.sink(f"of_{step}", step, parquet=f"DIR/{step}")
"""


async def test_rows_that_are_late_for_a_join_or_a_dedup_in_sql_or_in_a_function_are_kept(runner: Runner) -> None:
    order, payment = "2026-01-01T00:{}Z", "2026-01-01T00:{}Z"
    runner.batch({"id": 1, "at": order.format("00:00")}, folder="orders")
    runner.batch({"id": 1, "paid_at": payment.format("00:10"), "amount": 7}, folder="payments")
    for _ in range(2):
        runner.batch({"id": 600, "at": order.format("10:00")}, folder="orders")
        runner.batch({"id": 601, "paid_at": payment.format("10:00"), "amount": 9}, folder="payments")
    # Both watermarks are at 09:00 now.
    runner.batch(
        *({"id": number, "at": order.format("08:59")} for number in (2, 5)),
        {"id": 3, "at": order.format("09:01")},
        folder="orders",
    )
    runner.batch(
        {"id": 3, "paid_at": payment.format("09:02"), "amount": 10},
        {"id": 2, "paid_at": payment.format("08:59"), "amount": 11},
        {"id": 5, "paid_at": payment.format("08:59"), "amount": 500},
        folder="payments",
    )
    status = await runner.run(runner.file(_JOINS, "joins.py"))
    assert runner.rows("paid", "id", "amount") == [(1, 7), (3, 10)]
    # Without the time it is not told which rows are late, and all are joined.
    assert runner.rows("timeless", "id") == [(1,), (2,), (3,), (5,)]
    # Of the others the watermark has not passed the time.
    assert runner.rows("times", "id") == [(1,)]
    assert runner.rows("firsts", "id") == runner.rows("recent", "id") == [(1,), (3,), (600,)]
    assert runner.rows("counted", "id", "seen") == [(1, 1), (3, 1), (600, 1), (600, 2)]
    assert _letters(runner, "id") == {
        "paid": [2, 2, 5],
        "times": [2],
        "firsts": [2, 5],
        "recent": [2, 5],
        "counted": [2, 5],
    }
    assert {query.name: query.late for query in status.queries} == {
        "of_paid": 3,
        "of_timeless": 0,
        "of_times": 1,
        "of_firsts": 2,
        "of_recent": 2,
        "of_counted": 2,
    }


async def test_a_late_row_of_sql_names_the_message_that_it_was(
    runner: Runner, api: Api, dsn: str, connection: Database
) -> None:
    file = runner.file(
        """\
        pipeline: origins
        sources:
          events: {queue: events, schema: "user string, n int, at timestamp", event_time: at, lateness: 10 seconds}
        steps:
          small: {sql: "SELECT * FROM events WHERE n < 100"}
          totals:
            sql: >-
              SELECT window.start AS start, sum(n) AS total
              FROM (SELECT window(at, '1 minute') AS window, n * 2 AS n FROM small) GROUP BY window
          many: {sql: SELECT * FROM totals WHERE total > 1}
        sinks: {all: {from: many, parquet: DIR/totals}}
        """
    )
    queues = Connection(api.url, databases=(dsn,))
    await api.push("events", _event("30:00", "a", 1))
    await runner.run(file, queues)
    await api.push("events", _event("32:00", "a", 1), _event("00:00", "a", 200), _event("00:01", "b", 2))
    status = await runner.run(file, queues)
    assert runner.rows("totals", "total") == [(2,)]
    (letter,) = [json.loads(one.payload) for one in await stored_messages(connection, "origins-dead-letters")]
    assert letter["error"] == ("late: its time 2026-01-01T00:00:01Z came after the watermark 2026-01-01T00:29:50Z")
    record = {"user": "b", "n": 2, "at": "2026-01-01T00:00:01.000Z"}
    assert (letter["step"], json.loads(letter["record"])) == ("totals", record)
    (message,) = [one for one in await stored_messages(connection, "events") if json.loads(one.payload)["n"] == 2]
    assert (letter["queue"], letter["offset"]) == ("events", 3)
    assert letter["transaction_id"] == str(message.transaction_id)
    assert [query.late for query in status.queries] == [1]


@pytest.mark.parametrize("rule", ["NoSuchRule", "PushDownPredicates.noSuchMethod"])
async def test_with_a_spark_that_plans_queries_in_another_way_late_rows_are_counted_as_spark_does_it(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    def filtered(step: Any, plan: Any) -> Any:
        found = step._catalyst.optimizer
        for name in rule.split("."):
            found = getattr(found, name)
        return found(plan)

    monkeypatch.setattr(late_rows._Step, "_filtered", filtered)
    late_rows._warn.cache_clear()
    for at in ("00:05", "30:00", "30:01", "00:30", "59:00"):
        runner.batch(_event(at, "a", 1))
    file = runner.file(
        """\
        pipeline: other
        sources:
          events:
            {files: DIR/in, files_per_batch: 1, schema: "n int, at timestamp", event_time: at, lateness: 10 seconds}
        steps:
          short: {from: events, tumbling: 1 minute, aggregate: {total: sum(n)}}
          long: {from: events, tumbling: 2 minutes, aggregate: {total: sum(n)}}
        sinks:
          of_short: {from: short, parquet: DIR/short}
          of_long: {from: long, parquet: DIR/long}
        """
    )
    with caplog.at_level(logging.WARNING):
        status = await runner.run(file)
    assert runner.rows("short", "total") == [(1,), (2,)]
    assert {query.name: query.late for query in status.queries} == {"of_short": 1, "of_long": 1}
    assert status.dead_letters == 0
    assert [one.name for one in caplog.records if "late rows are only counted" in one.message] == [late_rows.__name__]

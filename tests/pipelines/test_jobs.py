"""Queues as sources and sinks, and the jobs that report: dead letters by kind, and minutes rolled up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from queen.errors import DatabaseUnavailable
from queen.pipelines.errors import PipelineError
from queen.pipelines.jobs.dlq_report import dlq_report
from queen.pipelines.jobs.rollup import rollup
from queen.pipelines.manifest import Manifest
from queen.pipelines.session import Connection
from queen.pipelines.sinks import TableSink
from queen.wire.pipelines import PipelineState
from tests.pipelines.running import Runner
from tests.support.api import Api
from tests.support.database import Connection as Database
from tests.support.database import stored_messages
from tests.support.proxy import Proxy


@pytest.fixture
def queues(api: Api, dsn: str) -> Connection:
    return Connection(api.url, databases=(dsn,))


async def test_rows_go_from_a_queue_to_a_queue_a_topic_and_a_table_once(
    runner: Runner, api: Api, queues: Connection, connection: Database
) -> None:
    await connection.execute(
        "CREATE TABLE public.scores (lead text PRIMARY KEY, points int, at timestamptz, tags jsonb)"
    )
    file = runner.file(
        """\
        pipeline: leads
        sources:
          events:
            queue: lead-events
            schema: lead string NOT NULL, points int, at timestamp, tags array<string>
            group: leads
        steps:
          hot: {sql: "SELECT lead, points, at, tags, _offset AS seen FROM events WHERE points > 1"}
          rows: {sql: "SELECT lead, points, at, tags FROM hot"}
        sinks:
          out: {from: hot, queue: hot-leads, partition: lead, transaction_id: "concat(lead, '-', seen)"}
          work: {from: hot, topic: sales/calls, priority: 10 - points, idempotency_key: lead}
          kept: {from: rows, postgres: public.scores, key: lead}
        """
    )
    at = "2026-01-01T10:00:00.123456Z"
    await api.push("lead-events", {"lead": "a", "points": 5, "at": at, "tags": ["x"]}, {"lead": "b", "points": 1})
    await api.push("lead-events", {"points": 7}, "no object")
    status = await runner.run(file, queues)
    assert status.dead_letters == 2
    assert {query.lag for query in status.queries} == {0}
    await api.push("lead-events", {"lead": "a", "points": 6}, {"lead": "c", "points": 2})
    await runner.run(file, queues)

    hot = await api.pop("hot-leads", batch=10, partitions=10, autoAck=True)
    assert sorted((message["partition"], message["transactionId"], message["data"]["points"]) for message in hot) == [
        ("a", "a-0", 5),
        ("a", "a-4", 6),
        ("c", "c-5", 2),
    ]
    (first,) = (message for message in hot if message["transactionId"] == "a-0")
    assert first["data"] == {"lead": "a", "points": 5, "at": at, "tags": ["x"], "seen": 0}

    rows = await connection.fetch("SELECT lead, points, at, tags FROM public.scores ORDER BY lead")
    assert [(row["lead"], row["points"]) for row in rows] == [("a", 6), ("c", 2)]

    answer = await api.call("GET", "/api/v1/topics/dequeue", namespace="sales", topic="calls", limit=10)
    assert sorted(item["priority"] for item in answer.body) == [5, 8]

    dead = await api.pop("leads-dead-letters", batch=10, autoAck=True)
    reasons = {message["data"]["error"] for message in dead}
    assert {reason[:20] for reason in reasons} == {"field 'lead' is miss", "the payload does not"}
    (missing,) = (message["data"] for message in dead if message["data"]["error"].startswith("field"))
    assert missing == {
        "pipeline": "leads",
        "step": "events",
        "error": "field 'lead' is missing",
        "record": json.dumps({"points": 7}),
        "queue": "lead-events",
        "partition": "Default",
        "offset": 2,
        "transaction_id": missing["transaction_id"],
    }
    # The group of the source shows how far the pipeline is.
    lags = await api.call("GET", "/api/v1/consumer-groups/leads")
    assert lags.status == 200


async def test_a_table_keeps_the_newest_row_of_each_key(runner: Runner, dsn: str, connection: Database) -> None:
    await connection.execute("CREATE TABLE public.newest (key text PRIMARY KEY, value int)")
    sink = TableSink(dsn, "public.newest", "test", key=["key"])
    sink.prepare()
    ordered = TableSink(dsn, "public.newest", "ordered", key=["key"], order_by=["value"])

    def write() -> None:
        # In four tasks, each of which has all keys: what comes last in the frame is newest.
        frame = runner.spark.range(0, 400, 1, 4).selectExpr("string(id % 100) AS key", "int(id) AS value")
        sink(frame, 0)
        sink(frame.where("value < 50"), 0)

    async def rows() -> dict[str, int]:
        return {row["key"]: row["value"] for row in await connection.fetch("SELECT key, value FROM public.newest")}

    await asyncio.to_thread(write)
    assert await rows() == {str(key): 300 + key for key in range(100)}
    messages = [("a", 1, 7), ("a", 3, 9), ("a", 2, 8), ("b", 5, 1)]
    frame = runner.spark.createDataFrame(messages, "key string, value int, _offset long")
    await asyncio.to_thread(sink, frame, 1)
    assert {key: value for key, value in (await rows()).items() if key in "ab"} == {"a": 3, "b": 5}
    frame = runner.spark.createDataFrame([("a", 9), ("a", 4)], "key string, value int")
    await asyncio.to_thread(ordered, frame, 0)
    assert (await rows())["a"] == 9
    # Those that order_by takes for equal are in the order of their messages, whichever tasks they come from.
    ties = [(f"t{n % 50}", 1, n, n) for n in reversed(range(400))]
    frame = runner.spark.createDataFrame(ties, "key string, tie int, value int, _offset long").repartition(4)
    await connection.execute("ALTER TABLE public.newest ADD COLUMN tie int")
    tied = TableSink(dsn, "public.newest", "tied", key=["key"], order_by=["tie"])
    await asyncio.to_thread(tied, frame, 0)
    assert {key: value for key, value in (await rows()).items() if key[0] == "t"} == {
        f"t{n}": 350 + n for n in range(50)
    }


async def test_rows_without_a_key_replace_none_unless_null_is_one(
    runner: Runner, dsn: str, connection: Database
) -> None:
    await connection.execute("CREATE TABLE public.nulls (a text, b int, n int, UNIQUE (a, b))")
    sink = TableSink(dsn, "public.nulls", "nulls", key=["a", "b"])
    sink.prepare()
    given = [("x", 1, 0), (None, 1, 1), (None, 1, 2), (None, None, 3), ("x", None, 4), ("x", 1, 5)]
    frame = runner.spark.createDataFrame(given, "a string, b int, n int")

    async def stored() -> list[int]:
        return sorted(row["n"] for row in await connection.fetch("SELECT n FROM public.nulls"))

    await asyncio.to_thread(sink, frame, 0)
    assert await stored() == [1, 2, 3, 4, 5]
    await asyncio.to_thread(sink, frame, 1)
    assert await stored() == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    if await connection.fetchval("SELECT current_setting('server_version_num')::int") < 150000:
        return
    await connection.execute("TRUNCATE public.nulls; ALTER TABLE public.nulls DROP CONSTRAINT nulls_a_b_key")
    await connection.execute("ALTER TABLE public.nulls ADD UNIQUE NULLS NOT DISTINCT (a, b)")
    for batch in (2, 3):
        await asyncio.to_thread(sink, frame, batch)
        assert await stored() == [2, 3, 4, 5]


async def test_a_row_that_a_table_does_not_take_is_said_with_what_to_do(
    runner: Runner, dsn: str, connection: Database
) -> None:
    await connection.execute("CREATE TABLE public.strict (t text NOT NULL, n numeric(3, 1))")
    TableSink(dsn, "public.strict", "test").prepare()
    rows = {"cannot contain NUL": ("a\0", 1), "null value in column": (None, 1), "numeric field overflow": ("a", 1000)}
    for said, row in rows.items():
        frame = runner.spark.createDataFrame([row], "t string, n int")
        with pytest.raises(PipelineError, match=f"^table public.strict does not take a row: .*{said}.*with expect$"):
            await asyncio.to_thread(TableSink(dsn, "public.strict", "test"), frame, 0)
    for columns, key, said in (
        ("t string, u int", (), 'column "u" of'),
        ("t string, n int", ("t",), "no unique or excl"),
    ):
        frame = runner.spark.createDataFrame([("a", 1)], columns)
        with pytest.raises(
            PipelineError, match=f"^table public.strict cannot be written: .*{said}.* the unique index on"
        ):
            await asyncio.to_thread(TableSink(dsn, "public.strict", "test", key), frame, 0)
    with pytest.raises(PipelineError, match=r'cannot be written: relation "public\.missing" does not exist$'):
        TableSink(dsn, "public.missing", "test").prepare()
    assert await connection.fetchval("SELECT count(*) FROM public.strict") == 0


async def test_a_table_whose_postgresql_ends_the_connection_is_unavailable(
    runner: Runner, dsn: str, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.execute("CREATE TABLE public.ended (n int)")
    sink = TableSink(dsn, "public.ended", "test")
    sink.prepare()
    copy = TableSink._copy

    def shut_down(sink: TableSink, cursor: psycopg.Cursor[Any], *arguments: Any) -> int:
        with psycopg.connect(dsn) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [cursor.connection.info.backend_pid])
        return copy(sink, cursor, *arguments)

    frame = runner.spark.createDataFrame([(1,)], "n int")
    with monkeypatch.context() as patched:
        patched.setattr(TableSink, "_copy", shut_down)
        with pytest.raises(DatabaseUnavailable, match="is unavailable"):
            await asyncio.to_thread(sink, frame, 0)
    assert await asyncio.to_thread(sink, frame, 0) == 1


@pytest.mark.soak
async def test_a_pipeline_with_three_busy_sinks_outlives_absences_of_postgresql(
    runner: Runner, api: Api, proxy: Proxy, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await connection.execute("CREATE TABLE public.kept (n int)")
    file = runner.file(
        """\
        pipeline: patient
        trigger: 100 ms
        sources:
          one: {queue: one, schema: n int, rows_per_batch: 100}
          two: {queue: two, schema: n int, rows_per_batch: 100}
          three: {queue: three, schema: n int, rows_per_batch: 100}
        sinks:
          kept: {from: one, postgres: public.kept}
          files: {from: two, parquet: DIR/files}
          copies: {from: three, queue: copies}
        dead_letters: {console: true}
        """
    )
    pushed = 0

    async def push(messages: int) -> None:
        nonlocal pushed
        for queue in ("one", "two", "three"):
            await api.push(queue, *({"n": n} for n in range(pushed, pushed + messages)))
        pushed += messages

    manifest = Manifest(runner.directory / "files")

    async def least() -> int:
        """Rows of the sink that has the fewest."""
        copies = len(await stored_messages(connection, "copies"))
        files = manifest.snapshot().rows if manifest.exists else 0
        return min(int(await connection.fetchval("SELECT count(*) FROM public.kept")), copies, files)

    await push(500)
    run, ended = runner.begin(file, Connection(api.url, databases=(proxy.dsn,)))

    async def until(reached: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(400):
            while not await reached():
                assert not ended.done(), await ended
                await asyncio.sleep(0.1)

    async def until_written(rows: int) -> None:
        async def written() -> bool:
            return await least() >= rows

        await until(written)

    for _ in range(3):
        await until_written(pushed - 400)
        failures = caplog.text.count("restarting it in")

        async def has_failed(before: int = failures) -> bool:
            return caplog.text.count("restarting it in") > before

        async with proxy.away():
            await push(500)
            await until(has_failed)
    await until_written(pushed)
    run.stop.set()
    status = await ended
    assert status.state is PipelineState.STOPPED
    numbers = list(range(pushed))
    assert sorted(row["n"] for row in await connection.fetch("SELECT n FROM public.kept")) == numbers
    assert sorted(json.loads(one.payload)["n"] for one in await stored_messages(connection, "copies")) == numbers
    assert sorted(n for (n,) in runner.rows("files", "n")) == numbers


async def test_dead_letters_are_clustered_by_what_went_wrong(runner: Runner, api: Api, queues: Connection) -> None:
    await api.configure("orders", retryLimit=0)
    await api.configure("mails", retryLimit=0)
    errors = {
        "orders": [
            "timeout after 30 s at 10.0.0.1:5432",
            "timeout after 7.5 s at 10.0.0.22:5432",
            "no user 'alice' (request 7f3c1b2a-0001-4000-8000-00000000beef)\nTraceback: line 12",
        ],
        "mails": ["no user 'bob' (request 7f3c1b2a-0002-4000-8000-00000000beef)\nTraceback: line 99"],
    }
    for queue, texts in errors.items():
        for number, text in enumerate(texts):
            await api.push(queue, {"n": number})
            (message,) = await api.pop(queue, batch=1, consumerGroup="workers")
            await api.ack([message], "dlq", group="workers", error=text)
    clusters = await asyncio.to_thread(dlq_report, runner.spark, queues, samples=1)
    assert [(one.error, one.count, one.queues, one.groups) for one in clusters] == [
        ("no user <text> (request <uuid>)", 2, ["mails", "orders"], ["workers"]),
        ("timeout after <n> s at <address>", 2, ["orders"], ["workers"]),
    ]
    assert [len(one.samples) for one in clusters] == [1, 1]
    (sample,) = clusters[1].samples
    assert (sample.queue, sample.partition, json.loads(sample.payload)) == ("orders", "Default", {"n": 1})
    (only,) = await asyncio.to_thread(dlq_report, runner.spark, queues, queue="mails")
    assert only.count == 1
    with pytest.raises(PipelineError, match="--database-url"):
        dlq_report(runner.spark, Connection(api.url))


async def test_minutes_are_rolled_up_and_doing_it_again_counts_nothing_twice(
    runner: Runner, api: Api, queues: Connection, connection: Database
) -> None:
    await api.configure("orders", retryLimit=0)
    await api.push("orders", *({"n": n} for n in range(5)), partition="a")
    await api.push("orders", {"n": 5}, partition="b")
    await connection.execute("UPDATE queen.segments SET created_at = now() - interval '3 minutes'")
    (failing,) = await api.pop("orders", "b", consumerGroup="workers")
    await api.ack([failing], "dlq", group="workers", error="no")
    await connection.execute("UPDATE queen.dead_letters SET failed_at = now() - interval '2 minutes'")
    messages = await api.pop("orders", "a", batch=2, consumerGroup="workers")
    await api.ack(messages, group="workers")
    await connection.execute(
        "INSERT INTO queen.metric_queue_minutes (life, flush, host, worker_id, queue_name, at, seconds, pop_messages,"
        " lag_ms, lag_max_ms)"
        " VALUES (gen_random_uuid(), 1, 'h', 0, 'busy', now() - interval '2 minutes', 60, 4, 40, 25)"
    )
    for _ in range(2):
        done = await asyncio.to_thread(rollup, runner.spark, queues)
        assert done.messages == 6
    answer = await api.call("GET", "/api/v1/analytics/rollup", queue="orders")
    assert answer.status == 200

    def total(kind: str, field: str) -> Any:
        return sum(point[field] or 0 for point in answer.body[kind])

    assert total("queues", "messages") == 6
    assert total("queues", "bytes") == 6 * len(json.dumps({"n": 0}))
    assert max(point["partitions"] for point in answer.body["queues"]) == 2
    busy = await api.call("GET", "/api/v1/analytics/rollup", queue="busy")
    (point,) = busy.body["queues"]
    assert (point["delivered"], point["avgLatencyMs"], point["maxLatencyMs"]) == (4, 10, 25)
    assert total("groups", "errors") == 1
    lags = [point["lagMessages"] for point in answer.body["groups"] if point["lagMessages"] is not None]
    assert set(lags) == {3}
    assert all(point["consumerGroup"] == "workers" for point in answer.body["groups"])
    narrowed = await api.call("GET", "/api/v1/analytics/rollup", queue="orders", group="nobody")
    assert (narrowed.body["queues"], narrowed.body["groups"]) == ([], [])

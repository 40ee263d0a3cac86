"""Writing to queues and topics: every row becomes a message once, whatever is tried how often."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from queen.client.errors import QueenConnectionError
from queen.embedded import EmbeddedPostgres
from queen.errors import SettingsError
from queen.spark.sink.publishers import ServerPublisher, ShardPublisher, StagedPart
from queen.spark.sink.writers import batch_writer
from queen.wire.push import PushItem
from tests.conftest import StartServer
from tests.spark.conftest import Read, in_thread, run_to_end
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection, stored_messages
from tests.support.databases import fresh_database
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi

T = TypeVar("T")
KEY = "0f" * 32


async def write(frame: DataFrame, dsn: str, **options: str) -> None:
    where = {} if "server" in options else {"databaseUrls": dsn}
    writer = frame.write.format("queen").mode("append").options(**where, **options)
    await in_thread(frame.sparkSession, writer.save)


async def pour(stream: DataFrame, dsn: str, checkpoint: Path, **options: str) -> list[int]:
    """Write everything that a stream has now; returns the numbers of its batches."""
    where = {} if "server" in options else {"databaseUrls": dsn}
    writer = stream.writeStream.format("queen").options(**where, **options, checkpointLocation=str(checkpoint))
    return await in_thread(stream.sparkSession, lambda: run_to_end(writer.trigger(availableNow=True).start))


async def numbers(connection: Connection, queue: str, partition: str = "Default") -> list[int]:
    return [json.loads(message.payload)["n"] for message in await stored_messages(connection, queue, partition)]


def counted(spark: SparkSession, rows: int, tasks: int, partitions: int = 1) -> DataFrame:
    """Rows whose payload is their number, for so many partitions."""
    return spark.range(0, rows, 1, tasks).selectExpr(
        "to_json(struct(id AS n)) AS payload", f"concat('p', id % {partitions}) AS partition"
    )


def fail_once(place: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fail after the first rows, the first time that any task gets so far."""
    for number, batch in enumerate(batches):
        yield batch
        if number == 0 and not place.exists():
            place.touch()
            raise RuntimeError("this task fails once, after it has staged something")


async def test_rows_become_messages_in_the_order_of_their_tasks(
    spark: SparkSession, dsn: str, connection: Connection
) -> None:
    await write(counted(spark, 5000, tasks=2, partitions=3), dsn, queue="orders")
    for remainder in range(3):
        assert await numbers(connection, "orders", f"p{remainder}") == list(range(remainder, 5000, 3))
    assert await connection.fetchval("SELECT count(*) FROM queen.stages") == 0


async def test_columns_say_where_a_row_goes_and_the_others_become_its_payload(
    spark: SparkSession, api: Api, dsn: str, connection: Connection
) -> None:
    trace = "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11"
    frame = spark.sql(
        f"SELECT 'a' AS queue, 'eu' AS partition, 't1' AS transaction_id, '{trace}' AS trace_id, 1 AS n,"
        " map('k', array(1.5D)) AS more, timestamp '2026-01-02 03:04:05' AS at, cast(null AS string) AS nothing"
        " UNION ALL SELECT 'b', null, null, null, 2, null, null, 'x'"
    )
    await write(frame, dsn)
    (one,) = await api.pop("a", "eu")
    assert (one["transactionId"], one["traceId"]) == ("t1", trace)
    assert one["data"]["n"] == 1 and one["data"]["more"] == {"k": [1.5]} and one["data"]["nothing"] is None
    assert one["data"]["at"].startswith("2026-01-02T03:04:05")
    (two,) = await api.pop("b", "Default")
    assert two["data"] == {"n": 2, "more": None, "at": None, "nothing": "x"}
    # The id counts for pushes, and pushes count for the next write.
    assert [result["status"] for result in await api.push("a", 1, partition="eu", ids=["t1"])] == ["duplicate"]
    await write(frame, dsn)
    assert len(await stored_messages(connection, "a", "eu")) == 1
    assert len(await stored_messages(connection, "b")) == 2


async def test_a_task_that_fails_and_is_tried_again_writes_its_rows_once(
    spark: SparkSession, dsn: str, connection: Connection, tmp_path: Path
) -> None:
    place = tmp_path / "failed"
    frame = counted(spark, 30_000, tasks=2).mapInArrow(
        lambda rows: fail_once(place, rows), "payload string, partition string"
    )
    await write(frame, dsn, queue="orders")
    assert place.exists()
    assert sorted(await numbers(connection, "orders", "p0")) == list(range(30_000))


async def test_a_write_that_fails_leaves_nothing(spark: SparkSession, dsn: str, connection: Connection) -> None:
    # One task: a second one might still be writing when the failure of the first ends the job.
    frame = counted(spark, 60_000, tasks=1).selectExpr("if(payload LIKE '%59999}', 'nonsense', payload) AS payload")
    with pytest.raises(PySparkException, match=r"rows\[\d+\].payload is not JSON"):
        await write(frame, dsn, queue="orders")
    assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 0
    assert await connection.fetchval("SELECT count(*) FROM queen.stages") == 0


@pytest.mark.parametrize(
    ("options", "columns", "said"),
    [
        ({}, ["payload"], "say where rows go"),
        ({"queue": "q", "topic": "t"}, ["payload"], "queues or to topics"),
        ({"namespace": "n"}, ["payload"], "items need a topic"),
        ({"queue": "q"}, ["payload", "other"], "other would be lost"),
        ({"queue": "q"}, ["partition"], "nothing to send"),
        ({"queue": "q", "batch": "7"}, ["payload"], "option run"),
        ({"queue": "q", "colour": "red"}, ["payload"], "no option 'colour'"),
    ],
)
def test_a_write_that_makes_no_sense_says_why(options: dict[str, str], columns: list[str], said: str) -> None:
    schema = StructType([StructField(name, StringType()) for name in columns])
    with pytest.raises(SettingsError, match=said):
        batch_writer({"databaseUrls": "postgresql://nowhere"} | options, schema, overwrite=False)


async def test_a_database_without_queen_is_not_written_to(postgres: EmbeddedPostgres) -> None:
    options = {"databaseUrls": postgres.dsn(), "queue": "q"}
    schema = StructType([StructField("payload", StringType())])
    rows = pa.RecordBatch.from_pydict({"payload": ["1"]})

    def write() -> None:
        batch_writer(options, schema, overwrite=False).write(iter([rows]))

    with pytest.raises(SettingsError, match=r"has no tables of this version of Queen: relation .*databaseUrls"):
        await asyncio.to_thread(write)


async def test_messages_cannot_be_overwritten(spark: SparkSession, dsn: str) -> None:
    frame = spark.sql("SELECT '1' AS payload")
    with pytest.raises(PySparkException, match='mode\\("append"\\)'):
        frame.write.format("queen").mode("overwrite").options(databaseUrls=dsn, queue="q").save()


async def test_a_write_with_a_run_and_a_number_happens_once(
    spark: SparkSession, dsn: str, connection: Connection
) -> None:
    for batch in ("1", "1", "2"):
        await write(counted(spark, 10, tasks=1), dsn, queue="orders", run="nightly", batch=batch)
    assert await numbers(connection, "orders", "p0") == [*range(10), *range(10)]


async def test_an_encrypted_queue_is_written_with_the_key(
    spark: SparkSession, start_server: StartServer, dsn: str, connection: Connection
) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True)
    frame = counted(spark, 3, tasks=1).select("payload")
    with pytest.raises(PySparkException, match="QUEEN_ENCRYPTION_KEY"):
        await write(frame, dsn, queue="vault")
    await write(frame, dsn, queue="vault", encryptionKey=KEY)
    assert await connection.fetchval("SELECT bool_and(get_byte(body, 0) >= 128) FROM queen.segments")
    assert [message["data"]["n"] for message in await api.pop("vault", batch=3)] == [0, 1, 2]


async def test_rows_become_items_of_topics(spark: SparkSession, api: Api, dsn: str) -> None:
    frame = spark.sql(
        "SELECT '{\"n\": 1}' AS payload, 5 AS priority, 'k' AS idempotency_key, '{\"a\": 1}' AS metadata,"
        " cast(null AS timestamp) AS deliver_after"
        " UNION ALL SELECT '{\"n\": 2}', 1, null, null, timestamp '2026-01-01 00:00:00'"
        " UNION ALL SELECT '{\"n\": 3}', 0, null, null, timestamp '2100-01-01 00:00:00'"
        " UNION ALL SELECT '{\"n\": 4}', 9, 'k', null, null"
    ).coalesce(1)
    await write(frame, dsn, namespace="ns", topic="t")
    items = await TopicApi(api).dequeue()
    assert [item["data"]["n"] for item in items] == [2, 1]
    assert items[1]["metadata"] == {"a": 1} and items[1]["idempotency_key"] == "k"


async def test_a_parked_pop_gets_what_spark_has_written(spark: SparkSession, api: Api, dsn: str) -> None:
    await api.push("orders", 0)
    assert len(await api.pop("orders", autoAck=True)) == 1
    waiting = asyncio.create_task(api.pop("orders", wait=True, timeout=100_000))
    await asyncio.sleep(0)
    await write(counted(spark, 1, tasks=1).select("payload"), dsn, queue="orders")
    assert [message["data"] for message in await waiting] == [{"n": 0}]


async def test_a_batch_that_is_done_again_in_other_tasks_is_published_once(
    spark: SparkSession, read: Read, dsn: str, connection: Connection, tmp_path: Path
) -> None:
    await write(counted(spark, 8_000, tasks=1, partitions=4), dsn, queue="orders")
    options = {"startingOffsets": "earliest", "maxRowsPerBatch": "6000"}

    def stream(tasks: int) -> DataFrame:
        return read.stream("orders", **options, maxTasks=str(tasks)).select("payload", "partition")

    assert await pour(stream(2), dsn, tmp_path / "ck", queue="copies") == [0, 1]
    # As if the driver had died after it published the last batch and before it wrote that down.
    for name in ("1", ".1.crc"):
        (tmp_path / "ck" / "commits" / name).unlink(missing_ok=True)
    assert 1 in await pour(stream(1), dsn, tmp_path / "ck", queue="copies")
    for remainder in range(4):
        copied = await numbers(connection, "copies", f"p{remainder}")
        assert sorted(copied) == list(range(remainder, 8_000, 4))
    # A fresh checkpoint is a new query, which begins anew.
    await pour(stream(1), dsn, tmp_path / "other", queue="copies")
    assert len(await numbers(connection, "copies", "p0")) == 4_000


async def test_through_a_server_it_is_the_same(
    spark: SparkSession, start_server: StartServer, read: Read, dsn: str, connection: Connection, tmp_path: Path
) -> None:
    api = await start_server()
    await write(counted(spark, 12_000, tasks=2, partitions=2), dsn, server=api.url, queue="orders")
    assert await numbers(connection, "orders", "p1") == list(range(1, 12_000, 2))
    source = read.stream("orders", startingOffsets="earliest").select("payload", "partition", "transaction_id")
    await pour(source, dsn, tmp_path / "ck", server=api.url, queue="copies")
    for name in ("0", ".0.crc"):
        (tmp_path / "ck" / "commits" / name).unlink(missing_ok=True)
    await pour(source, dsn, tmp_path / "ck", server=api.url, queue="copies")
    assert sorted(await numbers(connection, "copies", "p1")) == list(range(1, 12_000, 2))
    await write(
        spark.sql("SELECT '1' AS payload, cast(2 AS int) AS priority"), dsn, server=api.url, namespace="ns", topic="t"
    )
    assert [item["priority"] for item in await TopicApi(api).dequeue()] == [2]


def test_a_server_that_is_unavailable_is_asked_again_until_its_grace_is_over() -> None:
    answers = [503, 200]

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(answers.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        url = f"http://127.0.0.1:{server.server_port}"

        def serve() -> None:
            while answers:
                server.handle_request()

        threading.Thread(target=serve, daemon=True).start()
        ServerPublisher(url, None, 30.0).abandon("run", 1)
    assert answers == []
    with pytest.raises(QueenConnectionError):
        ServerPublisher(url, None, 0.0).abandon("run", 1)


async def test_a_writer_waits_while_postgresql_is_unavailable(api: Api, proxy: Proxy, connection: Connection) -> None:
    publisher = await asyncio.to_thread(
        ShardPublisher, [proxy.dsn], encryption_keys=(), dedup_window=60.0, outage_grace=30.0
    )

    def stage() -> list[StagedPart]:
        staging = publisher.begin("run", 0)
        staging.add([PushItem("orders", "Default", msgspec.Raw(b'{"n": 7}'))])
        return staging.finish()

    async def outlasting(work: Callable[[], T]) -> T:
        async with proxy.away():
            harmed = proxy.harmed
            working = asyncio.create_task(asyncio.to_thread(work))

            async def has_tried() -> bool:
                return proxy.harmed > harmed

            await until(has_tried)
        return await working

    parts = await outlasting(stage)
    await outlasting(lambda: publisher.publish("run", 0, parts))
    await asyncio.to_thread(publisher.close)
    assert await numbers(connection, "orders") == [7]


async def test_queues_of_several_shards_are_each_written_where_they_live(
    spark: SparkSession, postgres: EmbeddedPostgres, dsn: str, read: Read, connection: Connection
) -> None:
    async with fresh_database(postgres) as other:
        rows = spark.range(0, 400, 1, 2).selectExpr(
            "to_json(struct(id AS n)) AS payload", "concat('q', id % 8) AS queue"
        )
        for _ in range(2):
            await write(rows, f"{dsn},{other}", run="r", batch="1")
        here = {row["name"] for row in await connection.fetch("SELECT name FROM queen.queues")}
        assert 0 < len(here) < 8
        everywhere = Read(spark, f"{dsn},{other}")
        counts = await asyncio.to_thread(
            lambda: everywhere(",".join(f"q{number}" for number in range(8))).groupBy("queue").count().collect()
        )
        assert {row["queue"]: row["count"] for row in counts} == {f"q{number}": 50 for number in range(8)}

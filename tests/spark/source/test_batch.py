"""Reading queues in one go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType

from queen.embedded import EmbeddedPostgres
from queen.errors import QueenError
from queen.pipelines.errors import cause_of
from queen.spark.options import parse_read_options
from queen.spark.schemas import schema_of
from queen.spark.source.batch import QueenReader
from queen.wire.envelope import NoEncryptionKey
from tests.conftest import StartServer
from tests.spark.conftest import Read, collect
from tests.support.ageing import Connection, age, clean
from tests.support.api import Api
from tests.support.databases import fresh_database

KEY = "0f" * 32


async def test_a_queue_is_read_whole_with_all_its_columns(api: Api, read: Read) -> None:
    await api.push("orders", {"n": 0}, {"n": 1}, ids=["a", 'b"\u00e9'])
    await api.push("orders", {"n": 2}, partition="eu", ids=["c"])
    popped = [*await api.pop("orders", "Default", batch=10), *await api.pop("orders", "eu", batch=10)]

    rows = await collect(lambda: read("orders").orderBy("partition", "offset"))

    assert [(row.queue, row.partition, row.offset, row.payload) for row in rows] == [
        ("orders", "Default", 0, '{"n": 0}'),
        ("orders", "Default", 1, '{"n": 1}'),
        ("orders", "eu", 0, '{"n": 2}'),
    ]
    assert [row.transaction_id for row in rows] == ["a", 'b"\u00e9', "c"]
    assert [row.message_id for row in rows] == [message["id"] for message in popped]
    assert [f"{row.created_at.isoformat(timespec='microseconds')}Z" for row in rows] == [
        message["createdAt"] for message in popped
    ]
    assert all(row.trace_id is None and row.producer_sub is None for row in rows)


async def test_trace_ids_and_the_rest_of_a_log_survive_deletion_and_cleaning(
    api: Api, dsn: str, connection: Connection
) -> None:
    await api.configure("orders", retentionEnabled=True, retentionSeconds=60)
    await api.push("orders", 0, 1)
    await age(connection, 100)
    await clean(api)
    item = {"queue": "orders", "payload": 2, "traceId": "01a1dfe8-13c3-7000-bc1f-2fddebcfc5ba"}
    assert (await api.call("POST", "/api/v1/push", {"items": [item]})).status == 201
    await api.push("orders", 3, 4, 5)
    await api.push("empty", 0)
    await connection.execute(
        "DELETE FROM queen.segments s USING queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
        " WHERE q.name = 'empty' AND s.partition_id = p.id"
    )
    message = (await api.pop("orders", batch=10))[2]
    path = f"/api/v1/messages/{message['partitionId']}/{message['transactionId']}"
    assert (await api.call("DELETE", path)).body["success"]

    rows = rows_of(reader(dsn, queue="orders,empty"))

    assert [(row["offset"], row["payload"]) for row in rows] == [(2, "2"), (3, "3"), (5, "5")]
    assert [row["trace_id"] for row in rows] == [item["traceId"], None, None]


async def test_a_part_of_a_queue_is_read_by_offset_and_by_time(api: Api, dsn: str, connection: Connection) -> None:
    await api.push("orders", 0, 1, 2, 3)
    await api.push("orders", 10, 11, partition="eu")
    await age(connection, 100)
    between = await connection.fetchval("SELECT clock_timestamp() - interval '50 s'")
    await api.push("orders", 4, 5)

    def payloads(**options: str) -> list[int]:
        return sorted(int(row["payload"]) for row in rows_of(reader(dsn, **options)))

    assert payloads(startingOffsets='{"Default": 2}', endingOffsets='{"Default": 5, "eu": 1}') == [2, 3, 4, 10]
    assert payloads(startingOffsets='{"orders": {"Default": 99, "eu": 1}}') == [11]
    assert payloads(startingOffsets="latest") == []
    assert payloads(startingTimestamp=between.isoformat()) == [4, 5]
    assert payloads(endingTimestamp=str(int(between.timestamp() * 1000))) == [0, 1, 2, 3, 10, 11]
    assert payloads(startingTimestamp="2026-01-01", endingOffsets='{"Default": 1, "eu": 0}') == [0]


async def test_a_filtered_read_leaves_the_whole_one_whole(api: Api, read: Read) -> None:
    await api.push("orders", *range(20))
    read.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        orders = read("orders")
        assert len(await collect(lambda: orders.where("offset < 5"))) == 5
        assert len(await collect(lambda: orders)) == 20
        apart = orders.join(orders.where("offset > 17").select("offset"), "offset", "left_anti")
        assert len(await collect(lambda: apart)) == 18
    finally:
        read.spark.conf.unset("spark.sql.python.filterPushdown.enabled")


async def test_a_view_shows_what_was_pushed_since_it_was_first_used(api: Api, read: Read) -> None:
    await api.push("orders", 0)
    read("orders").createOrReplaceTempView("seen")

    def payloads() -> list[str]:
        return sorted(row.payload for row in read.spark.sql("SELECT payload FROM seen").collect())

    assert await asyncio.to_thread(payloads) == ["0"]
    await api.push("orders", 1)
    await api.push("orders", 2, partition="new")
    assert await asyncio.to_thread(payloads) == ["0", "1", "2"]


async def test_what_comes_after_planning_is_read_unless_an_end_was_given(
    api: Api, dsn: str, connection: Connection
) -> None:
    await api.push("orders", 0, 1)
    between = (await connection.fetchval("SELECT clock_timestamp()")).isoformat()
    open_end, fixed = reader(dsn), reader(dsn, endingOffsets='{"Default": 2}')
    since = reader(dsn, startingTimestamp=between)
    (task,), (fixed_task,), (since_task,) = open_end.partitions(), fixed.partitions(), since.partitions()
    await api.push("orders", 2)
    await api.push("orders", 3, partition="eu")
    assert payloads_of(open_end, task) == ["0", "1", "2", "3"]
    assert payloads_of(since, since_task) == ["2", "3"]
    assert payloads_of(fixed, fixed_task) == ["0", "1"]


async def test_partitions_are_chosen_and_names_may_hold_commas(api: Api, dsn: str) -> None:
    await api.push("orders", 0)
    await api.push("orders", 1, partition="eu, west")
    await api.push("a,b", 2)
    await api.push("orders-2", 3)

    def payloads(**options: str) -> list[str]:
        return sorted(row["payload"] for row in rows_of(reader(dsn, **options)))

    assert payloads(partitions='["eu, west"]') == ["1"]
    assert payloads(queue='["a,b", "orders-2"]') == ["2", "3"]
    assert payloads(queue="", subscribePattern="orders(-.*)?") == ["0", "1", "3"]
    assert payloads(queue="", subscribePattern="nothing") == []


async def test_a_schema_makes_columns_of_the_payload(api: Api, read: Read) -> None:
    await api.push("orders", {"id": 1, "lines": [{"sku": "a"}]}, {"id": "two"}, [3])
    ddl = "id LONG, lines ARRAY<STRUCT<sku: STRING>>"
    as_json = StructType([StructField("id", LongType())]).json()

    rows = await collect(lambda: read("orders", schema=ddl, columns="offset").orderBy("offset"))
    again = await collect(lambda: read("orders", schema=as_json).where("_corrupt_record is null"))
    given = await collect(lambda: read.frame("orders").schema("payload STRING, id LONG, offset LONG").load())

    assert [row.asDict(recursive=True) for row in rows] == [
        {"offset": 0, "id": 1, "lines": [{"sku": "a"}], "_corrupt_record": None},
        {"offset": 1, "id": None, "lines": None, "_corrupt_record": '{"id": "two"}'},
        {"offset": 2, "id": None, "lines": None, "_corrupt_record": "[3]"},
    ]
    assert [(row.id, row.partition) for row in again] == [(1, "Default")]
    assert [(row.payload, row.id, row.offset) for row in given][1:] == [('{"id": "two"}', None, 1), ("[3]", None, 2)]


async def test_spark_says_what_is_wrong_with_a_payload_and_with_a_schema(api: Api, read: Read) -> None:
    await api.push("orders", {"id": 1}, {"id": "two"})
    with pytest.raises(PySparkException, match="offset 1 of orders/Default does not fit the schema"):
        await collect(lambda: read("orders", schema="id LONG", mode="FAILFAST"))
    for more in ({}, {"parsedColumn": "body"}):
        with pytest.raises(PySparkException) as raised:
            await asyncio.to_thread(read, "orders", schema="id LNG", **more)
        assert cause_of(raised.value).startswith('Unsupported data type "LNG".')


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": '{"fields": 1}'}, "neither DDL"),
        ({"schema": StructType().add("tags", MapType(StringType(), LongType())).json()}, "tags as map"),
        ({"schema": StructType().add("queue", StringType()).json()}, "has queue twice"),
        ({"columns": "offset,paylod"}, "paylod"),
        ({"queue": "ordrs"}, "there is no queue ordrs"),
        ({"startingOffsets": '{"us": 1}'}, "partition 'us'"),
        ({"startingOffsets": '{"bills": {"Default": 1}}'}, "queue 'bills' has no such partition"),
        (
            {"databaseUrls": "postgresql://me@127.0.0.1:1/none", "outageGraceSeconds": "0"},
            "1:1/none is unavailable",
        ),
    ],
)
async def test_what_cannot_be_read_is_said(options: dict[str, str], said: str, api: Api, dsn: str) -> None:
    await api.push("orders", 1)
    with pytest.raises(QueenError) as raised:
        reader(dsn, **options).partitions()
    assert said in str(raised.value)


def reader(dsn: str, **options: str) -> QueenReader:
    """The reader that Spark would talk to."""
    parsed = parse_read_options({"queue": "orders", "databaseUrls": dsn} | options, {})
    schema = schema_of(parsed)
    assert isinstance(schema, StructType)
    return QueenReader(parsed, schema)


async def test_an_encrypted_queue_is_read_with_its_key(start_server: StartServer, dsn: str) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True)
    await api.push("vault", {"card": 1}, {"card": "é" * 3000})

    rows = rows_of(reader(dsn, queue="vault", encryptionKey=f"{'e1' * 32},{KEY}"))
    with pytest.raises(NoEncryptionKey, match=r"offset 0 of vault/Default cannot be read.*QUEEN_ENCRYPTION_KEY"):
        rows_of(reader(dsn, queue="vault"))

    assert [row["payload"][:10] for row in rows] == ['{"card": 1', '{"card": "']


async def test_queues_are_found_on_their_shards(
    api: Api, dsn: str, postgres: EmbeddedPostgres, start_server: StartServer, tmp_path: Path
) -> None:
    async with fresh_database(postgres) as second:
        other = await start_server(database_urls=(second,), queen_data_dir=tmp_path / "other")
        await api.push("orders", 1)
        await other.push("bills", 2, 3)
        both = f"{dsn},{second}"

        rows = rows_of(reader(both, queue="orders,bills"))
        with pytest.raises(QueenError, match="no queue letters on any of the 2 shards"):
            reader(both, queue="letters").partitions()

        found = sorted((row["queue"], row["payload"]) for row in rows)
        assert found == [("bills", "2"), ("bills", "3"), ("orders", "1")]


async def test_a_queue_is_a_view_in_sql(api: Api, read: Read) -> None:
    await api.push("orders", {"amount": 3}, {"amount": 4})
    await api.push("orders", {"amount": 5}, partition="it's")

    def run() -> list[Row]:
        read.spark.sql(
            "CREATE OR REPLACE TEMPORARY VIEW orders USING queen"
            f" OPTIONS (queue 'orders', schema 'amount LONG', databaseUrls '{read.dsn}')"
        )
        return read.spark.sql("SELECT partition, sum(amount) AS total FROM orders GROUP BY 1 ORDER BY 1").collect()

    rows = await asyncio.to_thread(run)

    assert [tuple(row) for row in rows] == [("Default", 7), ("it's", 5)]
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW … USING queen OPTIONS"):
        await asyncio.to_thread(read.spark.sql, "CREATE TABLE kept USING queen OPTIONS (queue 'orders')")


def rows_of(reader: QueenReader) -> list[dict[str, Any]]:
    """All that Spark would get from it."""
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


def payloads_of(reader: QueenReader, task: InputPartition) -> list[str]:
    return [payload for batch in reader.read(task) for payload in batch["payload"].to_pylist()]

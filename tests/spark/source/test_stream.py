"""Following queues."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from queen.embedded import EmbeddedPostgres
from queen.errors import Conflict, SettingsError
from queen.spark.options import parse_read_options
from queen.spark.schemas import columns_of, schema_of
from queen.spark.source.logs import ShardLog, Span
from queen.spark.source.offsets import PartitionOffsets, count_between, decode_offset, encode_offset
from queen.spark.source.stream import QueenStreamReader
from queen.spark.source.tables import TableReader
from tests.spark.conftest import TOO_SLOW, Read, collect, drain
from tests.support.ageing import Connection, age, clean, until
from tests.support.api import Api
from tests.support.proxy import Proxy


async def test_a_stream_goes_on_where_its_checkpoint_ends_and_finds_new_partitions(
    api: Api, read: Read, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    await api.push("orders", 0, 1, 2, 3, 4)
    await api.push("orders", 5, partition="eu")
    first = await drain(read.stream("orders", startingOffsets="earliest", maxRowsPerBatch="4"), checkpoint)
    await api.push("orders", 6)
    await api.push("orders", 7, 8, partition="us")
    second = await drain(read.stream("orders", startingOffsets="latest", mirrorGroup="spark"), checkpoint)
    lags = await collect(lambda: read(table="lag", group="spark").orderBy("partition"))

    assert numbers(first) == [0, 1, 2, 3, 4, 5]
    assert numbers(second) == [6, 7, 8]
    batches = sorted(int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*"))
    assert batches == [0, 1, 2]
    last = json.loads((checkpoint / "offsets" / "2").read_text().splitlines()[2])
    assert sorted(decode_offset(last)["orders"].offsets.tolist()) == [1, 2, 6]
    # The group stands where the stream does: the last batch is done, and nothing is left.
    assert [(row.partition, row.lag) for row in lags] == [("Default", 0), ("eu", 0), ("us", 0)]
    assert await api.pop("orders", consumerGroup="spark") == []


async def test_a_running_stream_sees_what_comes_with_its_schema(api: Api, read: Read, tmp_path: Path) -> None:
    await api.push("orders", {"n": 0})
    seen: list[Row] = []
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def take(batch: DataFrame, _: int) -> None:
        seen.extend(batch.collect())
        if any(row.n == 2 for row in seen):
            loop.call_soon_threadsafe(arrived.set)

    def start() -> StreamingQuery:
        stream = read.stream("orders", schema="n INT").writeStream.foreachBatch(take)
        return stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    query = await asyncio.to_thread(start)
    try:
        async with asyncio.timeout(300):
            # It begins at the end, and has begun when there is a batch.
            while not list((tmp_path / "checkpoint" / "offsets").glob("[0-9]*")):
                await api.push("orders", {"n": 1})
                await asyncio.sleep(0.2)
                if not query.isActive:
                    assert TOO_SLOW in str(query.exception())
                    query = await asyncio.to_thread(start)
            await api.push("orders", {"n": 2}, partition="new")
            await arrived.wait()
    finally:
        await asyncio.to_thread(query.stop)
    assert 0 not in [row.n for row in seen]
    assert {row.partition for row in seen if row.n == 2} == {"new"}


async def test_messages_that_retention_took_end_a_stream_unless_it_may_go_on(
    api: Api, dsn: str, connection: Connection
) -> None:
    await api.configure("orders", retentionEnabled=True, retentionSeconds=60)
    await api.push("orders", 0)
    done = stream_reader(dsn, startingOffsets="latest").initialOffset()
    await api.push("orders", 1, 2)
    await age(connection, 100)
    await clean(api)
    await api.push("orders", 3)

    with pytest.raises(Conflict, match="offsets 1 to 2 of orders/Default were removed before they were read"):
        stream_reader(dsn).latestOffset(done, ReadAllAvailable())
    lax = stream_reader(dsn, failOnDataLoss="false")
    (task,) = lax.partitions(done, lax.latestOffset(done, ReadAllAvailable()))
    assert [payload for batch in lax.read(task) for payload in batch["payload"].to_pylist()] == ["3"]


async def test_segments_that_vanish_between_planning_and_reading_are_noticed(
    api: Api, dsn: str, connection: Connection
) -> None:
    for number in range(3):
        await api.push("orders", number)
    strict = stream_reader(dsn, startingOffsets="earliest")
    start = strict.initialOffset()
    (task,) = strict.partitions(start, strict.latestOffset(start, ReadAllAvailable()))
    await connection.execute("DELETE FROM queen.segments WHERE base_offset = 1")
    with pytest.raises(Conflict, match="offsets 1 to 1 of orders/Default"):
        list(strict.read(task))
    lax = stream_reader(dsn, failOnDataLoss="false")
    assert [offset for batch in lax.read(task) for offset in batch["offset"].to_pylist()] == [0, 2]


async def test_the_first_batch_is_planned_from_where_it_began_though_the_log_has_grown(api: Api, dsn: str) -> None:
    await api.push("orders", 0)
    reader = stream_reader(dsn, startingOffsets="latest")
    # As Spark calls it: before the first batch, and again to plan it.
    start = reader.initialOffset()
    await api.push("orders", 1)
    end = reader.latestOffset(start, ReadAllAvailable())
    await api.push("orders", 2)
    (task,) = reader.partitions(reader.initialOffset(), end)
    assert [offset for batch in reader.read(task) for offset in batch["offset"].to_pylist()] == [1]


async def test_limits_are_shared_by_what_waits_and_every_partition_gets_on(api: Api, dsn: str) -> None:
    await api.push("orders", *range(90), partition="big")
    await api.push("orders", *range(9), partition="small")
    await api.push("orders", 0, partition="tiny")
    reader = stream_reader(dsn, startingOffsets="earliest", maxRowsPerBatch="10")
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    start = reader.initialOffset()
    for batch in range(10):
        end = reader.latestOffset(start, ReadMaxRows(10))
        assert messages_between(start, end) == 10
        if batch == 4:
            assert (decode_offset(end)["orders"].offsets > 0).all()
        start = end
    assert reader.latestOffset(start, ReadMaxRows(10)) == start == reader.reportLatestOffset()


async def test_a_limit_below_the_number_of_partitions_passes_none_over(api: Api, dsn: str) -> None:
    items = [{"queue": "orders", "partition": str(number % 20), "payload": number} for number in range(20)]
    await api.call("POST", "/api/v1/push", {"items": items})
    reader = stream_reader(dsn, startingOffsets="earliest", maxRowsPerBatch="3")
    end = reader.initialOffset()
    for _ in range(7):
        # There is always something new in all of them.
        await api.call("POST", "/api/v1/push", {"items": items})
        end = reader.latestOffset(end, ReadMaxRows(3))
    assert (decode_offset(end)["orders"].offsets > 0).all()


async def test_partitions_with_little_are_read_beside_one_with_much(api: Api, dsn: str) -> None:
    await api.push("orders", *range(1000), partition="a")
    for partition in ("b", "c", "d"):
        await api.push("orders", 0, partition=partition)
    # A multiple of the number of partitions: what was read says nothing of whose turn it is.
    reader = stream_reader(dsn, startingOffsets="earliest", maxRowsPerBatch="8")
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(8))
    assert decode_offset(end)["orders"].offsets.tolist() == [5, 1, 1, 1]


async def test_a_limit_of_bytes_passes_no_partition_over_whatever_its_segments_hold(api: Api, dsn: str) -> None:
    for _ in range(3):
        for partition in ("a", "b", "c", "d"):
            await api.push("orders", *range(4), partition=partition)
    reader = stream_reader(dsn, startingOffsets="earliest", maxBytesPerTrigger="1")
    end = reader.initialOffset()
    for _ in range(4):
        end = reader.latestOffset(end, ReadMaxBytes(1))
    assert decode_offset(end)["orders"].offsets.tolist() == [4, 4, 4, 4]


async def test_a_batch_waits_for_enough_messages_but_not_for_ever(
    api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.push("orders", 0)
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "3", "maxTriggerDelay": "1 minute"}
    reader = stream_reader(dsn, **options)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(3)
    now = time.monotonic()
    # The first batch of a run takes what there is.
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert messages_between({}, first) == 1
    await api.push("orders", 1, 2)
    assert reader.latestOffset(first, limit) == first
    assert messages_between(first, reader.latestOffset(first, ReadAllAvailable())) == 2
    await api.push("orders", 3)
    second = reader.latestOffset(first, limit)
    assert messages_between(first, second) == 3
    await api.push("orders", 4)
    assert reader.latestOffset(second, limit) == second
    monkeypatch.setattr("queen.spark.source.stream.time.monotonic", lambda: now + 600)
    assert messages_between(second, reader.latestOffset(second, limit)) == 1
    # Nothing more will come to what is available now.
    rest = stream_reader(dsn, **options)
    rest.prepareForTriggerAvailableNow()
    assert messages_between(second, rest.latestOffset(second, limit)) == 1
    assert rest.latestOffset(rest.latestOffset(second, limit), limit) == rest.latestOffset(second, limit)


async def test_a_batch_waits_for_enough_bytes_but_not_for_ever(
    api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A segment of it has about 1000 bytes.
    async def push(partition: str) -> None:
        await api.push("orders", secrets.token_hex(1000), partition=partition)

    await push("a")
    options = {"startingOffsets": "earliest", "minBytesPerTrigger": "2500", "maxTriggerDelay": "1 minute"}
    reader = stream_reader(dsn, **options)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(1)
    now = time.monotonic()
    # The first batch of a run takes what there is.
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert messages_between({}, first) == 1
    await push("a")
    await push("b")
    assert reader.latestOffset(first, limit) == first
    await push("b")
    second = reader.latestOffset(first, limit)
    assert messages_between(first, second) == 3
    for _ in range(2):
        await push("b")
    assert reader.latestOffset(second, limit) == second
    # With more segments than are looked at there is enough.
    with monkeypatch.context() as few:
        few.setattr("queen.spark.source.stream._MOST_SEGMENTS", 1)
        third = reader.latestOffset(second, limit)
    assert messages_between(second, third) == 2
    await push("a")
    assert reader.latestOffset(third, limit) == third
    monkeypatch.setattr("queen.spark.source.stream.time.monotonic", lambda: now + 600)
    assert messages_between(third, reader.latestOffset(third, limit)) == 1
    with pytest.raises(SettingsError, match="minBytesPerTrigger needs databaseUrls"):
        stream_reader(dsn, databaseUrls="", server="http://localhost:1", minBytesPerTrigger="1")


async def test_a_batch_has_so_many_bytes_by_whole_segments_and_one_at_least(api: Api, dsn: str) -> None:
    # Texts that cannot be compressed: a segment of each has about 1000 bytes.
    def noise() -> str:
        return secrets.token_hex(1000)

    for _ in range(4):
        for partition in ("a", "b", "c"):
            await api.push("orders", noise(), partition=partition)
    await api.push("empty", 0)
    reader = stream_reader(
        dsn, queue="empty,orders", startingOffsets='{"empty": {"Default": 1}}', maxBytesPerTrigger="4500"
    )
    assert reader.getDefaultReadLimit() == ReadMaxBytes(4500)
    start = reader.initialOffset()
    sizes = []
    while (end := reader.latestOffset(start, ReadMaxBytes(4500))) != start:
        sizes.append(messages_between(start, end))
        start = end
        if len(sizes) == 1:
            # Each partition gets on.
            assert decode_offset(end)["orders"].offsets.min() > 0
    assert sum(sizes) == 12
    assert set(sizes[:-1]) <= {3, 4}
    tiny = stream_reader(dsn, startingOffsets="earliest", maxBytesPerTrigger="1", maxRowsPerBatch="2")
    assert tiny.getDefaultReadLimit() == ReadMaxRows(2)
    seen = tiny.initialOffset()
    for _ in range(3):
        after = tiny.latestOffset(seen, ReadMaxRows(2))
        assert messages_between(seen, after) == 1
        seen = after
    assert (decode_offset(seen)["orders"].offsets == 1).all()
    with pytest.raises(SettingsError, match="maxBytesPerTrigger needs databaseUrls"):
        stream_reader(dsn, databaseUrls="", server="http://localhost:1", maxBytesPerTrigger="1")


async def test_a_limit_of_bytes_does_not_hide_a_loss(api: Api, dsn: str, connection: Connection) -> None:
    for number in range(3):
        await api.push("orders", number)
    reader = stream_reader(dsn, startingOffsets="earliest", maxBytesPerTrigger="1")
    start = reader.initialOffset()
    await connection.execute("DELETE FROM queen.segments")
    (task,) = reader.partitions(start, reader.latestOffset(start, ReadMaxBytes(1)))
    with pytest.raises(Conflict, match="offsets 0 to 2 of orders/Default"):
        list(reader.read(task))


async def test_a_checkpoint_of_the_first_format_is_gone_on_with(api: Api, dsn: str, connection: Connection) -> None:
    await api.push("orders", 0, 1, 2)
    id = await connection.fetchval("SELECT id FROM queen.partitions")
    reader = stream_reader(dsn)
    start = {"orders": {"Default": [id, 2]}}
    end = reader.latestOffset(start, ReadAllAvailable())
    (task,) = reader.partitions(start, end)
    assert [payload for batch in reader.read(task) for payload in batch["payload"].to_pylist()] == ["2"]


def messages_between(start: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    return count_between(decode_offset(start), decode_offset(end))


def test_an_offset_of_many_partitions_is_small_and_comes_back_as_it_was() -> None:
    ids = np.arange(1_000, 101_000, dtype=np.int64)
    offsets = PartitionOffsets(ids, 10_000 + ids % 97)
    encoded = encode_offset({"orders": offsets, "none": PartitionOffsets(ids[:0], ids[:0])})
    assert len(json.dumps(encoded)) < 100_000
    decoded = decode_offset(json.loads(json.dumps(encoded)))
    assert (decoded["orders"].ids == ids).all() and (decoded["orders"].offsets == offsets.offsets).all()
    assert len(decoded["none"].ids) == 0
    assert messages_between({}, encoded) == int(offsets.offsets.sum())
    for wrong in ({"format": 2}, {"format": 2, "queues": {"orders": "?"}}, {"orders": {"Default": 1}}, {"a": 1}):
        with pytest.raises(SettingsError, match="not written by format queen"):
            decode_offset(wrong)


async def test_a_queue_that_was_made_again_while_the_stream_was_down_is_a_loss(api: Api, dsn: str) -> None:
    await api.push("orders", 0)
    await api.push("orders", 1, partition="read")
    reader = stream_reader(dsn, startingOffsets="earliest")
    done = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    await api.push("orders", 2, 3)
    assert (await api.call("DELETE", "/api/v1/resources/queues/orders")).status == 200
    await api.push("orders", 4)
    restarted = stream_reader(dsn)
    for _ in range(2):
        with pytest.raises(Conflict, match=r"^offsets 1 to 2 of orders/Default were removed before they were read"):
            restarted.latestOffset(done, ReadAllAvailable())
    lax = stream_reader(dsn, failOnDataLoss="false")
    end = lax.latestOffset(done, ReadAllAvailable())
    assert messages_between({}, end) == 1


async def test_a_log_that_ends_before_what_was_read_is_a_loss(api: Api, dsn: str, connection: Connection) -> None:
    await api.push("orders", 0, 1)
    id = await connection.fetchval("SELECT id FROM queen.partitions")
    # What the checkpoint says after PostgreSQL was restored from a backup.
    read = encode_offset({"orders": PartitionOffsets(np.array([id]), np.array([5]))})
    with pytest.raises(Conflict, match=r"^orders/Default ends at offset 2 and was read up to 5: PostgreSQL was"):
        stream_reader(dsn).latestOffset(read, ReadAllAvailable())
    lax = stream_reader(dsn, failOnDataLoss="false")
    end = lax.latestOffset(read, ReadAllAvailable())
    assert messages_between({}, end) == 2
    assert lax.partitions(read, end) == []
    await api.push("orders", 2)
    (task,) = lax.partitions(end, lax.latestOffset(end, ReadAllAvailable()))
    assert [payload for batch in lax.read(task) for payload in batch["payload"].to_pylist()] == ["2"]


async def test_a_partition_that_went_without_a_trace_is_a_loss_of_unknown_size(
    api: Api, dsn: str, connection: Connection
) -> None:
    await api.push("orders", 0)
    await api.push("orders", 1, partition="old")
    done = stream_reader(dsn, startingOffsets="latest").initialOffset()
    await connection.execute("DELETE FROM queen.partitions WHERE name = 'old'")
    # All of it had been read, and that is remembered for a month.
    assert messages_between({}, stream_reader(dsn).latestOffset(done, ReadAllAvailable())) == 1
    await connection.execute("DELETE FROM queen.removed_partitions")
    with pytest.raises(Conflict, match=r"messages of orders/#\d+ from offset 1 on \(how many is not known\)"):
        stream_reader(dsn).latestOffset(done, ReadAllAvailable())


async def test_a_reader_waits_while_postgresql_is_unavailable(
    api: Api, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        await api.push("orders", number)
    reader = stream_reader(proxy.dsn, startingOffsets="earliest")

    def read() -> list[str]:
        start = reader.initialOffset()
        (task,) = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        return [payload for batch in reader.read(task) for payload in batch["payload"].to_pylist()]

    async with proxy.away():
        reading = asyncio.create_task(asyncio.to_thread(read))
        await until_logged(caplog, "retrying for")
    assert await reading == ["0", "1", "2"]

    options = parse_read_options({"table": "dlq", "databaseUrls": proxy.dsn}, {})
    table = TableReader(options, columns_of(options.table))
    (shard,) = table.partitions()
    caplog.clear()
    async with proxy.away():
        letters = asyncio.create_task(asyncio.to_thread(lambda: list(table.read(shard))))
        await until_logged(caplog, "retrying for")
    assert await letters == []


async def test_a_read_that_loses_its_connection_goes_on_behind_what_it_has(
    api: Api, dsn: str, connection: Connection
) -> None:
    # More than PostgreSQL and the driver hold between them.
    for number in range(100):
        await api.push("orders", f"{number:03d}" * 30_000)
    log = ShardLog((dsn,), outage_grace=30.0)
    (one,) = await asyncio.to_thread(log.positions, ["orders"])
    segments = log.segments([Span("orders", "Default", 0, one.id, 0, 100)])
    seen = next(segments).bases.tolist()
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'queen-spark'"
        " AND datname = current_database()"
    )
    seen += await asyncio.to_thread(lambda: [base for run in segments for base in run.bases.tolist()])
    assert seen == list(range(100))


async def test_a_connection_that_is_refused_fails_at_once(api: Api, dsn: str) -> None:
    log = ShardLog((dsn.replace("postgres@", "nobody@"),), outage_grace=600.0)
    with pytest.raises(SettingsError, match=r'refuses the connection: role "nobody" does not exist. Check'):
        log.positions(["orders"])


async def test_a_database_without_queen_and_a_role_without_rights_are_named(
    postgres: EmbeddedPostgres, dsn: str, connection: Connection
) -> None:
    log = ShardLog((postgres.dsn(),))
    with pytest.raises(SettingsError, match=r"has no tables of this version of Queen: relation .*databaseUrls"):
        log.positions(["orders"])
    await connection.execute("CREATE ROLE spark_stranger LOGIN")
    try:
        log = ShardLog((make_conninfo(dsn, user="spark_stranger"),))
        with pytest.raises(SettingsError, match=r"refuses to read: permission denied for schema queen. Check the role"):
            log.positions(["orders"])
        log.connection(0).close()
    finally:
        await connection.execute("DROP ROLE spark_stranger")


async def test_new_queues_of_a_pattern_are_followed(api: Api, dsn: str) -> None:
    await api.push("orders-it", 0)
    await api.push("bills", 1)
    reader = stream_reader(dsn, queue="", subscribePattern="orders-.*", startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    await api.push("orders-de", 2)
    after = reader.latestOffset(end, ReadAllAvailable())
    assert (messages_between({}, end), messages_between(end, after)) == (1, 1)


@pytest.mark.parametrize(
    "limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "minBytesPerTrigger"]
)
async def test_a_pattern_that_no_queue_matches_yet_is_waited_for(api: Api, dsn: str, limit: str) -> None:
    reader = stream_reader(dsn, queue="", subscribePattern="orders-.*", startingOffsets="earliest", **{limit: "1"})
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert messages_between({}, end) == 0
    await api.push("orders-de", 0)
    assert messages_between(end, reader.latestOffset(end, reader.getDefaultReadLimit())) == 1


async def test_a_queue_of_a_pattern_that_is_deleted_while_it_is_looked_up_is_passed_over(
    api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.push("orders-it", 0)
    reader = stream_reader(dsn, queue="", subscribePattern="orders-.*", startingOffsets="earliest")
    listed, listings = ShardLog.queue_names, []

    def with_one_that_is_gone(log: ShardLog) -> list[str]:
        listings.append(listed(log))
        return [*listings[-1], "orders-gone"] if len(listings) == 1 else listings[-1]

    monkeypatch.setattr(ShardLog, "queue_names", with_one_that_is_gone)
    assert messages_between({}, reader.latestOffset({}, ReadAllAvailable())) == 1
    assert len(listings) == 3


async def test_what_is_available_now_ends_where_it_was_when_the_query_began(api: Api, dsn: str) -> None:
    await api.push("orders", 0, 1)
    reader = stream_reader(dsn, startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    await api.push("orders", 2)
    await api.push("orders", 3, partition="eu")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert messages_between({}, end) == 2
    assert reader.latestOffset(end, ReadAllAvailable()) == end


async def test_a_partition_that_was_created_again_is_read_from_its_beginning(
    api: Api, dsn: str, connection: Connection
) -> None:
    await api.push("orders", 0, 1)
    reader = stream_reader(dsn, startingOffsets="earliest")
    done = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert (await api.call("DELETE", "/api/v1/resources/queues/orders")).status == 200
    await api.push("orders", 2)
    end = reader.latestOffset(done, ReadAllAvailable())
    (task,) = reader.partitions(done, end)
    assert [payload for batch in reader.read(task) for payload in batch["payload"].to_pylist()] == ["2"]
    # What had not been read when it went is a loss.
    await api.push("orders", 3)
    reader.latestOffset(end, ReadAllAvailable())
    assert (await api.call("DELETE", "/api/v1/resources/queues/orders")).status == 200
    await api.push("orders", 4)
    with pytest.raises(Conflict, match="offsets 1 to 1 of orders/Default"):
        reader.latestOffset(end, ReadAllAvailable())


async def test_a_mirrored_group_shows_how_far_a_stream_is(api: Api, dsn: str) -> None:
    await api.push("orders", 0, 1, 2)
    reader = stream_reader(dsn, startingOffsets="earliest", group="spark", maxRowsPerBatch="1")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(1))
    assert await lag_of(api, "spark") == 3
    reader.latestOffset(end, ReadMaxRows(1))
    assert await lag_of(api, "spark") == 2
    # A message that a consumer of the group holds is its own affair.
    assert len(await api.pop("orders", consumerGroup="spark")) == 1
    reader.latestOffset(reader.latestOffset(end, ReadAllAvailable()), ReadAllAvailable())
    assert await lag_of(api, "spark") == 2


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def found() -> bool:
        return text in caplog.text

    await until(found)


async def lag_of(api: Api, group: str) -> int:
    answer = await api.call("GET", "/api/v1/consumer-groups")
    lags = [one["totalLag"] for one in answer.body if one["name"] == group]
    assert len(lags) == 1
    return int(lags[0])


def stream_reader(dsn: str, **options: str) -> QueenStreamReader:
    """The reader that Spark would talk to."""
    parsed = parse_read_options({"queue": "orders", "databaseUrls": dsn} | options, {})
    schema = schema_of(parsed)
    assert isinstance(schema, StructType)
    return QueenStreamReader(parsed, schema)


def numbers(rows: list[Row]) -> list[int]:
    return sorted(int(row.payload) for row in rows)

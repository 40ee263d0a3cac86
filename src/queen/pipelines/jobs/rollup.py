"""`queen pipeline rollup`: throughput, latency, lag and errors by minute, queue and group, for the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import Column, functions

from queen.chunks import chunks
from queen.pipelines.errors import PipelineError
from queen.pipelines.queries.frames import read_table
from queen.pipelines.session import Connection
from queen.spark.source.connections import shard_connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Minutes that were rolled up are rolled up once more: a transaction may commit a while after its messages were dated.
_AGAIN: Final = timedelta(minutes=5)
_FIRST_TIME: Final = timedelta(days=1)
_ROWS_AT_ONCE: Final = 5000

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RolledUp:
    """What a run did. `until` is not part of it."""

    since: datetime
    until: datetime
    queues: int
    messages: int
    rows: int


def rollup(
    spark: SparkSession,
    connection: Connection,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    keep: timedelta = timedelta(days=90),
) -> RolledUp:
    """Roll up the minutes that are over since the last time. Rows go to the first database, whose server shows them."""
    if not connection.databases:
        raise PipelineError("rollup reads and writes PostgreSQL itself: give --database-url")
    home = shard_connection(connection.databases[0])
    now = datetime.now(UTC)
    until = _minute(until or now)
    if since is None:
        ((last,),) = home.fetch("rollup_last")
        since = now - _FIRST_TIME if last is None else last - _AGAIN
    since = min(_minute(since), until)
    queues = [name for url in connection.databases for (name,) in shard_connection(url).fetch("rollup_queues")]
    stored = list(_stored(spark, connection, queues, since, until)) if queues and since < until else []
    rows = [*stored, *_latencies(connection, since, until), *_errors(spark, connection, since, until)]
    rows += _lags(spark, connection, _minute(now))
    merged = list(_merged(rows))
    for some in chunks(merged, _ROWS_AT_ONCE):
        home.fetch("rollup_save", msgspec.json.encode(some).decode())
    home.fetch("rollup_forget", now - keep)
    return RolledUp(since, until, len(queues), sum(row["messages"] for row in stored), len(merged))


def _stored(
    spark: SparkSession, connection: Connection, queues: Sequence[str], since: datetime, until: datetime
) -> Iterator[Row]:
    """What was pushed, from the messages themselves."""
    messages = (
        spark.read.format("queen")
        .options(**connection.options())
        .option("queue", json.dumps(list(queues)))
        .option("columns", "queue,partition,created_at,payload")
        .option("startingTimestamp", since.isoformat())
        .option("endingTimestamp", until.isoformat())
        .load()
    )
    size = functions.octet_length("payload")
    counted = messages.groupBy("queue", _minute_of("created_at").alias("minute")).agg(
        functions.count("*").alias("messages"),
        functions.sum(size).alias("bytes"),
        functions.max(size).alias("largest_bytes"),
        functions.count_distinct("partition").alias("partitions"),
    )
    for row in counted.collect():
        yield row.asDict() | {"group": "", "minute": _moment(row["minute"])}


def _latencies(connection: Connection, since: datetime, until: datetime) -> Iterator[Row]:
    for url in connection.databases:
        for minute, queue, delivered, latency, longest in shard_connection(url).fetch("rollup_latencies", since, until):
            yield {
                "minute": minute,
                "queue": queue,
                "group": "",
                "delivered": delivered,
                "latency_ms": latency,
                "latency_max_ms": longest,
            }


def _errors(spark: SparkSession, connection: Connection, since: datetime, until: datetime) -> Iterator[Row]:
    """Dead letters, by the minute in which the message was given up on."""
    letters = read_table(spark, connection, "dlq").where(
        (functions.col("failed_at") >= functions.lit(since)) & (functions.col("failed_at") < functions.lit(until))
    )
    counted = letters.groupBy("queue", "group", _minute_of("failed_at").alias("minute")).agg(
        functions.count("*").alias("errors")
    )
    for row in counted.collect():
        yield row.asDict() | {"minute": _moment(row["minute"])}


def _lags(spark: SparkSession, connection: Connection, minute: datetime) -> Iterator[Row]:
    """Where groups are now: that cannot be known afterwards."""
    summed = (
        read_table(spark, connection, "lag")
        .groupBy("queue", "group")
        .agg(
            functions.sum("lag").alias("lag_messages"),
            functions.max("seconds_behind").alias("lag_seconds"),
            functions.coalesce(functions.sum("total_consumed"), functions.lit(0)).alias("consumed_total"),
        )
    )
    for row in summed.collect():
        yield row.asDict() | {"minute": minute}


def _merged(rows: Sequence[Row]) -> Iterator[Row]:
    """One row for each minute, queue and group: a statement cannot store a row twice."""
    found: dict[tuple[datetime, str, str], Row] = {}
    for row in rows:
        found.setdefault((row["minute"], row["queue"], row["group"]), {}).update(row)
    yield from found.values()


def _minute(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(second=0, microsecond=0)


def _minute_of(column: str) -> Column:
    """As a number, which comes out of Spark the same in every time zone."""
    return functions.unix_micros(functions.date_trunc("minute", column))


def _moment(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)

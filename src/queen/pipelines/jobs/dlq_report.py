"""`queen pipeline dlq-report`: dead letters clustered by what went wrong, with samples."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import Column, functions

from queen.pipelines.queries.frames import read_table
from queen.pipelines.session import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONGEST_PATTERN: Final = 300
_LONGEST_PAYLOAD: Final = 2000
# What differs from failure to failure of one kind; the order matters.
_PARTICULARS: Final = (
    (r"(?s)\n.*", ""),
    (r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}", "<uuid>"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<address>"),
    (r"'[^']*'|\"[^\"]*\"", "<text>"),
    (r"\b(?:0x)?(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b", "<hex>"),
    (r"\d+(?:\.\d+)?", "<n>"),
    (r"\s+", " "),
)


class Sample(msgspec.Struct, frozen=True, rename="camel"):
    """One dead letter of a cluster."""

    queue: str
    partition: str
    transaction_id: str
    error: str
    payload: str
    failed_at: str


class Cluster(msgspec.Struct, frozen=True, rename="camel"):
    """Failures of one kind. In `error`, the parts that differ between them are placeholders."""

    error: str
    count: int
    queues: list[str]
    groups: list[str]
    first_at: str
    last_at: str
    samples: list[Sample]


def dlq_report(
    spark: SparkSession,
    connection: Connection,
    *,
    queue: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    samples: int = 3,
) -> list[Cluster]:
    """The kinds of failures among the dead letters, the most frequent first."""
    found = read_table(spark, connection, "dlq", queue)
    if since is not None:
        found = found.where(functions.col("failed_at") >= functions.lit(since))
    if until is not None:
        found = found.where(functions.col("failed_at") < functions.lit(until))
    shown = found.withColumn("payload", functions.substring("payload", 1, _LONGEST_PAYLOAD)).withColumn(
        "failed_at", functions.date_format("failed_at", "yyyy-MM-dd'T'HH:mm:ss.SSSXXX")
    )
    letters = shown.withColumn("pattern", _pattern(functions.col("error")))
    sample = functions.struct("failed_at", "queue", "partition", "transaction_id", "error", "payload")
    clusters = letters.groupBy("pattern").agg(
        functions.count("*").alias("count"),
        functions.sort_array(functions.collect_set("queue")).alias("queues"),
        functions.sort_array(functions.collect_set("group")).alias("groups"),
        functions.min("failed_at").alias("first_at"),
        functions.max("failed_at").alias("last_at"),
        functions.slice(functions.sort_array(functions.collect_list(sample), asc=False), 1, samples).alias("samples"),
    )
    rows = clusters.orderBy(functions.col("count").desc(), "pattern").collect()
    return [
        Cluster(
            row["pattern"],
            row["count"],
            row["queues"],
            row["groups"],
            row["first_at"],
            row["last_at"],
            [Sample(**sample.asDict()) for sample in row["samples"]],
        )
        for row in rows
    ]


def _pattern(error: Column) -> Column:
    for particular, name in _PARTICULARS:
        error = functions.regexp_replace(error, particular, name)
    return functions.substring(functions.trim(error), 1, _LONGEST_PATTERN)

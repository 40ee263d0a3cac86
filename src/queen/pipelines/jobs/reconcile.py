"""`queen pipeline reconcile`: proves that what was pushed is in the archive, partition by partition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import Column, DataFrame, functions

from queen.pipelines.archive_files import Selection, reading
from queen.pipelines.session import Connection

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

_KEY: Final = ("queue", "partition", "offset", "message_id")
_REST: Final = ("transaction_id", "trace_id", "created_at", "producer_sub", "payload")


class PartitionReport(msgspec.Struct, frozen=True, rename="camel"):
    """One partition. `behind` came after the last message that is archived; `missing` did not."""

    queue: str
    partition: str
    pushed: int
    archived: int
    missing: int
    behind: int
    different: int
    doubled: int
    only_archived: int
    queue_checksum: str
    archive_checksum: str
    first_missing: int | None

    @property
    def whole(self) -> bool:
        """Nothing is wrong; the archive may be behind."""
        return not (self.missing or self.different or self.doubled)


def reconcile(
    spark: SparkSession,
    connection: Connection,
    root: str | Path,
    queues: Sequence[str] = (),
    catalog: str | None = None,
) -> list[PartitionReport]:
    """Compare every message that the queues hold with the archive: all columns, by checksum."""
    # The archive is read first: what is pushed meanwhile counts as behind, not as missing.
    with reading(root, catalog=catalog) as view:
        names = list(queues) or view.queues()
        if not names:
            return []
        archived = view.rows(spark, Selection(names))
        stored = spark.read.format("queen").options(**connection.options()).option("queue", json.dumps(names)).load()
        rows = _compared(stored, archived).orderBy("queue", "partition").collect()
    return [_report(row) for row in rows]


def _report(row: Row) -> PartitionReport:
    sums = {name: _checksum(row[name]) for name in ("queue_checksum", "archive_checksum")}
    return PartitionReport(**(row.asDict() | sums))


def _compared(stored: DataFrame, archived: DataFrame) -> DataFrame:
    here = stored.select(*_KEY, _hash().alias("q"))
    there = archived.select(*_KEY, _hash().alias("a")).groupBy(*_KEY)
    # Two copies that differ have a minimum and a maximum.
    copies = there.agg(functions.min("a").alias("a"), functions.max("a").alias("b"), functions.count("a").alias("n"))
    last = copies.groupBy("queue", "partition").agg(functions.max("offset").alias("last"))
    both = here.join(copies, list(_KEY), "full_outer").join(last, ["queue", "partition"], "left_outer")
    pushed, kept = functions.col("q").isNotNull(), functions.col("a").isNotNull()
    late = functions.col("last").isNull() | (functions.col("offset") > functions.col("last"))
    lost = pushed & ~kept & ~late
    return both.groupBy("queue", "partition").agg(
        _count(pushed).alias("pushed"),
        _count(pushed & kept).alias("archived"),
        _count(lost).alias("missing"),
        _count(pushed & ~kept & late).alias("behind"),
        _count(
            pushed & kept & ((functions.col("q") != functions.col("a")) | (functions.col("a") != functions.col("b")))
        ).alias("different"),
        _count(functions.col("n") > 1).alias("doubled"),
        _count(~pushed).alias("only_archived"),
        _sum("q", pushed).alias("queue_checksum"),
        _sum("a", pushed & kept).alias("archive_checksum"),
        functions.min(functions.when(lost, functions.col("offset"))).alias("first_missing"),
    )


def _hash() -> Column:
    # A missing value and an empty one are not the same, and the hash alone is the same for both.
    absent = functions.concat(*(functions.col(name).isNull().cast("string") for name in _REST))
    return functions.xxhash64(*_KEY, *_REST, absent)


def _count(condition: Column) -> Column:
    return functions.count_if(functions.coalesce(condition, functions.lit(False)))


def _sum(column: str, condition: Column) -> Column:
    return functions.sum(functions.when(condition, functions.col(column)).cast("decimal(38,0)"))


def _checksum(total: Decimal | None) -> str:
    """The sum of the hashes, modulo 2 to the 64th: the same in any order."""
    return f"{int(total or 0) % 2**64:016x}"

"""What there is beside messages, as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from queen.pipelines.connection import Connection
from queen.pipelines.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_table(spark: SparkSession, connection: Connection, table: str, queue: str | None = None) -> DataFrame:
    """Dead letters (`dlq`) or lags (`lag`) of all queues, or of one. They are read from PostgreSQL."""
    if not connection.databases:
        raise PipelineError("this is read from the PostgreSQL behind the server: give --database-url")
    reader = spark.read.format("queen").options(**connection.options()).option("table", table)
    return (reader.option("queue", queue) if queue else reader).load()

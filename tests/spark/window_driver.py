"""A driver to be killed: it counts the events of a queue in windows, and writes the counts to another queue.

python -m tests.spark.window_driver DATABASE_URL CHECKPOINT EVENTS_PER_BATCH
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from queen.spark.datasource import QueenDataSource
from tests.spark.conftest import SETTINGS


def main(url: str, checkpoint: str, events_per_batch: str) -> None:
    """In a process of its own."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.config("spark.sql.streaming.noDataMicroBatches.enabled", "true").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    count_windows(spark, url, checkpoint, events_per_batch)
    spark.stop()


def count_windows(spark: SparkSession, url: str, checkpoint: str, events_per_batch: str) -> None:
    """Until everything is counted."""
    spark.dataSource.register(QueenDataSource)
    events = (
        spark.readStream.format("queen")
        .options(databaseUrls=url, queue="events", startingOffsets="earliest", maxRowsPerBatch=events_per_batch)
        .load()
        .select(f.from_json("payload", "second long, key string").alias("event"))
        .select(f.timestamp_seconds("event.second").alias("at"), "event.key")
    )
    counts = (
        events.withWatermark("at", "5 seconds")
        .groupBy(f.window("at", "10 seconds"), "key")
        .count()
        .select(
            f.to_json(f.struct(f.unix_timestamp("window.start").alias("start"), "key", "count")).alias("payload"),
            f.col("key").alias("partition"),
        )
    )
    query = (
        counts.writeStream.format("queen")
        .outputMode("append")
        .options(databaseUrls=url, queue="counts", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])

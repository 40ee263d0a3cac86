"""A driver to be killed: a query that passes a queue on to another, message by message, until it is ended.

python -m tests.campaign.spark_driver DATABASE_URL CHECKPOINT SOURCE TARGET
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from queen.spark.datasource import QueenDataSource
from tests.spark.conftest import SETTINGS


def main(url: str, checkpoint: str, source: str, target: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[1]")
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(QueenDataSource)
    rows = (
        spark.readStream.format("queen")
        .options(databaseUrls=url, queue=source, startingOffsets="earliest", maxRowsPerBatch="50")
        .load()
        .select("payload", "partition")
    )
    query = rows.writeStream.format("queen").options(databaseUrls=url, queue=target, checkpointLocation=checkpoint)
    query.start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Spark's Python daemon with the data source loaded.

Spark forks its Python workers from a daemon, one for each plan, commit and task that finds no idle worker. What the
daemon has imported is there at once: `spark.python.daemon.module=queen.spark.daemon` saves each of them about a second.
"""

from __future__ import annotations

import pyspark.sql.pandas.types
from pyspark import daemon

import queen.spark.batch
import queen.spark.sink
import queen.spark.stream
import queen.spark.tables

PRELOADED = (pyspark.sql.pandas.types, queen.spark.batch, queen.spark.sink, queen.spark.stream, queen.spark.tables)

if __name__ == "__main__":
    daemon.manager()

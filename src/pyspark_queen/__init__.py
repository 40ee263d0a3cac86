"""Spark looks for modules named `pyspark_…` with a `DefaultSource`: so `format("queen")` needs no registration."""

from queen.spark.datasource import QueenDataSource as DefaultSource

__all__ = ["DefaultSource"]

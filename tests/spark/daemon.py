"""PySpark's daemon, with what its workers import loaded before it forks them: a test has a dozen workers."""

from __future__ import annotations

import importlib
import os
import sys

from pyspark.daemon import manager

_MODULES = (
    "pyspark.sql.conversion",
    "queen.spark.datasource",
    "queen.spark.source.batch",
    "queen.spark.source.stream",
    "queen.spark.sink.writers",
)

if __name__ == "__main__":
    # PySpark imports after the fork, for modules that start threads: of these, numpy does unless it is told not to.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in (sys.argv[1], *_MODULES):
        importlib.import_module(name)
    # Workers invalidate what is cached of paths, and Python 3.13 cannot list a zip file after that. New ones it can.
    sys.path_importer_cache.clear()
    manager()

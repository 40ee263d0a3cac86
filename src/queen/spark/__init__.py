"""Queues as Spark DataFrames: `spark.read.format("queen")`, in batch and streaming.

It needs PySpark; the rest of Queen does not.
"""

from __future__ import annotations

try:
    import pyspark as _pyspark
except ImportError as error:
    raise ImportError(
        "queen.spark needs PySpark and Java 17 or newer: pip install '.[spark]' in a clone, and install Java"
        " (on Debian and Ubuntu: apt install openjdk-17-jre-headless)"
    ) from error

if tuple(int(part) for part in _pyspark.__version__.split(".")[:2]) < (4, 2):
    raise ImportError(f"queen.spark needs PySpark 4.2 or newer, not {_pyspark.__version__}: pip install -U pyspark")

from queen.spark.sink.foreach import BatchSink

__all__ = ["BatchSink"]

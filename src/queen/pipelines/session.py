"""The Spark session of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.pipelines.java import require_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
_LOCAL_MEMORY: Final = "1g"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")


def open_session(name: str, master: str = LOCAL, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session on this machine, or on the cluster that `master` names. Raises `SparkMissing`."""
    require_spark()
    # Spark's workers are to run what this process runs, and not whatever `python3` is.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(f"queen {name}").master(master)
    for key, value in (settings_for(master) | dict(conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def settings_for(master: str) -> dict[str, str]:
    """What Spark is told, unless the user tells it something else."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # A name such as 007 stays text when it is read back from the name of a directory.
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if not master.startswith("local"):
        return settings
    return settings | {
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{_LOGGING}",
        "spark.driver.memory": _LOCAL_MEMORY,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # State and shuffles are split in as many parts as work at a time; more only costs.
        "spark.sql.shuffle.partitions": str(_cores(master)),
    }


def _cores(master: str) -> int:
    inside = master.removeprefix("local").strip("[]").partition(",")[0]
    if inside.isdigit():
        return int(inside)
    return 1 if not inside else os.cpu_count() or 1

"""The Spark session of a command."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.pipelines.errors import PipelineError, SparkMissing, cause_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, repr=False)
class Connection:
    """The server, and the databases behind it, which Spark reads directly."""

    server: str
    token: str | None = None
    databases: tuple[str, ...] = ()

    def options(self) -> dict[str, str]:
        """For Spark's data source, which reads from the databases where they are known, else through the server."""
        if self.databases:
            return {"databaseUrls": ",".join(self.databases)}
        return {"server": self.server} | ({"token": self.token} if self.token else {})


_LEAST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')
_SECONDS: Final = 30.0
_HOW: Final = (
    "Pipelines run on Apache Spark, which needs Java 17 or newer. Install it, for example by\n"
    "  apt install openjdk-17-jre-headless      Debian, Ubuntu\n"
    "  dnf install java-17-openjdk-headless     Fedora, RHEL\n"
    "  brew install openjdk@17                  macOS\n"
    "or set JAVA_HOME to where it is. Everything else of Queen works without it."
)


def require_spark(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `SparkMissing`, which says what to install."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("PySpark is not installed: pip install '.[spark]' in a clone")
    java = find_java(environ)
    if java is None:
        raise SparkMissing(f"no Java was found.\n{_HOW}")
    version = _version(java)
    if version is not None and version < _LEAST:
        raise SparkMissing(f"{java} is Java {version}.\n{_HOW}")


def find_java(environ: Mapping[str, str]) -> str | None:
    """The Java that Spark would start."""
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        return str(java) if java.is_file() else None
    return shutil.which("java", path=environ.get("PATH", ""))


def _version(java: str) -> int | None:
    """None when it does not say: Spark will find out."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said.stderr + said.stdout)
    if found is None:
        return None
    return int(found[1])


LOCAL: Final = "local[*]"
_LOCAL_MEMORY: Final = "1g"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
LOCAL_CHECKPOINTS: Final = {
    # Spark's default starts a process (`readlink`) for each file of a checkpoint that it looks at. With this one, which
    # on a local disk renames atomically as well, a micro-batch takes less than half the time and CPU.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def open_session(name: str, master: str = LOCAL, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session on this machine, or on the cluster that `master` names. Raises `SparkMissing`, `PipelineError`."""
    require_spark()
    # Spark's workers run the interpreter of this process, not the `python3` of the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    # They print errors as JSON that are raised and reported anyway.
    for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(logger).disabled = True
    builder = SparkSession.builder.appName(f"queen {name}").master(master)
    for key, value in (settings_for(master) | dict(conf or {})).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise PipelineError(
            f"Spark did not start on {master}: {cause_of(error).rstrip('.')}. The output of Java is above; check"
            " --master, --conf and JAVA_HOME"
        ) from error


def settings_for(master: str) -> dict[str, str]:
    """Settings of Spark, which those of the user override."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
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
        **LOCAL_CHECKPOINTS,
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

"""A Spark cluster on this machine, from the files that PySpark brings: a master and its workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

START_WITHIN_SECONDS = 100
_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


@contextmanager
def cluster(directory: Path, workers: int) -> Iterator[str]:
    """Runs a cluster; gives the address of its master."""
    with ExitStack() as stack:
        master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = stack.enter_context(_running(master, directory / "master.log"))
        (address,) = _wait_for(r"Starting Spark master at (spark://\S+)", log, 1)
        for number in range(workers):
            size = ["--cores", "1", "--memory", "600m", "--work-dir", str(directory / f"worker{number}")]
            worker = ["org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", *size]
            stack.enter_context(_running([*worker, address], directory / f"worker{number}.log"))
        _wait_for(r"Registering worker (\S+)", log, workers)
        yield address


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[Path]:
    environment = os.environ | {
        "SPARK_HOME": str(_CLASS.parents[1]),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "192m",
        "PYSPARK_PYTHON": sys.executable,
        # Functions of tests are found by their names.
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.master.rest.enabled=false",
    }
    with log.open("wb") as output:
        process = subprocess.Popen([_CLASS, *command], env=environment, stdout=output, stderr=output)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(pattern: str, log: Path, count: int) -> list[str]:
    """What a pattern finds in a log, once it has found so much."""
    deadline = time.monotonic() + START_WITHIN_SECONDS
    while time.monotonic() < deadline:
        found = re.findall(pattern, log.read_text())
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"Spark did not start:\n{log.read_text()}")

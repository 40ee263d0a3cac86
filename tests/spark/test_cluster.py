"""The same on a cluster, and through Spark Connect: whatever Spark it is, the source has to reach it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.spark.cluster import cluster
from tests.spark.conftest import MASTER, needs_java
from tests.support.api import Api

HERE = Path(__file__).parent

CONNECT = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[1]").getOrCreate()
queue = spark.read.format("queen").option("queue", "orders").option("databaseUrls", sys.argv[1]).load()
print([row.payload for row in queue.where("offset >= 1").orderBy("offset").collect()])
spark.stop()
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_everything_is_read_on_a_cluster(tmp_path: Path) -> None:
    run_on_cluster(tmp_path, 2, "source")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_everything_is_written_on_a_cluster(tmp_path: Path) -> None:
    run_on_cluster(tmp_path, 2, "sink")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_pipelines_run_on_a_cluster(tmp_path: Path) -> None:
    run_on_cluster(
        tmp_path, 2, "../pipelines/test_steps.py", "../pipelines/test_jobs.py", "../pipelines/test_archive.py"
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_queue_is_read_through_spark_connect(api: Api, dsn: str) -> None:
    needs_java()
    await api.push("orders", 0, 1, 2)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CONNECT,
        dsn,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert output.decode().splitlines()[-1:] == ["['1', '2']"], errors.decode()


def run_on_cluster(directory: Path, workers: int, *tests: str) -> None:
    """Run tests of this package in a process whose Spark is a cluster."""
    needs_java()
    # Not below the directory of this test: paths of sockets must be short.
    with cluster(directory, workers) as master, tempfile.TemporaryDirectory(prefix="queen-") as short:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--timeout", "500", f"--basetemp={short}/pytest"]
            + [str(HERE / test) for test in tests],
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
            | {MASTER: master},
            cwd=HERE.parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr

"""spark-submit to a standalone cluster, with all that Queen needs sent along as an archive."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.spark.cluster import cluster
from tests.spark.conftest import needs_java
from tests.support.api import Api, payloads

ROOT = Path(__file__).parents[2]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_submitted_job_runs_in_the_environment_that_it_brings(api: Api, dsn: str, tmp_path: Path) -> None:
    needs_java()
    await api.push("orders", 0, 1, 2)
    archive = await asyncio.to_thread(packed, tmp_path)
    with cluster(tmp_path, 1) as master:
        done = await asyncio.to_thread(submit, master, archive, dsn)
    assert done.returncode == 0, done.stderr
    # The executors unpacked the archive, and used nothing of this clone.
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("READ BY"))
    assert all(part.startswith(str(tmp_path / "worker0")) for part in line.split()[2:]), line
    assert sorted(payloads(await api.pop("copy", batch=10))) == [0, 1, 2]


def packed(directory: Path) -> Path:
    """A virtual environment as docs/spark-cluster.md packs it."""
    environment, archive = directory / "queen-env", directory / "queen-env.tar.gz"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip: list[str | Path] = [
        environment / "bin" / "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    subprocess.run([*pip, f"{ROOT}[spark]", "venv-pack", "setuptools<81"], check=True)
    pack: list[str | Path] = [
        environment / "bin" / "venv-pack",
        "--quiet",
        "--prefix",
        environment,
        "--output",
        archive,
    ]
    subprocess.run([*pack, "--exclude", "*/pyspark/jars/*"], check=True)
    return archive


def submit(master: str, archive: Path, dsn: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [
        SUBMIT,
        "--master",
        master,
        "--archives",
        f"{archive}#queen-env",
        "--executor-memory",
        "512m",
    ]
    command += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"]
    return subprocess.run(
        [*command, Path(__file__).with_name("submitted.py"), dsn],
        env=os.environ
        | {
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYSPARK_PYTHON": "./queen-env/bin/python",
            "SPARK_HOME": str(SUBMIT.parents[1]),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

"""Spark of the oldest release that is supported, and of the newest there is, does the same as the one installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark
import pytest

from tests.spark.conftest import needs_java

ROOT = Path(__file__).parents[2]
TESTED = ("tests/spark", "tests/pipelines")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_everything_runs_on_the_oldest_and_on_the_newest_spark(which: str, tmp_path: Path) -> None:
    needs_java()
    found = re.search(r'"pyspark>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    wanted = f"pyspark=={found[1]}.*" if which == "oldest" else "pyspark"
    # Before the one of this environment, of which all else is used.
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "spark", wanted],
        check=True,
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "spark"), str(ROOT / "src")])
    ask = [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"]
    version = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if which == "newest" and version == pyspark.__version__:
        pytest.skip(f"the newest Spark is the installed one, {version}")
    # Not below the directory of this test: paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="queen-") as short:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--timeout", "600", f"--basetemp={short}/pytest", *TESTED],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"PySpark {version}:\n{done.stdout}{done.stderr}"

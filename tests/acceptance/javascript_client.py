"""The JavaScript client as it was published, in a directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.acceptance.scenario import TOKEN_VARIABLE

DIRECTORY = Path(__file__).with_name("js")


def run(url: str, names: list[str], token: str = "") -> dict[str, dict[str, Any]]:
    """Run scenarios; the result of each by its name."""
    command = ["node", "scenarios.js", url, *names]
    environment = os.environ | ({TOKEN_VARIABLE: token} if token else {})
    done = subprocess.run(command, cwd=DIRECTORY, capture_output=True, text=True, timeout=90, env=environment)
    reports = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = {report["id"]: report for report in map(json.loads, reports)}
    if set(results) != set(names):
        raise RuntimeError(f"node ended with {done.returncode} before all had run:\n{done.stdout}{done.stderr}")
    return results

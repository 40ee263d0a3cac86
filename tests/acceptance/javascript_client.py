"""The JavaScript client as it was published, in a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.acceptance.scenario import TOKEN_VARIABLE

_DIRECTORY = Path(__file__).with_name("js")


class Unavailable(Exception):
    """Why the client cannot be run here, though nothing is wrong with the server."""


def install() -> None:
    """Install the client where its scenarios are; raise Unavailable where that cannot be done."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not on the PATH")
    done = subprocess.run(["npm", "install", "--silent"], cwd=_DIRECTORY, capture_output=True, text=True)
    if done.returncode == 0:
        return
    shown = subprocess.run(
        ["npm", "view", "queen-mq@0.15.0", "version"], cwd=_DIRECTORY, capture_output=True, text=True
    )
    if "E404" in shown.stderr:
        raise Unavailable("the npm registry in use has no package queen-mq 0.15.0 (E404)")
    raise RuntimeError(f"npm install failed in {_DIRECTORY}:\n{done.stdout}{done.stderr}{shown.stderr}")


def run(url: str, names: list[str], token: str = "") -> dict[str, dict[str, Any]]:
    """Run scenarios; the result of each by its name."""
    command = ["node", "scenarios.js", url, *names]
    environment = os.environ | ({TOKEN_VARIABLE: token} if token else {})
    done = subprocess.run(command, cwd=_DIRECTORY, capture_output=True, text=True, timeout=90, env=environment)
    reports = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = {report["id"]: report for report in map(json.loads, reports)}
    if set(results) != set(names):
        raise RuntimeError(f"node ended with {done.returncode} before all had run:\n{done.stdout}{done.stderr}")
    return results

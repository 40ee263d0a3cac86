"""The tools that check what is in deploy/, and how tests run them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"


def tool(name: str) -> str:
    """The path of a program: of the virtual environment, else of the machine; the test is skipped where it is not."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str | Path, env: Mapping[str, str] | None = None, stdin: str | None = None) -> str:
    """What the command prints; the test fails with all that it said when it fails."""
    done = attempt(*command, env=env, stdin=stdin)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def attempt(
    *command: str | Path, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, input=stdin, timeout=100, check=False
    )


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C takes a tenth of the time, where PyYAML was built with it."""


def documents(text: str) -> list[dict[str, Any]]:
    """The documents of a YAML file that are not empty."""
    return [document for document in yaml.load_all(text, _LOADER) if document]

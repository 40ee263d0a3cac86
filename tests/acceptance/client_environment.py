"""A virtual environment that holds the client as it was published.

This project's package has the same distribution and import name, so the two cannot share an interpreter.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.file_lock import locked

PUBLISHED = "queen-mq==0.15.0"

_CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def client_python(directory: Path) -> Path:
    """The interpreter with the published client, installed into `directory` unless that was done before."""
    directory.mkdir(exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    environment = directory / "python"
    stamp = environment / ".complete"
    with locked(directory / "lock"):
        if not stamp.exists() or stamp.read_text() != _wanted():
            _install(environment)
            # Written last: an environment without it was interrupted, and is made anew.
            stamp.write_text(_wanted())
    return environment / "bin" / "python"


def clean_environ() -> dict[str, str]:
    """The environment without what would lead an interpreter to another's packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def _wanted() -> str:
    constraints = hashlib.sha256(_CONSTRAINTS.read_bytes()).hexdigest()
    return f"{sys.version}\n{PUBLISHED}\n{constraints}\n"


def _install(environment: Path) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", PUBLISHED, "--constraint", str(_CONSTRAINTS)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the published client cannot be installed: {' '.join(command)}\n{done.stdout}{done.stderr}")

"""The version before this one, to be run beside it."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT


def older_sources(directory: Path) -> Path:
    """The sources of the commit before the one that last changed the schema."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"the history of the repository is not here: {done.stderr.strip()}")
        return done.stdout.strip()

    changed = git(
        "log", "--max-count=1", "--no-merges", "--diff-filter=A", "--format=%H", "--", "src/*/migrations/*.sql"
    )
    if not changed:
        pytest.skip("the history of the repository does not reach back to the last migration")
    archive = directory / "older.tar"
    git("archive", f"--output={archive}", f"{changed}^", "src")
    with tarfile.open(archive) as packed:
        packed.extractall(directory / "older", filter="data")
    return directory / "older" / "src"

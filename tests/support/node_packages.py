"""What npm installs beside the JavaScript of tests."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.file_lock import locked

_INSTALL: Final = ("npm", "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error")
_MISSING: Final = ("E404", "ETARGET")
"""npm's codes for a package, or a version, that the registry does not have."""


def install_node_packages(directory: Path) -> None:
    """Install what the directory's package.json asks for, unless it is installed; skips the test where none can be."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on the PATH")
    modules = directory / "node_modules"
    modules.mkdir(exist_ok=True)
    stamp = modules / ".installed"
    # Two processes that install at once leave half of the files of each.
    with locked(modules / ".lock"):
        wanted = _fingerprint(directory)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        done = subprocess.run(_INSTALL, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            for code in _MISSING:
                if code in done.stderr:
                    pytest.skip(f"the npm registry in use lacks what {directory / 'package.json'} asks for ({code})")
            pytest.fail(f"npm install failed in {directory}:\n{done.stdout}{done.stderr}")
        # Written last: an installation without it was interrupted.
        stamp.write_text(wanted)


def _fingerprint(directory: Path) -> str:
    files = (directory / name for name in ("package.json", "package-lock.json"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files if file.exists())).hexdigest()

"""Virtual environments that hold clients as they were published.

This project's package has the same import name, so they cannot share an interpreter.
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
NEWEST = "queen-mq==2.6.0"

_CONSTRAINTS = Path(__file__).with_name("constraints.txt")
_NEWEST_CONSTRAINTS = Path(__file__).with_name("newest-constraints.txt")
_PIP = (sys.executable, "-m", "pip")


def client_python(directory: Path) -> Path:
    """The interpreter with the published client, installed into `directory` unless that was done before."""
    return installed(directory, (PUBLISHED,), _CONSTRAINTS)


def newest_client(directory: Path) -> Path:
    """The interpreter with the newest client and what its tests need."""
    packages = (NEWEST, "pytest", "pytest-asyncio", "pytest-xdist", "zstandard")
    return installed(directory, packages, _NEWEST_CONSTRAINTS)


def newest_tests(directory: Path) -> Path:
    """The directory of the newest client's own tests."""
    newest_client(directory)
    name, _, version = NEWEST.replace("-", "_").partition("==")
    source = directory / f"{name}-{version}"
    with locked(directory / "lock"):
        if not source.exists():
            # Only the source distribution has the tests.
            _run([*_PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(directory), NEWEST])
            shutil.unpack_archive(directory / f"{source.name}.tar.gz", directory / "unpacked", filter="data")
            (directory / "unpacked" / source.name).rename(source)
    return source / "tests"


def installed(directory: Path, packages: tuple[str, ...], constraints: Path) -> Path:
    """The interpreter of an environment with these packages, made unless that was done before."""
    directory.mkdir(exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    environment = directory / "python"
    stamp = environment / ".complete"
    wanted = f"{sys.version}\n{' '.join(packages)}\n{hashlib.sha256(constraints.read_bytes()).hexdigest()}\n"
    with locked(directory / "lock"):
        if not stamp.exists() or stamp.read_text() != wanted:
            _install(environment, packages, constraints)
            # Written last: an environment without it was interrupted, and is made anew.
            stamp.write_text(wanted)
    return environment / "bin" / "python"


def clean_environ() -> dict[str, str]:
    """The environment without what would lead an interpreter to another's packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def _install(environment: Path, packages: tuple[str, ...], constraints: Path) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    # A pip of its own would take longer to install than the packages.
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    _run([*_PIP, "--python", str(environment), "install", "--quiet", *packages, "--constraint", str(constraints)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a virtual environment cannot be made: {' '.join(command)}\n{done.stdout}{done.stderr}")

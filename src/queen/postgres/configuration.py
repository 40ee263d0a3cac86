"""The configuration of the embedded PostgreSQL: a queue on a small machine that loses nothing."""

import os
from collections.abc import Mapping
from pathlib import Path

from queen.postgres.binaries import wal_compression

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

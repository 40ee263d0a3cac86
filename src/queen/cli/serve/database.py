"""Prepares the database before workers start: waits for it and migrates it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg
import msgspec

from queen.errors import DatabaseUnavailable, QueenError
from queen.storage.migrate import load_migrations
from queen.storage.shard_setup import set_up_shards

_log = logging.getLogger("queen.supervisor")

Migrate = Callable[[str], Awaitable[None]]

# Among containers the database is often the last to start.
_WAIT_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class SchemaMark:
    """A file in the data directory that records that a database has been migrated to this version.

    With it, the server can start while the database is unavailable: pushes go to the spool.
    """

    def __init__(self, data_dir: Path, dsn: str) -> None:
        self._path = data_dir / "migrated.json"
        newest = max(migration.version for migration in load_migrations())
        self._content = msgspec.json.encode({"database": describe_dsn(dsn), "version": newest})

    def exists(self) -> bool:
        try:
            return self._path.read_bytes() == self._content
        except OSError:
            return False

    def write(self) -> None:
        if self.exists():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self._content)
        except OSError as error:
            _log.warning(
                "could not write %s, without which the server cannot start while PostgreSQL is unavailable: %s",
                self._path,
                error,
            )


async def prepare_database(
    dsn: str, migrate: Migrate, wait_seconds: float = _WAIT_SECONDS, mark: SchemaMark | None = None
) -> None:
    """Migrate the database; waits for an unavailable one, unless it has been migrated before."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            await migrate(dsn)
            if mark is not None:
                mark.write()
            return
        except DatabaseUnavailable as error:
            if mark is not None and mark.exists():
                _log.warning("PostgreSQL at %s is unavailable; starting without it: %s", describe_dsn(dsn), error)
                return
            if time.monotonic() >= deadline:
                raise QueenError(
                    f"no PostgreSQL at {describe_dsn(dsn)} ({error}): start it, or correct --database-url, "
                    "PG_HOST and PG_PORT, or DATABASE_URLS"
                ) from error
            _log.warning("waiting for PostgreSQL at %s: %s", describe_dsn(dsn), error)
            await asyncio.sleep(_RETRY_SECONDS)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise QueenError(f"PostgreSQL at {describe_dsn(dsn)} cannot be used: {error}") from error


async def prepare_shards(dsns: Sequence[str], migrate: Migrate, wait_seconds: float = _WAIT_SECONDS) -> None:
    """Migrate the databases of all shards. The first start waits for all, later ones for at least one."""
    deadline = time.monotonic() + wait_seconds
    while True:
        outcomes = await asyncio.gather(*(migrate(dsn) for dsn in dsns), return_exceptions=True)
        unavailable: list[tuple[int, DatabaseUnavailable]] = []
        for number, (dsn, outcome) in enumerate(zip(dsns, outcomes, strict=True)):
            if isinstance(outcome, DatabaseUnavailable):
                unavailable.append((number, outcome))
            elif isinstance(outcome, asyncpg.PostgresError | asyncpg.InterfaceError):
                raise QueenError(f"shard {number} at {describe_dsn(dsn)} cannot be used: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        try:
            if len(unavailable) < len(dsns):
                await set_up_shards(dsns)
                return
        except DatabaseUnavailable as error:
            unavailable = unavailable or [(0, error)]
        number, reason = unavailable[0]
        if time.monotonic() >= deadline:
            raise QueenError(
                f"no PostgreSQL at {describe_dsn(dsns[number])}, shard {number} ({reason}): "
                "start it, or correct DATABASE_URLS"
            ) from reason
        _log.warning("waiting for shard %d at %s: %s", number, describe_dsn(dsns[number]), reason)
        await asyncio.sleep(_RETRY_SECONDS)


def describe_dsn(dsn: str) -> str:
    """Host, port, database and user of a connection URL, without the password."""
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", ["localhost"]))
    user = unquote(parts.netloc.rpartition("@")[0].partition(":")[0])
    return f"{place}, database {unquote(parts.path.lstrip('/'))}" + (f", user {user}" if user else "")

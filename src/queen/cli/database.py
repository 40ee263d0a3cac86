"""Getting the database ready before any worker uses it."""

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

# In a group of containers the database is often the last to come up.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class SchemaMark:
    """A note in the data directory that a database was migrated to the version of this server.

    With it, the server may start while that database is away: pushes go to the spool until it is back.
    """

    def __init__(self, data_dir: Path, dsn: str) -> None:
        self._path = data_dir / "migrated.json"
        newest = max(migration.version for migration in load_migrations())
        self._content = msgspec.json.encode({"database": describe_dsn(dsn), "version": newest})

    def is_there(self) -> bool:
        try:
            return self._path.read_bytes() == self._content
        except OSError:
            return False

    def leave(self) -> None:
        if self.is_there():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self._content)
        except OSError as error:
            _log.warning("without %s the server cannot start while PostgreSQL is away: %s", self._path, error)


async def prepare_database(
    dsn: str, migrate: Migrate, patience: float = _PATIENCE_SECONDS, mark: SchemaMark | None = None
) -> None:
    """Migrate the database, waiting a while for one that cannot be reached yet and was not migrated before."""
    deadline = time.monotonic() + patience
    while True:
        try:
            await migrate(dsn)
            if mark is not None:
                mark.leave()
            return
        except DatabaseUnavailable as error:
            if mark is not None and mark.is_there():
                _log.warning("PostgreSQL at %s is away; starting without it: %s", describe_dsn(dsn), error)
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


async def prepare_shards(dsns: Sequence[str], migrate: Migrate, patience: float = _PATIENCE_SECONDS) -> None:
    """Migrate the databases of all shards. The first time all of them are waited for, later one is enough."""
    deadline = time.monotonic() + patience
    while True:
        outcomes = await asyncio.gather(*(migrate(dsn) for dsn in dsns), return_exceptions=True)
        away: list[tuple[int, DatabaseUnavailable]] = []
        for number, (dsn, outcome) in enumerate(zip(dsns, outcomes, strict=True)):
            if isinstance(outcome, DatabaseUnavailable):
                away.append((number, outcome))
            elif isinstance(outcome, asyncpg.PostgresError | asyncpg.InterfaceError):
                raise QueenError(f"shard {number} at {describe_dsn(dsn)} cannot be used: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        try:
            if len(away) < len(dsns):
                await set_up_shards(dsns)
                return
        except DatabaseUnavailable as error:
            away = away or [(0, error)]
        number, reason = away[0]
        if time.monotonic() >= deadline:
            raise QueenError(
                f"no PostgreSQL at {describe_dsn(dsns[number])}, which is shard {number} ({reason}): start it,"
                " or correct DATABASE_URLS"
            ) from reason
        _log.warning("waiting for shard %d at %s: %s", number, describe_dsn(dsns[number]), reason)
        await asyncio.sleep(_RETRY_SECONDS)


def describe_dsn(dsn: str) -> str:
    """Host, port, database and user of a connection URL, without the password."""
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", ["localhost"]))
    user = unquote(parts.netloc.rpartition("@")[0].partition(":")[0])
    return f"{place}, database {unquote(parts.path.lstrip('/'))}" + (f", user {user}" if user else "")

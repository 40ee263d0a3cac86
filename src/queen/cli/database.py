"""Getting the database ready before any worker uses it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from queen.errors import DatabaseAway, QueenError

_log = logging.getLogger("queen.supervisor")

Migrate = Callable[[str], Awaitable[None]]

# In a group of containers the database is often the last to come up.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0


async def prepare_database(dsn: str, migrate: Migrate, patience: float = _PATIENCE_SECONDS) -> None:
    """Migrate the database, waiting a while for one that cannot be reached yet."""
    deadline = time.monotonic() + patience
    while True:
        try:
            await migrate(dsn)
            return
        except DatabaseAway as error:
            if time.monotonic() >= deadline:
                raise QueenError(
                    f"no PostgreSQL at {describe_dsn(dsn)} ({error}): start it, or correct --database-url, "
                    "PG_HOST and PG_PORT, or DATABASE_URLS"
                ) from error
            _log.warning("waiting for PostgreSQL at %s: %s", describe_dsn(dsn), error)
            await asyncio.sleep(_RETRY_SECONDS)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise QueenError(f"PostgreSQL at {describe_dsn(dsn)} cannot be used: {error}") from error


def describe_dsn(dsn: str) -> str:
    """Host, port, database and user of a connection URL, without the password."""
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", ["localhost"]))
    user = unquote(parts.netloc.rpartition("@")[0].partition(":")[0])
    return f"{place}, database {unquote(parts.path.lstrip('/'))}" + (f", user {user}" if user else "")

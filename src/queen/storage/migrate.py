"""Brings the schema of a database up to date.

Migrations are forward-only files `migrations/NNNN_name.sql`, applied in order, each in its own transaction, by the
process that gets the advisory lock first. They only add, so an older server goes on working beside a newer one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import asyncpg

from queen.errors import DatabaseUnavailable, SchemaTooNew, UnsupportedPostgres
from queen.storage.database import UNAVAILABLE_ERRORS, AdvisoryLock, Connection, unavailable_reason
from queen.storage.statements import sql

log = logging.getLogger(__name__)

_OLDEST_POSTGRES = 15


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str


def load_migrations() -> list[Migration]:
    """The migrations that ship with the package, in order."""
    migrations = []
    for source in _sources():
        number, _, rest = source.name.partition("_")
        migrations.append(Migration(int(number), rest.removesuffix(".sql"), source.read_text("utf-8")))
    return sorted(migrations, key=lambda migration: migration.version)


@functools.cache
def migration_versions() -> frozenset[int]:
    """The versions alone, for which no file need be read."""
    return frozenset(int(source.name.partition("_")[0]) for source in _sources())


def _sources() -> list[Traversable]:
    return [one for one in files("queen.storage").joinpath("migrations").iterdir() if one.name.endswith(".sql")]


async def migrate(dsn: str, *, wait_seconds: float = 10.0) -> None:
    """Apply what is missing. Safe to call from many servers at once, and while older servers run."""
    connection = await _connect(dsn, wait_seconds)
    try:
        _check_postgres(connection)
        await connection.execute(sql("migration_lock"), AdvisoryLock.MIGRATION)
        await _apply_missing(connection, load_migrations())
        await connection.close()
    except UNAVAILABLE_ERRORS as error:
        raise DatabaseUnavailable(f"PostgreSQL failed while it was migrated: {unavailable_reason(error)}") from error
    finally:
        # The lock ends with the session; a connection that was lost cannot be closed in order.
        connection.terminate()


async def _connect(dsn: str, wait_seconds: float) -> Connection:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return await asyncpg.connect(dsn, timeout=5)
        except UNAVAILABLE_ERRORS as error:
            if time.monotonic() > deadline:
                raise DatabaseUnavailable(f"cannot connect to PostgreSQL: {unavailable_reason(error)}") from error
            await asyncio.sleep(0.2)


def _check_postgres(connection: Connection) -> None:
    major = connection.get_server_version().major
    if major < _OLDEST_POSTGRES:
        raise UnsupportedPostgres(f"this is PostgreSQL {major}; Queen needs version {_OLDEST_POSTGRES} or newer")


async def _apply_missing(connection: Connection, migrations: list[Migration]) -> None:
    await connection.execute(sql("migration_create_schema"))
    await connection.execute(sql("migration_create_table"))
    applied = {row["version"] for row in await connection.fetch(sql("migration_versions"))}
    newest_known = max((migration.version for migration in migrations), default=0)
    newest_applied = max(applied, default=0)
    if newest_applied > newest_known:
        raise SchemaTooNew(
            f"the database has schema version {newest_applied}, this server knows versions up to {newest_known}:"
            " install the newer Queen, or point it at another database"
        )
    for migration in migrations:
        if migration.version in applied:
            continue
        async with connection.transaction():
            await connection.execute(migration.sql)
            await connection.execute(sql("migration_applied"), migration.version, migration.name)
        log.info("applied migration %04d %s", migration.version, migration.name)

"""Databases for tests: migrated, empty, and used again, because a new one costs more than most tests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psycopg

from queen.embedded import EmbeddedPostgres
from queen.storage.migrate import migrate

TEMPLATE = "queen_template"
_CLEAN = Path(__file__).with_name("clean.sql").read_text()
_idle: list[str] = []
"""Names of databases that are as the template is."""
_cleaners: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}
"""A session in each database that has been used, kept because a new one would have everything to plan again."""


async def make_template(postgres: EmbeddedPostgres) -> None:
    """The database that the others are copies of."""
    _idle.clear()
    _cleaners.clear()
    admin = await asyncpg.connect(postgres.dsn())
    await admin.execute(f"CREATE DATABASE {TEMPLATE}")
    await admin.close()
    await migrate(postgres.dsn(TEMPLATE))
    connection = await asyncpg.connect(postgres.dsn(TEMPLATE))
    await connection.execute(_CLEAN)
    await connection.execute("SELECT cleaning.remember()")
    await connection.close()


async def create_database(postgres: EmbeddedPostgres, template: str = TEMPLATE) -> str:
    """The name of a new copy of a template; template1 is an empty one."""
    name = f"test_{uuid.uuid4().hex}"
    admin = await asyncpg.connect(postgres.dsn())
    try:
        # Copying files, PostgreSQL need not write each page to its log.
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    finally:
        await admin.close()
    return name


def as_target(dsn: str, **changes: Any) -> dict[str, Any]:
    """A database as the routes for migrations take it."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    host, port = query["host"][0], query["port"][0]
    return {"host": host, "port": port, "database": parts.path[1:], "user": str(parts.username)} | changes


@asynccontextmanager
async def fresh_database(postgres: EmbeddedPostgres, *, used: bool = True) -> AsyncIterator[str]:
    """A migrated, empty database that nobody else uses; with `used` it may be one that a test has had before."""
    name = _idle.pop() if _idle and used else await create_database(postgres)
    dsn = postgres.dsn(name)
    yield dsn
    if used and _is_cleaned(name, dsn):
        _idle.append(name)
    else:
        _cleaners.pop(name, None)
        admin = await asyncpg.connect(postgres.dsn())
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


def _is_cleaned(name: str, dsn: str) -> bool:
    """Take out what a test left; false when it changed more than rows."""
    try:
        # A new session would take longer to plan the cleaning than to clean.
        if name not in _cleaners or _cleaners[name].closed:
            _cleaners[name] = psycopg.connect(dsn, autocommit=True)
        row = _cleaners[name].execute("SELECT cleaning.clean()").fetchone()
    except psycopg.Error:
        return False
    return row is not None and bool(row[0])

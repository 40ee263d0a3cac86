"""The databases behind a server, for commands that work beside it: as its settings say, or as options do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queen.cli.common.exits import UserError

if TYPE_CHECKING:
    from queen.settings import Settings

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database, as a URL. [DATABASE_URLS, PG_HOST, ...]")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The data directory of the server. [QUEEN_DATA_DIR]")]


@dataclass(frozen=True, slots=True)
class Databases:
    """Connection URLs of the shards in order, and the settings of the server they belong to."""

    dsns: tuple[str, ...]
    settings: Settings


def server_settings(database_url: str | None, data_dir: Path | None) -> Settings:
    """The settings of this environment, with options in place of variables."""
    from queen.settings import Settings

    return Settings.from_env(os.environ, database_urls=database_url, queen_data_dir=data_dir)


@contextlib.contextmanager
def open_databases(database_url: str | None, data_dir: Path | None, *, create: bool = False) -> Iterator[Databases]:
    """The databases of a server, whether it runs or not; an embedded one that is stopped runs for as long as this.

    With `create`, an embedded one is made where there is none.
    """
    settings = server_settings(database_url, data_dir)
    if settings.database_dsns:
        yield Databases(settings.database_dsns, settings)
        return
    from queen.embedded import EmbeddedPostgres
    from queen.embedded.postmaster import find_postmaster

    place = settings.queen_data_dir / "postgres"
    running = find_postmaster(place / "cluster")
    if running is not None:
        yield Databases((running.dsn("postgres"),), settings)
        return
    if not create and not (place / "cluster").exists():
        raise UserError(
            f"no database is configured, and there is no embedded one in {place}; pass --database-url or --data-dir"
        )
    with EmbeddedPostgres(place) as server:
        yield Databases((server.dsn(),), settings)


def running_database() -> str:
    """The embedded database of a server that runs on this machine; empty where there is none."""
    from queen.embedded.postmaster import find_postmaster

    found = find_postmaster(server_settings(None, None).queen_data_dir / "postgres" / "cluster")
    return found.dsn("postgres") if found is not None else ""


async def connected(dsn: str, **options: Any) -> Any:
    """A connection, or a `UserError` that names the database."""
    import asyncpg

    from queen.cli.serve.database import describe_dsn
    from queen.storage.database import unavailable_reason

    try:
        return await asyncpg.connect(dsn, timeout=10, **options)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        raise UserError(
            f"PostgreSQL at {describe_dsn(dsn)} cannot be used: {unavailable_reason(error)}; "
            "check the URL and that it runs"
        ) from error

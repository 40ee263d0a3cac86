"""Is PostgreSQL there, and does it have the schema this server needs? However many ask, one looks at a time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import asyncpg

from queen.errors import DatabaseAway, QueenError
from queen.storage.database import Database, Record
from queen.storage.migrate import load_migrations

_FRESH_SECONDS = 1.0
_PATIENCE_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """What a look at PostgreSQL found; `trouble` is empty when it can be used."""

    connected: bool
    trouble: str = ""

    @property
    def usable(self) -> bool:
        return not self.trouble


class DatabaseProbe:
    """Looks at PostgreSQL for everyone who asks: one look at a time, never longer than `patience`."""

    def __init__(
        self, database: Database, *, fresh_for: float = _FRESH_SECONDS, patience: float = _PATIENCE_SECONDS
    ) -> None:
        # A connection of its own: to wait for one of the pool says nothing about the database.
        self._link = database.link(probing=True)
        self._needed = frozenset(migration.version for migration in load_migrations())
        self._fresh_for = fresh_for
        self._patience = patience
        self._state = DatabaseState(connected=False, trouble="PostgreSQL has not been asked yet")
        self._stale_at = 0.0
        self._looking: asyncio.Task[DatabaseState] | None = None

    async def recent(self) -> DatabaseState:
        """What was found within the last second; else what a new look finds."""
        if asyncio.get_running_loop().time() < self._stale_at:
            return self._state
        return await self.now()

    async def now(self) -> DatabaseState:
        """What a look finds that is under way, or begins now."""
        loop = asyncio.get_running_loop()
        if self._looking is None:
            self._looking = loop.create_task(self._look())
        # The look goes on for the others when one who asked goes away.
        return await asyncio.shield(self._looking)

    async def stop(self) -> None:
        """Give up a look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self) -> DatabaseState:
        try:
            self._state = await self._ask()
            self._stale_at = asyncio.get_running_loop().time() + self._fresh_for
            return self._state
        finally:
            self._looking = None

    async def _ask(self) -> DatabaseState:
        try:
            async with asyncio.timeout(self._patience):
                rows = await self._applied()
        except TimeoutError:
            return DatabaseState(connected=False, trouble=f"PostgreSQL did not answer within {self._patience:g} s")
        except QueenError as error:
            return DatabaseState(connected=False, trouble=str(error))
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            return DatabaseState(connected=True, trouble="the database has not been migrated")
        except asyncpg.PostgresError as error:
            return DatabaseState(connected=False, trouble=f"PostgreSQL refuses: {error}")
        missing = self._needed - {row["version"] for row in rows}
        if missing:
            versions = ", ".join(map(str, sorted(missing)))
            return DatabaseState(connected=True, trouble=f"the database lacks migration {versions}")
        return DatabaseState(connected=True)

    async def _applied(self) -> list[Record]:
        try:
            return await self._link.fetch("applied_migrations")
        except DatabaseAway:
            # A connection that was cut while nobody used it says nothing about PostgreSQL; a new one does.
            return await self._link.fetch("applied_migrations")

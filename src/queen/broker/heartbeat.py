"""Maintenance: pushes go to the spool, pops are answered empty."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import asyncpg

from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, QueenError
from queen.storage.database import AWAY_ERRORS, HEARTBEAT_SESSION, Connection, Database, Record
from queen.storage.migrate import load_migrations


class Mode(StrEnum):
    """Something that can be switched on for all workers of all hosts."""

    PUSH_MAINTENANCE = "maintenance_mode"
    """Pushes go to the spool, and stay there until it is switched off."""
    POP_MAINTENANCE = "pop_maintenance_mode"
    """Pops are answered empty at once."""


class MaintenanceModes:
    """The modes as this worker knows them. `known` is false until they were read once."""

    def __init__(self) -> None:
        self.known = False
        self.push_maintenance = False
        self.pop_maintenance = False

    def learn(self, on: set[str]) -> bool:
        """These are on, and no others; returns whether that is news."""
        push, pop = Mode.PUSH_MAINTENANCE in on, Mode.POP_MAINTENANCE in on
        news = (push, pop) != (self.push_maintenance, self.pop_maintenance)
        self.known, self.push_maintenance, self.pop_maintenance = True, push, pop
        return news


log = logging.getLogger(__name__)

_LOST: tuple[type[BaseException], ...] = (DatabaseUnavailable, *AWAY_ERRORS)
_BEAT_SECONDS = 0.4
_SEARCH_SECONDS = 0.2


class DatabaseHeartbeat:
    """Asks every worker's PostgreSQL for the modes, several times a second, on a connection of its own."""

    def __init__(
        self,
        database: Database,
        modes: MaintenanceModes,
        *,
        grace: float,
        on_down: Callable[[], None],
        on_modes: Callable[[], None],
    ) -> None:
        """A PostgreSQL that answers nobody for `patience` seconds is away. Told when it is, and when modes change."""
        self._database = database
        self._modes = modes
        self._grace = grace
        self._on_down = on_down
        self._on_modes = on_modes
        self._connection: Connection | None = None
        self._nudged = asyncio.Event()
        self._background = BackgroundTask()

    async def start(self) -> None:
        """Look once, so that the modes are known when the first request comes, then go on looking."""
        await self._look()
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()
        self._drop()

    def nudge(self) -> None:
        """A mode was changed by somebody: look now."""
        self._nudged.set()

    async def switch(self, mode: Mode, enabled: bool) -> None:
        """Switch a mode on or off, for good and for everybody. This worker knows it when this returns."""
        await self._database.fetch("set_system_mode", mode.value, enabled)
        self._learn(await self._database.fetch("system_modes"))

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_SEARCH_SECONDS if self._database.presence.away else _BEAT_SECONDS):
                    await self._nudged.wait()
            except TimeoutError:
                pass
            # Before the look: whoever nudges during it may have changed what was read already.
            self._nudged.clear()
            try:
                await self._look()
            except Exception:
                # Whatever it was, somebody has to go on watching.
                log.exception("looking after PostgreSQL failed")

    async def _look(self) -> None:
        presence = self._database.presence
        answers = presence.answers
        alive = await self._beats()
        if not alive and presence.answers == answers:
            if not presence.away:
                log.error("PostgreSQL is away: pushes go to the spool, everything else is answered 503")
                self._database.mark_down()
                self._on_down()
        elif presence.away:
            log.warning("PostgreSQL is back")
            self._database.mark_up()

    async def _beats(self) -> bool:
        """Whether PostgreSQL answers in time. A connection that was cut says little: another is made at once."""
        try:
            async with asyncio.timeout(self._grace):
                return await self._ask() or await self._ask()
        except TimeoutError:
            self._drop()
            return False

    async def _ask(self) -> bool:
        try:
            if self._connection is None:
                self._connection = await self._database.connect(application_name=HEARTBEAT_SESSION)
            self._learn(await self._connection.fetch(self._database.statements["system_modes"]))
        except _LOST:
            self._drop()
            return False
        except asyncpg.PostgresError as error:
            # It answers, if not what was asked for.
            log.warning("the maintenance modes cannot be read: %s", error)
        return True

    def _learn(self, rows: list[asyncpg.Record]) -> None:
        if self._modes.learn({row["key"] for row in rows if row["enabled"]}):
            self._on_modes()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


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
        except DatabaseUnavailable:
            # A connection that was cut while nobody used it says nothing about PostgreSQL; a new one does.
            return await self._link.fetch("applied_migrations")

"""The heartbeat of PostgreSQL: whether it is available, and which maintenance modes are on."""

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
from queen.storage.database import (
    HEARTBEAT_SESSION,
    UNAVAILABLE_ERRORS,
    Connection,
    Database,
    Record,
    unavailable_reason,
)
from queen.storage.migrate import migration_versions


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
        """Set which are on; returns whether that is a change."""
        push, pop = Mode.PUSH_MAINTENANCE in on, Mode.POP_MAINTENANCE in on
        changed = (push, pop) != (self.push_maintenance, self.pop_maintenance)
        self.known, self.push_maintenance, self.pop_maintenance = True, push, pop
        return changed


log = logging.getLogger(__name__)

_LOST: tuple[type[BaseException], ...] = (DatabaseUnavailable, *UNAVAILABLE_ERRORS)
_BEAT_SECONDS = 0.4
_RECONNECT_SECONDS = 0.2
_STEPS = 10


class DatabaseHeartbeat:
    """Reads the modes several times a second, on a connection of its own: that PostgreSQL answers is the heartbeat."""

    def __init__(
        self,
        database: Database,
        modes: MaintenanceModes,
        *,
        grace: float,
        on_down: Callable[[], None],
        on_modes: Callable[[], None],
    ) -> None:
        """A PostgreSQL that answers nothing for `grace` seconds is marked down, and `on_down` is called."""
        self._database = database
        self._modes = modes
        self._grace = grace
        self._on_down = on_down
        self._on_modes = on_modes
        self._connection: Connection | None = None
        self._reason = ""
        self._switches = 0
        self._nudged = asyncio.Event()
        self._background = BackgroundTask()

    async def start(self) -> None:
        """Beat once, so that the modes are known when the first request comes, then go on."""
        await self._beat()
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()
        self._drop()

    def trigger(self) -> None:
        """A mode was changed: beat now."""
        self._nudged.set()

    async def switch(self, mode: Mode, enabled: bool) -> None:
        """Switch a mode on or off, for every worker. This one has it when this returns."""
        await self._database.fetch("set_system_mode", mode.value, enabled)
        rows = await self._database.fetch("system_modes")
        self._switches += 1
        self._learn(rows)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_RECONNECT_SECONDS if self._database.availability.down else _BEAT_SECONDS):
                    await self._nudged.wait()
            except TimeoutError:
                pass
            # Before the beat: a trigger during it may be about what was read already.
            self._nudged.clear()
            try:
                await self._beat()
            except Exception:
                # Whatever it was, the heart has to go on beating.
                log.exception("heartbeat of PostgreSQL failed")

    async def _beat(self) -> None:
        availability = self._database.availability
        answers = availability.answers
        alive = await self._is_answered()
        if not alive and availability.answers == answers:
            if not availability.down:
                log.error(
                    "PostgreSQL is unavailable (%s): pushes go to the spool, other requests are answered 503",
                    self._reason,
                )
                self._database.mark_down(self._reason)
                self._on_down()
        elif availability.down:
            log.warning("PostgreSQL is available again")
            self._database.mark_up()

    async def _is_answered(self) -> bool:
        """Whether PostgreSQL answers in time. A connection that was cut says little: another is opened at once."""
        asking = asyncio.ensure_future(self._ask_twice())
        try:
            # In several steps: if the event loop is late, what PostgreSQL has answered meanwhile is read in the next.
            for _ in range(_STEPS):
                if (await asyncio.wait({asking}, timeout=self._grace / _STEPS))[0]:
                    return asking.result()
            self._reason = f"no answer within {self._grace:g} s"
            self._drop()
            return False
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_twice(self) -> bool:
        return await self._ask() or await self._ask()

    async def _ask(self) -> bool:
        try:
            if self._connection is None:
                self._connection = await self._database.connect(application_name=HEARTBEAT_SESSION)
            switches = self._switches
            rows = await self._connection.fetch(self._database.statements["system_modes"])
            # Read while a mode was switched, they may be those from before it.
            if switches == self._switches:
                self._learn(rows)
        except _LOST as error:
            self._reason = unavailable_reason(error)
            self._drop()
            return False
        except asyncpg.PostgresError as error:
            # PostgreSQL answers, even if with an error.
            log.warning("maintenance modes could not be read: %s", error)
        return True

    def _learn(self, rows: list[asyncpg.Record]) -> None:
        if self._modes.learn({row["key"] for row in rows if row["enabled"]}):
            self._on_modes()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


_FRESH_SECONDS = 1.0
_PROBE_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The result of a probe; `problem` is empty when PostgreSQL can be used."""

    connected: bool
    problem: str = ""

    @property
    def usable(self) -> bool:
        return not self.problem


class DatabaseProbe:
    """Probes PostgreSQL for all callers: one probe at a time, which does not take long."""

    def __init__(self, database: Database) -> None:
        # A connection of its own: to wait for one of the pool says nothing about the database.
        self._link = database.link(probing=True)
        self._needed = migration_versions()
        self._state = DatabaseState(connected=False, problem="PostgreSQL has not been probed yet")
        self._stale_at = 0.0
        self._probing: asyncio.Task[DatabaseState] | None = None

    async def recent(self) -> DatabaseState:
        """The result of the last second, else of a new probe."""
        if asyncio.get_running_loop().time() < self._stale_at:
            return self._state
        return await self.now()

    async def now(self) -> DatabaseState:
        """The result of a probe that is under way, or begins now."""
        loop = asyncio.get_running_loop()
        if self._probing is None:
            self._probing = loop.create_task(self._probe())
        # A caller that is cancelled must not cancel the probe for the others.
        return await asyncio.shield(self._probing)

    async def stop(self) -> None:
        """Cancel a probe that is under way."""
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing

    async def _probe(self) -> DatabaseState:
        try:
            self._state = await self._ask()
            self._stale_at = asyncio.get_running_loop().time() + _FRESH_SECONDS
            return self._state
        finally:
            self._probing = None

    async def _ask(self) -> DatabaseState:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                rows = await self._applied()
        except TimeoutError:
            return DatabaseState(connected=False, problem=f"PostgreSQL did not answer within {_PROBE_SECONDS:g} s")
        except QueenError as error:
            return DatabaseState(connected=False, problem=str(error))
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            return DatabaseState(connected=True, problem="the database has not been migrated")
        except asyncpg.PostgresError as error:
            return DatabaseState(connected=False, problem=f"PostgreSQL refuses: {error}")
        missing = self._needed - {row["version"] for row in rows}
        if missing:
            versions = ", ".join(map(str, sorted(missing)))
            return DatabaseState(connected=True, problem=f"the database lacks migration {versions}")
        return DatabaseState(connected=True)

    async def _applied(self) -> list[Record]:
        try:
            return await self._link.fetch("applied_migrations")
        except DatabaseUnavailable:
            # A connection that was cut while idle says nothing about PostgreSQL; a new one does.
            return await self._link.fetch("applied_migrations")

"""The heartbeat of PostgreSQL: is it there, and which maintenance modes are on?

A database that refuses is noticed by whoever uses it. One that says nothing at all, because it or the network is
frozen, is noticed here: then every statement that waits is given up, so that no request waits longer than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import asyncpg

from queen.background import Background
from queen.broker.modes import Mode, Modes
from queen.errors import DatabaseAway
from queen.storage.database import AWAY_ERRORS, Connection, Database

log = logging.getLogger(__name__)

_LOST: tuple[type[BaseException], ...] = (DatabaseAway, *AWAY_ERRORS)
APPLICATION_NAME = "queen watch"
_BEAT_SECONDS = 0.4
_SEARCH_SECONDS = 0.2


class Watch:
    """Asks every worker's PostgreSQL for the modes, several times a second, on a connection of its own."""

    def __init__(
        self,
        database: Database,
        modes: Modes,
        *,
        patience: float,
        on_lost: Callable[[], None],
        on_modes: Callable[[], None],
    ) -> None:
        """A PostgreSQL that answers nobody for `patience` seconds is away. Told when it is, and when modes change."""
        self._database = database
        self._modes = modes
        self._patience = patience
        self._on_lost = on_lost
        self._on_modes = on_modes
        self._connection: Connection | None = None
        self._nudged = asyncio.Event()
        self._background = Background()

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
                self._database.lose()
                self._on_lost()
        elif presence.away:
            log.warning("PostgreSQL is back")
            self._database.find()

    async def _beats(self) -> bool:
        """Whether PostgreSQL answers in time. A connection that was cut says little: another is made at once."""
        try:
            async with asyncio.timeout(self._patience):
                return await self._ask() or await self._ask()
        except TimeoutError:
            self._drop()
            return False

    async def _ask(self) -> bool:
        try:
            if self._connection is None:
                self._connection = await self._database.connect(application_name=APPLICATION_NAME)
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

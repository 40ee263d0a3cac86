"""Leader election: the session that holds an advisory lock runs what only one worker of all hosts may run."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from queen.errors import DatabaseUnavailable, QueenError
from queen.storage.database import (
    UNAVAILABLE_ERRORS,
    AdvisoryLock,
    Connection,
    Database,
    Record,
    unavailable_reason,
)

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_LONGEST_STEP_SECONDS = 60.0
_CLOSE_SECONDS = 2.0
_PING_SECONDS = 1.0
_SILENT_SECONDS = 4.0
_POLLS_PER_CHECK = 2
# PostgreSQL notices within seconds that the host of a session is gone, and frees its lock.
_KEEPALIVE = {
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": str(int(_SILENT_SECONDS * 1000)),
}


class Session:
    """One connection that holds the lock, whose users share it a statement at a time.

    The work is done on the very connection that holds the lock: a worker that has lost it cannot go on by mistake.
    """

    def __init__(self, database: Database, connection: Connection) -> None:
        self._statements = database.statements
        self._connection = connection
        self._free = asyncio.Lock()
        self.lost = asyncio.Event()
        connection.add_termination_listener(self._terminated)

    @classmethod
    async def open(cls, database: Database) -> Session:
        return cls(database, await database.connect(**_KEEPALIVE))

    async def fetch(self, name: str, *args: Any, seconds: float = _LONGEST_STEP_SECONDS) -> list[Record]:
        """Run a named statement. Raises `DatabaseUnavailable` when the connection is lost, and with it the lock."""
        async with self._free:
            try:
                return await self._connection.fetch(self._statements[name], *args, timeout=seconds)
            except UNAVAILABLE_ERRORS as error:
                raise self._lose(error) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """What is fetched inside belongs to one transaction; for a session with one user."""
        try:
            async with self._connection.transaction():
                yield
        except UNAVAILABLE_ERRORS as error:
            raise self._lose(error) from error

    async def listen(self, channel: str, on_notify: Callable[[], None]) -> None:
        """Call back for each notification on a channel."""
        try:
            await self._connection.add_listener(channel, lambda *_: on_notify())
        except UNAVAILABLE_ERRORS as error:
            raise self._lose(error) from error

    async def keep_alive(self) -> None:
        """Ping until the session is lost: other workers terminate a session that holds the lock and is idle."""
        while True:
            await self.fetch("ping", seconds=_SILENT_SECONDS)
            await asyncio.sleep(_PING_SECONDS)

    async def close(self) -> None:
        self._connection.remove_termination_listener(self._terminated)
        if self.lost.is_set():
            self._connection.terminate()
            return
        self.lost.set()
        try:
            await self._connection.close(timeout=_CLOSE_SECONDS)
        except UNAVAILABLE_ERRORS:
            self._connection.terminate()

    def abort(self) -> None:
        """Terminate the connection without waiting."""
        self._connection.terminate()

    def _lose(self, error: BaseException) -> DatabaseUnavailable:
        """Note that the session is lost, and with it the lock; what its user is to raise."""
        self.lost.set()
        return DatabaseUnavailable(f"PostgreSQL is unavailable ({unavailable_reason(error)})")

    def _terminated(self, connection: object) -> None:
        self.lost.set()


class Election:
    """Elects a leader: acquires a lock that one process of all hosts holds at a time."""

    def __init__(self, database: Database, lock: AdvisoryLock) -> None:
        self._database = database
        self._lock = lock

    async def win(self) -> Session:
        """Wait until this process is elected; returns the session that holds the lock."""
        attempts = 0
        while True:
            attempts += 1
            session = await self._stand(check=attempts % _POLLS_PER_CHECK == 0)
            if session is not None:
                return session
            # Out of step with the others, so that they do not ask all at once.
            await asyncio.sleep(_POLL_SECONDS * random.uniform(0.75, 1.25))

    async def _stand(self, *, check: bool) -> Session | None:
        """Asking costs no connection of its own: one is opened when the lock seems to be free."""
        try:
            (row,) = await self._database.fetch("janitor_vacant", self._lock)
            if not row["vacant"]:
                if check:
                    await self._end_silent_holder()
                return None
            return await self._take(await Session.open(self._database))
        except (QueenError, asyncpg.PostgresError) as error:
            # Also when PostgreSQL is only overloaded: an election that ended here would never be held again.
            log.debug("lock %s could not be requested: %s", self._lock.name, error)
            return None

    async def _end_silent_holder(self) -> None:
        """A process that was paused, or whose connection goes nowhere, would keep the lock forever."""
        if await self._database.fetch("end_silent_janitor", self._lock, _SILENT_SECONDS):
            log.warning("session that held lock %s was idle for too long; terminated", self._lock.name)

    async def _take(self, session: Session) -> Session | None:
        try:
            (row,) = await session.fetch("janitor_take", self._lock)
        except BaseException:
            session.abort()
            raise
        if row["taken"]:
            return session
        await session.close()
        return None


@dataclass(frozen=True, slots=True)
class Job:
    """Work that is due every `interval` seconds, and at once when the runner is nudged if it is `prompt`.

    `run` does a bounded piece in short statements, and says whether more is waiting.
    """

    name: str
    interval: float
    run: Callable[[Session], Awaitable[bool]]
    prompt: bool = False

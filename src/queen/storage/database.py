"""Connections to one PostgreSQL shard: links for batched statements, a pool for everything else."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import asyncpg
from asyncpg import prepared_stmt

from queen.errors import DatabaseDown, DatabaseUnavailable, Overloaded, QueenError
from queen.storage.statements import load_statements

log = logging.getLogger(__name__)


Record: TypeAlias = asyncpg.Record
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
PooledConnection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"

# A page does not have the checksum that it was written with: nothing of it can be served.
DAMAGE_ERRORS: tuple[type[BaseException], ...] = (asyncpg.DataCorruptedError, asyncpg.IndexCorruptedError)
# Errors that say nothing about the statement: the server is unavailable, or shuts down.
UNAVAILABLE_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.InternalClientError,
    # No room on its disk, in its memory or among its connections; or it takes no writes at all.
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.PostgresIOError,
    *DAMAGE_ERRORS,
)
# PostgreSQL is available, but another session holds what the statement needs; nothing was done.
BUSY_ERRORS: tuple[type[BaseException], ...] = (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError)
# Two sessions waited for each other, and PostgreSQL rolled this one back so that the other can go on.
CONFLICT_ERRORS: tuple[type[BaseException], ...] = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)

_ERRNO = re.compile(r"\[Errno (-?\d+)\]")

_POOL_SECONDS = 5.0
"""How long a connection of the pool is waited for, beside the time to open one."""
HEARTBEAT_SESSION = "queen watch"
"""The application_name of the connection on which a worker asks whether PostgreSQL is available; it has always one."""


class Availability:
    """Whether PostgreSQL is available, and how often it has answered."""

    __slots__ = ("answers", "down", "reason")

    def __init__(self) -> None:
        self.down = False
        self.reason = ""
        self.answers = 0

    def check(self) -> None:
        """Raises `DatabaseDown` at once instead of `DatabaseUnavailable` after a timeout."""
        if self.down:
            raise self.error()

    def error(self) -> DatabaseDown:
        return DatabaseDown(_unavailable(self.reason))


class TransactionConflict(Exception):
    """Another session changed what the transaction had read; the next attempt sees the change."""


class TransactionAborted(Overloaded, TransactionConflict):
    """PostgreSQL chose this transaction to resolve a deadlock; nothing of it was stored."""


class Fetcher(Protocol):
    """Runs named statements: a link, a transaction, a database."""

    async def fetch(self, name: str, *args: Any) -> list[Record]: ...


class Link:
    """One connection for one user at a time, with its statements prepared; it reconnects when used again."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        statements: Mapping[str, str],
        timeout: float,
        availability: Availability,
        on_error: Callable[[], None],
    ) -> None:
        """`timeout` is for a server that says nothing at all: longer than it may take to run a statement."""
        self._connect = connect
        self._statements = statements
        self._timeout = timeout
        self._availability = availability
        self._on_error = on_error
        self._connection: Connection | None = None
        self._in_transaction = False
        self._prepared: dict[str, prepared_stmt.PreparedStatement[Record]] = {}

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        """Run a named statement. Raises `DatabaseUnavailable` when the connection fails: its outcome is unknown."""
        try:
            return await self._fetch(name, args)
        except TransactionAborted:
            if self._in_transaction:
                raise
            return await retry_transaction(lambda: self._fetch(name, args))

    async def _fetch(self, name: str, args: Sequence[Any]) -> list[Record]:
        try:
            connection = self._connection
            if connection is None or connection.is_closed():
                connection = await self._open()
            statement = self._prepared.get(name)
            if statement is None:
                statement = await self._prepare(connection, name)
            rows = await statement.fetch(*args, timeout=self._timeout)
            self._availability.answers += 1
            return rows
        except asyncio.CancelledError:
            # The statement may still be running on the connection: it cannot be used again.
            self.drop()
            raise
        except (*UNAVAILABLE_ERRORS, *BUSY_ERRORS) as error:
            self._on_error()
            raise self._failed(error) from error
        except CONFLICT_ERRORS as error:
            raise _translate(error) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Statements fetched inside belong to one transaction, rolled back when the block raises.

        When its connection is lost they fail, rather than running on another one outside of the transaction.
        """
        try:
            connection = self._connection
            if connection is None or connection.is_closed():
                connection = await self._open()
            transaction = connection.transaction()
            await transaction.start()
        except asyncio.CancelledError:
            self.drop()
            raise
        except (*UNAVAILABLE_ERRORS, *BUSY_ERRORS) as error:
            raise self._failed(error) from error
        outer, self._in_transaction = self._in_transaction, True
        try:
            yield
            await transaction.commit()
        except (*UNAVAILABLE_ERRORS, *BUSY_ERRORS) as error:
            self.drop()
            raise self._failed(error) from error
        except Exception:
            if connection is self._connection:
                await self._roll_back(transaction)
            raise
        except BaseException:
            # Cancelled: a statement may still be running on the connection.
            self.drop()
            raise
        finally:
            # It may be a savepoint of one that goes on.
            self._in_transaction = outer

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        self._prepared.clear()
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2)
            except (TimeoutError, OSError):
                connection.terminate()

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    def drop(self) -> None:
        """Give the connection up, and with it whatever runs on it."""
        connection, self._connection = self._connection, None
        self._prepared.clear()
        if connection is not None:
            connection.terminate()

    async def _open(self) -> Connection:
        if self._in_transaction:
            raise DatabaseUnavailable(_unavailable("connection lost"))
        self._availability.check()
        self._prepared.clear()
        connection = self._connection = await self._connect()
        return connection

    async def _prepare(self, connection: Connection, name: str) -> prepared_stmt.PreparedStatement[Record]:
        statement = await connection.prepare(self._statements[name])
        if self._connection is connection:
            self._prepared[name] = statement
        return statement

    async def _roll_back(self, transaction: asyncpg.transaction.Transaction) -> None:
        try:
            await transaction.rollback()
        except Exception as error:
            log.debug("transaction could not be rolled back; its connection is closed: %s", error)
            self.drop()

    def _failed(self, error: BaseException) -> QueenError:
        """Translate an error of the driver. A connection that failed is never used again: its state is unknown."""
        translated = _translate(error)
        if isinstance(translated, DatabaseUnavailable):
            self.drop()
        return translated


class PoolUsage(NamedTuple):
    """Connections of a pool: how many there may be, are open and are idle; and those of links."""

    largest: int
    size: int
    idle: int
    links: int

    @property
    def active(self) -> int:
        return self.size - self.idle


class Database:
    """One shard. `link()` for a component that runs the same few statements all the time, `fetch()` for the rest."""

    def __init__(
        self,
        dsn: str,
        *,
        pool_size: int = 10,
        connect_timeout: float = 2.0,
        statement_timeout_ms: int = 30_000,
        lock_timeout_ms: int = 10_000,
        application_name: str = "queen",
    ) -> None:
        self._dsn = dsn
        self._pool_size = pool_size
        self._connect_timeout = connect_timeout
        self._link_timeout = statement_timeout_ms / 1000 + 2
        self._settings = {
            "application_name": application_name,
            "statement_timeout": str(statement_timeout_ms),
            "lock_timeout": str(lock_timeout_ms),
            "jit": "off",
            # A plan for any queue may read all partitions where the plan for this queue reads a page of them.
            "plan_cache_mode": "force_custom_plan",
        }
        # Views sum up days of history: with the four megabytes of the default, by a sort on disk.
        self._view_settings = self._settings | {"work_mem": "32MB"}
        # The hot statements have one right plan; planning them for each batch costs more than running them.
        self._hot_settings = self._settings | {
            "plan_cache_mode": "force_generic_plan",
            "enable_seqscan": "off",
            "enable_incremental_sort": "off",
        }
        self.availability = Availability()
        self._pool: asyncpg.Pool[Record] | None = None
        self._links: list[Link] = []
        self.statements = load_statements()
        self.errors = 0
        """How often PostgreSQL was unavailable, or too busy."""

    @property
    def usage(self) -> PoolUsage:
        """How many connections there are, and how many of the pool are in use."""
        links = sum(1 for link in self._links if link.connected)
        size, idle = (self._pool.get_size(), self._pool.get_idle_size()) if self._pool is not None else (0, 0)
        return PoolUsage(self._pool_size, size, idle, links)

    def link(self, *, probing: bool = False) -> Link:
        """A connection of a component's own; a `probing` one is tried even while PostgreSQL is marked down."""
        availability = Availability() if probing else self.availability
        link = Link(self._connect_link, self.statements, self._link_timeout, availability, self._note_error)
        self._links.append(link)
        return link

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        """Run a named statement on a pooled connection."""
        return await retry_transaction(lambda: self._fetch(name, args))

    async def _fetch(self, name: str, args: Sequence[Any]) -> list[Record]:
        async with self.connection() as connection:
            return await connection.fetch(self.statements[name], *args)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[PooledConnection]:
        """A pooled connection; raises `DatabaseUnavailable` when PostgreSQL is unavailable."""
        self.availability.check()
        try:
            if self._pool is None:
                self._pool = await self._open_pool()
            pool = self._pool
            connection = await self._acquire(pool)
            try:
                yield connection
            except UNAVAILABLE_ERRORS:
                # Its state is unknown: it must not go back to the pool.
                connection.terminate()
                raise
            finally:
                await pool.release(connection)
        except (*UNAVAILABLE_ERRORS, *BUSY_ERRORS) as error:
            self._note_error()
            raise _translate(error) from error
        except CONFLICT_ERRORS as error:
            raise _translate(error) from error

    async def _acquire(self, pool: asyncpg.Pool[Record]) -> PooledConnection:
        try:
            return await pool.acquire(timeout=self._connect_timeout + _POOL_SECONDS)
        except TimeoutError as error:
            if pool.get_size() - pool.get_idle_size() < self._pool_size:
                raise
            self._note_error()
            raise Overloaded(
                f"all {self._pool_size} connections to PostgreSQL (DB_POOL_SIZE) are in use;"
                " nothing was done, try again soon"
            ) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Named statements in one transaction on a pooled connection."""
        async with self.connection() as connection:
            transaction = connection.transaction()
            try:
                await transaction.start()
                try:
                    yield Transaction(connection, self.statements)
                except UNAVAILABLE_ERRORS:
                    # There is nothing to roll back on a connection that failed.
                    raise
                except Exception:
                    await transaction.rollback()
                    raise
                await transaction.commit()
            except Exception:
                raise
            except BaseException:
                # Cancelled: a statement may still be running on the connection.
                connection.terminate()
                raise

    async def connect(self, **settings: str) -> Connection:
        """A new connection, which the caller closes, with more settings of the session."""
        try:
            return await self._open_connection(
                self._dsn, timeout=self._connect_timeout, server_settings=self._hot_settings | settings
            )
        except UNAVAILABLE_ERRORS as error:
            raise _translate(error) from error

    def mark_down(self, reason: str) -> None:
        """PostgreSQL is unavailable: statements under way fail now, and further ones at once."""
        self.availability.reason = reason
        self.availability.down = True
        for link in self._links:
            link.drop()
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    def mark_up(self) -> None:
        """PostgreSQL is available again."""
        self.availability.down = False

    async def close(self) -> None:
        for link in self._links:
            await link.close()
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    def _note_error(self) -> None:
        self.errors += 1

    async def _open_pool(self) -> asyncpg.Pool[Record]:
        return await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._pool_size,
            timeout=self._connect_timeout,
            command_timeout=None,
            server_settings=self._view_settings,
            connect=self._open_connection,
            # Nothing here leaves session state behind, so the round trip that would undo it is saved.
            reset=_keep_session,
        )

    async def _open_connection(self, *args: Any, **kwargs: Any) -> Connection:
        try:
            return await asyncpg.connect(*args, **kwargs)
        except (*UNAVAILABLE_ERRORS, *BUSY_ERRORS):
            raise
        except asyncpg.PostgresError as error:
            # A password that was changed, a database that is gone: no request can do anything about it.
            raise ConnectionError(str(error)) from error

    async def _connect_link(self) -> Connection:
        return await self._open_connection(self._dsn, timeout=self._connect_timeout, server_settings=self._hot_settings)


class Transaction:
    """The named statements of one running transaction."""

    __slots__ = ("_connection", "_statements")

    def __init__(self, connection: PooledConnection, statements: Mapping[str, str]) -> None:
        self._connection = connection
        self._statements = statements

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        return await self._connection.fetch(self._statements[name], *args)


async def _keep_session(connection: Connection) -> None:
    return


def _translate(error: BaseException) -> QueenError:
    """What an error of the driver means for the caller."""
    if isinstance(error, BUSY_ERRORS):
        return Overloaded(f"PostgreSQL could not do it in time, so nothing was done; try again soon ({error})")
    if isinstance(error, CONFLICT_ERRORS):
        why = str(error).partition("\n")[0]
        return TransactionAborted(f"another session was changing the same, so nothing was done; try again soon ({why})")
    if isinstance(error, DAMAGE_ERRORS):
        log.error("PostgreSQL reports damaged data; restore it from a backup: %s", error)
        return DatabaseUnavailable(f"PostgreSQL reports damaged data ({error})")
    return DatabaseUnavailable(_unavailable(unavailable_reason(error)))


def _unavailable(reason: str) -> str:
    return (
        f"PostgreSQL is unavailable; reconnecting ({reason})" if reason else "PostgreSQL is unavailable; reconnecting"
    )


def unavailable_reason(error: BaseException) -> str:
    """Why PostgreSQL cannot be used, in one line that says nothing of the driver's inner state."""
    if isinstance(error, DatabaseUnavailable) and error.__cause__ is not None:
        return unavailable_reason(error.__cause__)
    # A URL that cannot be read is an InterfaceError as well, and says itself what is wrong.
    if not isinstance(error, ValueError) and isinstance(
        error, asyncpg.InterfaceError | asyncpg.InternalClientError | asyncpg.ConnectionDoesNotExistError
    ):
        return "connection lost"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, FileNotFoundError):
        return "nothing listens on its Unix socket"
    if isinstance(error, socket.gaierror):
        return str(error.strerror or error).lower()
    # PostgreSQL's details and hints are lines of their own.
    text = str(error).partition("\n")[0]
    if isinstance(error, OSError) and (found := _ERRNO.search(text)):
        # The number says nothing to an operator, and asyncio adds each address that was tried.
        return os.strerror(int(found[1])).lower()
    return text or type(error).__name__


class AdvisoryLock(IntEnum):
    """What one session at a time does on a database."""

    MIGRATION = 0x5175_6565_6E00
    BACKGROUND_JOBS = 0x5175_6565_6E01
    MOVE = 0x5175_6565_6E02
    BECOMING_A_SHARD = 0x5175_6565_6E03
    INBOX = 0x5175_6565_6E04
    DATABASE_COPY = 0x5175_6565_6E05


def can_be_stored(text: str) -> bool:
    """Whether anything in the database can be called like this."""
    return "\x00" not in text


def storable(text: str) -> str:
    """The text as it is stored: a NUL becomes the mark for what cannot be shown."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


_MOST_ATTEMPTS = 5

T = TypeVar("T")


class TransactionRefused(Exception):
    """The transaction cannot be carried out; nothing of it was stored."""


async def retry_transaction(attempt: Callable[[], Awaitable[T]]) -> T:
    """Run a transaction, and again after a conflict with another one: a failed attempt leaves nothing behind."""
    for _ in range(_MOST_ATTEMPTS - 1):
        try:
            return await attempt()
        except TransactionConflict:
            continue
    return await attempt()

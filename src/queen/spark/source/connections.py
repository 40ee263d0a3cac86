"""Connections to the PostgreSQL of shards, and waiting for one that is unavailable."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format
from psycopg.raw_cursor import RawCursor

from queen.errors import Conflict, DatabaseUnavailable, QueenError, SettingsError
from queen.spark.source.offsets import Numbers
from queen.storage.statements import load_statements

log = logging.getLogger(__name__)

T = TypeVar("T")


class QueueMoving(Conflict):
    """A queue has partitions on two shards: it is being moved, or databaseUrls is wrong."""


_CONNECT_SECONDS: Final = 10
_ROWS_AT_A_TIME: Final = 32
_POSTGRES_EPOCH: Final = 946_684_800_000_000
_SETTINGS: Final = "-c jit=off -c max_parallel_workers_per_gather=0"
PAUSE_SECONDS: Final = 0.5
# PostgreSQL answered, and will answer the same until a setting is changed.
_REFUSED: Final = re.compile(
    r'authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) "[^"]*" does not exist'
    r"|permission denied|server does not support SSL"
)

_NO_ACCESS: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.InsufficientPrivilege,
)


class _NumbersLoader(Loader):
    """Arrays of PostgreSQL as vectors, without a Python object for each element."""

    format = Format.BINARY
    _element = np.dtype([("size", ">i4"), ("value", ">i8")])
    _header = 20

    def load(self, data: Buffer) -> Numbers:
        if len(memoryview(data)) < self._header:
            return np.empty(0, np.int64)
        return np.frombuffer(data, self._element, offset=self._header)["value"].astype(np.int64)


class _TimesLoader(_NumbersLoader):
    """Times as microseconds since 1970."""

    def load(self, data: Buffer) -> Numbers:
        return super().load(data) + _POSTGRES_EPOCH


class ShardConnection:
    """A connection to one shard that runs statements by their names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._statements = load_statements()

    def fetch(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named statement; once more when an idle connection turns out to be closed."""
        idle = self._connection is not None
        try:
            return self._fetch(name, args)
        except DatabaseUnavailable:
            if not idle:
                raise
        return self._fetch(name, args)

    def stream(self, name: str, *args: Any, size: int = _ROWS_AT_A_TIME) -> Iterator[tuple[Any, ...]]:
        """The rows of a named statement, `size` at a time: all of them may be more than fits in memory."""
        # An idle connection may be closed; this finds out, and opens a new one.
        self.fetch("spark_ping")
        try:
            with self.cursor() as cursor:
                yield from cursor.stream(self.statement(name), args, binary=True, size=size)
        except psycopg.OperationalError as error:
            self.close()
            raise unavailable(self._url, error) from error
        except _NO_ACCESS as error:
            raise _no_access(self._url, error) from error

    def cursor(self) -> RawCursor[tuple[Any, ...]]:
        """A cursor whose statements have their arguments as $1, $2."""
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    conninfo(self._url),
                    autocommit=True,
                    connect_timeout=_CONNECT_SECONDS,
                    application_name="queen-spark",
                    options=_SETTINGS,
                )
            except psycopg.OperationalError as error:
                raise unavailable(self._url, error) from error
            adapters = self._connection.adapters
            adapters.register_loader(adapters.types["int8"].array_oid, _NumbersLoader)
            adapters.register_loader(adapters.types["timestamptz"].array_oid, _TimesLoader)
        return RawCursor(self._connection)

    def statement(self, name: str) -> bytes:
        return self._statements[name].encode()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fetch(self, name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            with self.cursor() as cursor:
                cursor.execute(self.statement(name), args, binary=True)
                return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            self.close()
            raise unavailable(self._url, error) from error
        except _NO_ACCESS as error:
            raise _no_access(self._url, error) from error


def conninfo(url: str) -> str:
    """A URL as libpq reads it: servers take `host=a:5432,b:5433` for several hosts, libpq wants the ports apart."""
    given = conninfo_to_dict(url)
    places = [place.rpartition(":") for place in str(given.get("host") or "").split(",")]
    if not all(host and port.isdigit() and ":" not in host for host, _, port in places):
        return url
    hosts, _, ports = zip(*places, strict=True)
    kept = {name: str(value) for name, value in given.items() if value is not None}
    return make_conninfo(**kept | {"host": ",".join(hosts), "port": ",".join(ports)})


def shard_connection(url: str) -> ShardConnection:
    """This process's connection to a shard: Spark keeps its Python processes, and a new connection per task is slow."""
    return _kept(url, os.getpid())


@lru_cache(maxsize=64)
def _kept(url: str, pid: int) -> ShardConnection:
    # The process is part of the key, because a fork must not share its parent's connections.
    return ShardConnection(url)


def unavailable(url: str, error: Exception) -> QueenError:
    """What a failed connection means: PostgreSQL is unavailable, or refuses it until a setting is changed."""
    place, text = _place(url), str(error).strip()
    if _REFUSED.search(text):
        reason = text.rpartition("FATAL:")[2].strip().partition("\n")[0]
        return SettingsError(f"PostgreSQL at {place} refuses the connection: {reason}. Check databaseUrls")
    # libpq goes on with guesses, and with the same of every other host.
    reason = text.partition("\n")[0]
    return DatabaseUnavailable(f"PostgreSQL at {place} is unavailable: {reason}")


def _no_access(url: str, error: psycopg.Error) -> QueenError:
    reason = error.diag.message_primary
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return SettingsError(f"PostgreSQL at {_place(url)} refuses to read: {reason}. Check the role in databaseUrls")
    return SettingsError(
        f"PostgreSQL at {_place(url)} has no tables of this version of Queen: {reason}. Check databaseUrls, or start a"
        " server of this version on it"
    )


def _place(url: str) -> str:
    where = psycopg.conninfo.conninfo_to_dict(url)
    return f"{where.get('host') or 'the local socket'}:{where.get('port') or 5432}/{where.get('dbname') or ''}"


def retry_unavailable(attempt: Callable[[], T], seconds: float) -> T:
    """Repeat what failed because PostgreSQL is unavailable, or because a queue is being moved, for `seconds`."""
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        try:
            return attempt()
        except (DatabaseUnavailable, QueueMoving) as error:
            left = deadline - time.monotonic()
            if left < PAUSE_SECONDS:
                raise
            # Each cause once, not each of the attempts.
            if str(error) != said:
                said = str(error)
                log.warning("%s; retrying for %.0f s", said, left)
        time.sleep(PAUSE_SECONDS)

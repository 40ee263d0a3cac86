"""Connections to the shards, kept for the next task of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.raw_cursor import RawCursor

from queen.errors import DatabaseAway
from queen.storage.statements import load_statements

_CONNECT_SECONDS = 10
_ROWS_AT_A_TIME = 32
_SETTINGS = "-c jit=off -c max_parallel_workers_per_gather=0"


class ShardConnection:
    """A connection to one shard that runs statements by their names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._statements = load_statements()

    def fetch(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named statement; once more when a connection that lay idle turns out to be dead."""
        idle = self._connection is not None
        try:
            return self._fetch(name, args)
        except psycopg.OperationalError as error:
            self.close()
            if not idle:
                raise _away(self._url, error) from error
        try:
            return self._fetch(name, args)
        except psycopg.OperationalError as error:
            self.close()
            raise _away(self._url, error) from error

    def stream(self, name: str, *args: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a named statement, a few at a time: all of them may be more than fits in memory."""
        # A connection that lay idle may have died; this finds out, and makes a new one.
        self.fetch("spark_ping")
        try:
            with self.cursor() as cursor:
                yield from cursor.stream(self.statement(name), args, binary=True, size=_ROWS_AT_A_TIME)
        except psycopg.OperationalError as error:
            self.close()
            raise _away(self._url, error) from error

    def cursor(self) -> RawCursor[tuple[Any, ...]]:
        """A cursor whose statements have their arguments as $1, $2."""
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=_CONNECT_SECONDS,
                    application_name="queen-spark",
                    options=_SETTINGS,
                )
            except psycopg.OperationalError as error:
                raise _away(self._url, error) from error
        return RawCursor(self._connection)

    def statement(self, name: str) -> bytes:
        return self._statements[name].encode()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fetch(self, name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self.cursor() as cursor:
            cursor.execute(self.statement(name), args, binary=True)
            return cursor.fetchall() if cursor.description else []


def shard_connection(url: str) -> ShardConnection:
    """This process's connection to a shard: Spark keeps its Python processes, and a new connection per task is slow."""
    return _kept(url, os.getpid())


@lru_cache(maxsize=64)
def _kept(url: str, pid: int) -> ShardConnection:
    # The process is part of the key, because a fork must not share its parent's connections.
    return ShardConnection(url)


def _away(url: str, error: Exception) -> DatabaseAway:
    where = psycopg.conninfo.conninfo_to_dict(url)
    place = f"{where.get('host') or 'the local socket'}:{where.get('port') or 5432}/{where.get('dbname') or ''}"
    return DatabaseAway(f"PostgreSQL at {place} is not reachable: {str(error).strip()}")

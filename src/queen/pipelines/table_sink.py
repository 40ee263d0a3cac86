"""Writes batches of a streaming query to a table of PostgreSQL, each batch once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from queen.pipelines.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BATCHES: Final = "queen_pipeline_batches"
_MAKE_BATCHES: Final = f"""
CREATE TABLE IF NOT EXISTS {_BATCHES} (
    writer text PRIMARY KEY,
    batch bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
)"""
_TAKE_BATCH: Final = f"""
INSERT INTO {_BATCHES} (writer, batch) VALUES (%s, %s)
ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch, at = now() WHERE {_BATCHES}.batch < excluded.batch
RETURNING batch"""


class TableSink:
    """A function for `foreachBatch`: rows and the number of the batch are stored in one transaction.

    With `key`, a row replaces the one that has the same values there.
    """

    def __init__(self, database: str, table: str, writer: str, key: Sequence[str] = ()) -> None:
        self._database = database
        self._table = sql.Identifier(*table.split("."))
        self._name = table
        self._writer = writer
        self._key = tuple(key)

    def prepare(self) -> None:
        """Make the table that says which batches are stored. Raises `PipelineError` when the database is not there."""
        try:
            with psycopg.connect(self._database) as connection:
                connection.execute(_MAKE_BATCHES)
                connection.execute(sql.SQL("SELECT FROM {} LIMIT 0").format(self._table))
        except psycopg.Error as error:
            raise PipelineError(f"table {self._name} cannot be written: {error}") from error

    def __call__(self, rows: DataFrame, batch: int) -> None:
        rows = _plain(rows)
        with psycopg.connect(self._database) as connection, connection.cursor() as cursor:
            if cursor.execute(_TAKE_BATCH, (self._writer, batch)).fetchone() is None:
                return
            if self._key:
                self._merge(cursor, rows)
            else:
                self._copy(cursor, self._table, rows)

    def _merge(self, cursor: psycopg.Cursor[Any], rows: DataFrame) -> None:
        staged = sql.Identifier("queen_pipeline_staged")
        make = sql.SQL("CREATE TEMP TABLE {} (LIKE {}) ON COMMIT DROP")
        cursor.execute(make.format(staged, self._table))
        self._copy(cursor, staged, rows)
        key = sql.SQL(", ").join(map(sql.Identifier, self._key))
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.columns))
        others = [name for name in rows.columns if name not in self._key]
        action: sql.Composable = sql.SQL("DO NOTHING")
        if others:
            changes = sql.SQL(", ").join(
                sql.SQL("{} = excluded.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in others
            )
            action = sql.SQL("DO UPDATE SET {}").format(changes)
        # Of rows with one key in a batch, one is kept: an upsert cannot touch a row twice.
        merge = sql.SQL("INSERT INTO {} ({}) SELECT DISTINCT ON ({}) {} FROM {} ON CONFLICT ({}) {}")
        cursor.execute(merge.format(self._table, columns, key, columns, staged, key, action))

    def _copy(self, cursor: psycopg.Cursor[Any], table: sql.Identifier, rows: DataFrame) -> None:
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.columns))
        with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy:
            for row in rows.toLocalIterator(prefetchPartitions=True):
                copy.write_row(tuple(row))


def _plain(rows: DataFrame) -> DataFrame:
    """Every column as a value or text that PostgreSQL reads: times with their zone, nested values as JSON."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampType

    columns = []
    for field in rows.schema.fields:
        column = functions.col(f"`{field.name}`")
        if isinstance(field.dataType, TimestampType):
            column = functions.date_format(column, "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX")
        elif isinstance(field.dataType, StructType | ArrayType | MapType):
            column = functions.to_json(column)
        columns.append(column.alias(field.name))
    return rows.select(*columns)

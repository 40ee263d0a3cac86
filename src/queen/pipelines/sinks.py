"""The sinks of a pipeline: what writes a batch to each kind of them, once."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import psycopg
from psycopg import sql
from psycopg.raw_cursor import RawCursor
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, functions

from queen.pipelines.declaration import SINK_OPTIONS, Sink, SinkKind
from queen.pipelines.errors import DeclarationError, PipelineError, Problem, cause_of
from queen.pipelines.manifest import Manifest, staged_files
from queen.pipelines.session import Connection
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, open_table
from queen.pipelines.tables.sink import LakeSink, newest_last
from queen.spark.sink.foreach import BatchSink
from queen.spark.source.connections import unavailable
from queen.storage.statements import sql as statement


def local(path: Path) -> str:
    """A path of this machine, whatever file system is Spark's default. Spark takes no quoting: % is a character."""
    return f"file://{path.absolute()}"


class ParquetSink:
    """A function for `foreachBatch`. `writer` names the query: it numbers its batches from 0 on."""

    def __init__(self, root: Path, writer: str, partition_by: Sequence[str] = ()) -> None:
        self.manifest = Manifest(root)
        self.manifest.create()
        self._writer = writer
        self._partition_by = list(partition_by)

    def __call__(self, rows: DataFrame, batch: int) -> int:
        """Returns how many rows were written: none when the batch was written before."""
        last = self.manifest.last_batch(self._writer)
        if last is not None and batch <= last:
            return 0
        staged = self.manifest.staging()
        rows.write.partitionBy(*self._partition_by).parquet(local(staged))
        counts = [count_rows(file) for file in staged_files(staged)]
        self.manifest.commit(self._writer, batch, staged, counts)
        return sum(counts)


def count_rows(file: Path) -> int:
    """As the file itself says."""
    import pyarrow.parquet

    count: int = pyarrow.parquet.read_metadata(file).num_rows
    return count


_ORDER: Final = "queen_pipeline_order"


class TableSink:
    """A function for `foreachBatch`: rows and the number of the batch are stored in one transaction.

    With `key`, a row replaces the one that has the same values there; of several in a batch the newest does, by the
    columns `order_by`, else by the messages they came from, else in the order in which Spark gives them.
    """

    def __init__(
        self, database: str, table: str, writer: str, key: Sequence[str] = (), order_by: Sequence[str] = ()
    ) -> None:
        self._database = database
        self._table = sql.Identifier(*table.split("."))
        self._name = table
        self._writer = writer
        self._key = tuple(key)
        self._order_by = tuple(order_by)

    def prepare(self) -> None:
        """Make the table that says which batches are stored. Raises `PipelineError` when the database is not there."""
        try:
            with psycopg.connect(self._database) as connection:
                connection.execute(statement("pipeline_create_batches").encode())
                connection.execute(sql.SQL("SELECT FROM {} LIMIT 0").format(self._table))
        except psycopg.Error as error:
            raise PipelineError(f"table {self._name} cannot be written: {_said(error)}") from error

    def __call__(self, rows: DataFrame, batch: int) -> int:
        """Returns how many rows were written: none when the batch was written before."""
        if self._key:
            rows = newest_last(rows, self._order_by)
        rows = _plain(rows.select(*_own(rows)))
        try:
            with psycopg.connect(self._database) as connection, RawCursor(connection) as cursor:
                if cursor.execute(statement("pipeline_take_batch").encode(), (self._writer, batch)).fetchone() is None:
                    return 0
                return self._merge(cursor, rows) if self._key else self._copy(cursor, self._table, rows)
        except psycopg.OperationalError as error:
            # Whatever the error: the batch is repeated when PostgreSQL is available again.
            raise unavailable(self._database, error) from error
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise PipelineError(
                f"table {self._name} does not take a row: {_said(error)}. Change such values in a step, or make dead"
                " letters of them with expect"
            ) from error
        except psycopg.ProgrammingError as error:
            raise PipelineError(
                f"table {self._name} cannot be written: {_said(error)}. Check its columns, the unique index on"
                " those of key, and the rights of the role"
            ) from error

    def _merge(self, cursor: psycopg.Cursor[Any], rows: DataFrame) -> int:
        staged = sql.Identifier("queen_pipeline_staged")
        order = sql.Identifier(_ORDER)
        make = sql.SQL("CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT *, 0::bigint AS {} FROM {} WITH NO DATA")
        cursor.execute(make.format(staged, order, self._table))
        count = self._copy(cursor, staged, rows, numbered=True)
        key = sql.SQL(", ").join(map(sql.Identifier, self._key))
        columns = sql.SQL(", ").join(map(sql.Identifier, rows.columns))
        others = [name for name in rows.columns if name not in self._key]
        action: sql.Composable = sql.SQL("DO NOTHING")
        if others:
            changes = sql.SQL(", ").join(
                sql.SQL("{} = excluded.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in others
            )
            action = sql.SQL("DO UPDATE SET {}").format(changes)
        # Of rows with one key in a batch the last is kept: an upsert cannot touch a row twice. Those without a key are
        # all kept, unless NULL is a value to the table's index (which PostgreSQL 14 does not have).
        keyless = sql.SQL(
            "CASE WHEN num_nulls({}) > 0 AND NOT EXISTS (SELECT FROM pg_index i"
            " WHERE indrelid = {}::regclass AND (to_jsonb(i) ->> 'indnullsnotdistinct')::boolean) THEN {} END"
        ).format(key, self._table.as_string(cursor), order)
        merge = sql.SQL(
            "INSERT INTO {} ({}) SELECT DISTINCT ON ({}, {}) {} FROM {} ORDER BY {}, {}, {} DESC ON CONFLICT ({}) {}"
        )
        named = (self._table, columns, key, keyless, columns, staged, key, keyless, order, key, action)
        cursor.execute(merge.format(*named))
        return count

    def _copy(
        self, cursor: psycopg.Cursor[Any], table: sql.Identifier, rows: DataFrame, *, numbered: bool = False
    ) -> int:
        names = [*rows.columns, _ORDER] if numbered else rows.columns
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy:
            count = 0
            for row in rows.toLocalIterator(prefetchPartitions=True):
                copy.write_row((*row, count) if numbered else tuple(row))
                count += 1
        return count


def _said(error: psycopg.Error) -> str:
    """What PostgreSQL says of it, without where in our statement."""
    return error.diag.message_primary or " ".join(str(error).split())


def _plain(rows: DataFrame) -> DataFrame:
    """Every column as a value or text that PostgreSQL reads: times with their zone, nested values as JSON."""
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


_CONSOLE_ROWS: Final = 20
_WRITER_FILE: Final = "queen-writer"
# Times are kept to the microsecond.
_JSON: Final = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}


Write = Callable[[DataFrame, int], int]
"""Writes a batch of rows under its number, once; returns how many rows were written."""


class Sinks:
    """Makes what writes to the sinks of a query, which numbers its batches as its checkpoint says."""

    def __init__(self, pipeline: str, connection: Connection, checkpoint: Path) -> None:
        self._pipeline = pipeline
        self._connection = connection
        self._checkpoint = checkpoint
        checkpoint.mkdir(parents=True, exist_ok=True)

    def writer(self, sink: Sink) -> Write:
        """For rows with all columns of their node. Raises `DeclarationError` when the sink lacks what it needs."""
        if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC):
            publish = self.publisher(sink)

            def write(rows: DataFrame, batch: int) -> int:
                count = rows.count()
                if count:
                    publish(messages(sink, rows), batch)
                return count

            return write
        store = self.batches(sink)
        return lambda rows, batch: store(self.columns(sink, rows), batch)

    def publisher(self, sink: Sink) -> BatchSink:
        """For the messages of a queue or topic."""
        # A query that was begun for one sink publishes under its id alone, as one that Spark itself writes.
        name = None if sink.name == self._checkpoint.name else sink.name
        return BatchSink(name, **self.options(sink))

    def options(self, sink: Sink) -> dict[str, str]:
        """Those of `format("queen")` for a queue or topic."""
        return self._connection.options() | _destination(sink)

    def columns(self, sink: Sink, rows: DataFrame) -> DataFrame:
        """Rows without the columns of the pipeline."""
        # Which row of a key is newer is decided by the columns of the messages they came from.
        if "key" in SINK_OPTIONS[sink.kind]:
            return rows
        return rows.select(*_own(rows))

    def batches(self, sink: Sink) -> Write:
        """For a sink that is neither a queue nor a topic."""
        if sink.kind is SinkKind.CONSOLE:
            return ConsoleSink(sys.stdout, int(sink.options.get("rows", _CONSOLE_ROWS)))
        writer = writer_of(sink.name, self._pipeline, self._checkpoint)
        if sink.kind is SinkKind.PARQUET:
            path = Location.parse(sink.target).path
            assert path is not None
            return ParquetSink(path, writer, _names(sink, "partition_by"))
        if sink.kind in (SinkKind.DELTA, SinkKind.ICEBERG):
            return self._table(sink, writer)
        database = sink.options.get("database") or next(iter(self._connection.databases), None)
        if database is None:
            text = f"sink '{sink.name}' needs 'database', the URL of a PostgreSQL; or run with --database-url"
            raise DeclarationError([Problem(sink.where, text)])
        table = TableSink(database, sink.target, writer, _names(sink, "key"), _names(sink, "order_by"))
        table.prepare()
        return table

    def _table(self, sink: Sink, writer: str) -> LakeSink:
        location = Location.parse(sink.target)
        catalog = sink.options.get("catalog")
        if catalog is None and location.path is None:
            catalog = next(iter(self._connection.databases), None)
        return LakeSink(
            open_table(Format(sink.kind.value), location, catalog),
            writer,
            _names(sink, "partition_by"),
            _names(sink, "key"),
            _names(sink, "order_by"),
            sink.options.get("delete_when"),
        )


def messages(sink: Sink, rows: DataFrame) -> DataFrame:
    """Rows as the messages of a queue or topic."""
    own = [name for name in rows.columns if not name.startswith("_")]
    columns = functions.struct(*(functions.col(f"`{name}`") for name in own))
    payload: Column = functions.to_json(columns, _JSON)
    if "payload" in sink.options:
        payload = functions.expr(sink.options["payload"]).cast("string")
    extra = {"partition": "string", "transaction_id": "string", "idempotency_key": "string"}
    extra |= {"priority": "int", "deliver_after": "timestamp"}
    others = [
        functions.expr(sink.options[name]).cast(kind).alias(name)
        for name, kind in extra.items()
        if name in sink.options
    ]
    return rows.select(payload.alias("payload"), *others)


def sink_problems(sink: Sink, rows: DataFrame) -> list[Problem]:
    """The columns that a sink names and its rows lack, and the expressions that cannot be computed from them."""
    named = [name for key in ("partition_by", "key", "order_by") for name in _names(sink, key)]
    columns = rows.columns
    problems = [
        Problem(sink.where, f"sink '{sink.name}' names column '{name}'; '{sink.source}' has {', '.join(columns)}")
        for name in named
        if name not in columns
    ]
    try:
        if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC):
            messages(sink, rows)
        elif "delete_when" in sink.options:
            rows.where(sink.options["delete_when"])
    except PySparkException as error:
        problems.append(Problem(sink.where, f"sink '{sink.name}': {cause_of(error)}"))
    return problems


class ConsoleSink:
    """Prints the first rows of each batch as JSON."""

    def __init__(self, out: TextIO, rows: int) -> None:
        self._out = out
        self._rows = rows

    def __call__(self, rows: DataFrame, batch: int) -> int:
        for (line,) in rows.limit(self._rows).select(functions.to_json(functions.struct("*"))).collect():
            print(line, file=self._out)
        return rows.count()


def writer_of(sink: str, pipeline: str, checkpoint: Path) -> str:
    """Who writes a sink: it belongs to the checkpoint, and a new one numbers batches from 0 again.

    It holds the name that the pipeline had then: an archive that was moved to another directory has another name now.
    """
    file = checkpoint / _WRITER_FILE
    if not file.exists():
        file.write_text(f"{pipeline}.{uuid.uuid4().hex}")
    name, _, id = file.read_text().rpartition(".")
    # Older checkpoints have the id alone.
    return f"{name or pipeline}.{sink}.{id}"


def _own(rows: DataFrame) -> list[str]:
    """The columns without those that are the pipeline's."""
    return _quoted([name for name in rows.columns if not name.startswith("_")])


def _quoted(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _destination(sink: Sink) -> dict[str, str]:
    if sink.kind is SinkKind.QUEUE:
        return {"queue": sink.target}
    namespace, _, topic = sink.target.partition("/")
    return {"namespace": namespace, "topic": topic}


def _names(sink: Sink, key: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in sink.options.get(key, "").split(",") if name.strip())

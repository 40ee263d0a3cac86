"""Starts the queries of a pipeline, one for each sink."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from pyspark.sql import Column, DataFrame, functions

from queen.pipelines.connection import Connection
from queen.pipelines.declaration import ONCE, Sink, SinkKind
from queen.pipelines.durations import interval
from queen.pipelines.errors import DeclarationError, Problem
from queen.pipelines.parquet_sink import ParquetSink
from queen.pipelines.paths import local
from queen.pipelines.table_sink import TableSink

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_CONSOLE_ROWS: Final = 20
_WRITER_FILE: Final = "queen-writer"
OBSERVED: Final = "queen_written"
# Times are kept to the microsecond.
_JSON: Final = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}


class Sinks:
    """Starts queries that begin where their checkpoints say."""

    def __init__(self, pipeline: str, connection: Connection, checkpoints: Path, trigger: str) -> None:
        self._pipeline = pipeline
        self._connection = connection
        self._checkpoints = checkpoints
        self._trigger = trigger

    def start(self, sink: Sink, rows: DataFrame) -> StreamingQuery:
        """Write the rows to the sink from now on. Raises `DeclarationError` when the sink lacks a column it names."""
        checkpoint = self._checkpoints / sink.name
        checkpoint.mkdir(parents=True, exist_ok=True)
        own = [name for name in rows.columns if not name.startswith("_")]
        self._check_columns(sink, rows.columns)
        if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC):
            stream = self._messages(sink, observed(rows, own)).writeStream.format("queen")
            stream = stream.options(**self._connection.options(), **_destination(sink))
        else:
            stream = observed(rows, own).select(*own).writeStream.foreachBatch(self._batches(sink, checkpoint))
        return triggered(stream, self._trigger, checkpoint).queryName(f"{self._pipeline}.{sink.name}").start()

    def _messages(self, sink: Sink, rows: DataFrame) -> DataFrame:
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

    def _batches(self, sink: Sink, checkpoint: Path) -> Callable[[DataFrame, int], None]:
        if sink.kind is SinkKind.CONSOLE:
            return ConsoleSink(sys.stdout, int(sink.options.get("rows", _CONSOLE_ROWS)))
        writer = f"{self._pipeline}.{sink.name}.{writer_id(checkpoint)}"
        if sink.kind is SinkKind.PARQUET:
            return ParquetSink(Path(sink.target), writer, _names(sink, "partition_by"))
        database = sink.options.get("database") or next(iter(self._connection.databases), None)
        if database is None:
            text = f"sink '{sink.name}' needs 'database', the URL of a PostgreSQL; or run with --database-url"
            raise DeclarationError([Problem(sink.where, text)])
        table = TableSink(database, sink.target, writer, _names(sink, "key"))
        table.prepare()
        return table

    def _check_columns(self, sink: Sink, columns: list[str]) -> None:
        missing = [name for key in ("partition_by", "key") for name in _names(sink, key) if name not in columns]
        if missing:
            text = f"sink '{sink.name}' names column '{missing[0]}'; '{sink.source}' has {', '.join(columns)}"
            raise DeclarationError([Problem(sink.where, text)])


class ConsoleSink:
    """Prints the first rows of each batch as JSON."""

    def __init__(self, out: TextIO, rows: int) -> None:
        self._out = out
        self._rows = rows

    def __call__(self, rows: DataFrame, batch: int) -> None:
        for (line,) in rows.limit(self._rows).select(functions.to_json(functions.struct("*"))).collect():
            print(line, file=self._out)


def observed(rows: DataFrame, columns: list[str]) -> DataFrame:
    """The same rows, counted as they go by."""
    return rows.observe(OBSERVED, functions.count(functions.lit(1)).alias("rows"))


def triggered(stream: DataStreamWriter, trigger: str, checkpoint: Path) -> DataStreamWriter:
    """With its checkpoint, and as often as the trigger says."""
    stream = stream.outputMode("append").option("checkpointLocation", local(checkpoint))
    if trigger == ONCE:
        return stream.trigger(availableNow=True)
    return stream.trigger(processingTime=interval(trigger))


def writer_id(checkpoint: Path) -> str:
    """A name for the query that lives and dies with its checkpoint, because a new one numbers its batches anew."""
    file = checkpoint / _WRITER_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


def _destination(sink: Sink) -> dict[str, str]:
    if sink.kind is SinkKind.QUEUE:
        return {"queue": sink.target}
    namespace, _, topic = sink.target.partition("/")
    return {"namespace": namespace, "topic": topic}


def _names(sink: Sink, key: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in sink.options.get(key, "").split(",") if name.strip())

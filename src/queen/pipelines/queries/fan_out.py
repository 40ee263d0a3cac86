"""Starts queries: each computes a batch once, and gives it to all of its sinks."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, functions

from queen.pipelines.declaration import ONCE, Declaration, OutputMode, Sink, SinkKind
from queen.pipelines.errors import PipelineError, cause_of
from queen.pipelines.queries.frames import Frames, letters
from queen.pipelines.queries.planning import DEAD_LETTERS, PlannedQuery, dead_letter_sink
from queen.pipelines.session import Connection
from queen.pipelines.sinks import Sinks, Write, local, messages
from queen.wire.times import spark_interval

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OBSERVED: Final = "queen_written"


class FanOut:
    """A function for `foreachBatch`. Every sink has its own way to know a batch that it has written already.

    So when one fails, or the process is killed, the batch is done again: those that have it pass it over.
    """

    def __init__(self, query: PlannedQuery, frames: Callable[[DataFrame], Frames], pipeline: str) -> None:
        """`frames` makes what sinks get of a batch of the trunk."""
        self._query = query
        self._frames = frames
        self._pipeline = pipeline
        self._sinks: list[tuple[Sink, Write]] = []
        self._dead_letters: Write | None = None
        self.written: Counter[str] = Counter()
        """By sink, since the run began."""
        self.late = 0
        """Rows among the dead letters that came too late; Spark does not count them."""
        self.at: str | None = None
        """The sink that a batch is being written to."""

    def open(self, sinks: Sinks, dead_letters: Sink) -> None:
        """Before the query starts. Raises `DeclarationError` when a sink lacks what it needs."""
        self.at = None
        self._sinks = [(sink, sinks.writer(sink)) for sink in self._query.sinks]
        if self._query.has_dead_letters:
            self._dead_letters = sinks.writer(dead_letters)
            self.written[DEAD_LETTERS] += 0

    def __call__(self, rows: DataFrame, batch: int) -> None:
        side = self._query.side
        if side is not None:
            side.clear()
        frames = self._frames(rows.persist())
        try:
            # All of it, whatever sinks need: state is kept, and rows leave by the side, only where it is computed.
            some = rows.count() > 0
            for sink, write in self._sinks if some else ():
                self.at = sink.name
                self.written[sink.name] += write(frames.of(sink.source), batch)
            if self._dead_letters is not None:
                self.at = DEAD_LETTERS
                self._write_dead_letters(frames, rows, batch, self._dead_letters)
            self.at = None
        finally:
            frames.release()
            rows.unpersist()

    def _write_dead_letters(self, frames: Frames, rows: DataFrame, batch: int, write: Write) -> None:
        found = frames.dead_letters()
        late = 0
        for tap, table in self._query.side.taken(rows.sparkSession, batch) if self._query.side is not None else ():
            bad = letters(self._pipeline, tap.node, rows.sparkSession.createDataFrame(table, tap.schema))
            found = bad if found is None else found.unionByName(bad)
            late += table.num_rows if tap.late else 0
        if found is None or found.isEmpty():
            return
        written = write(found, batch)
        self.written[DEAD_LETTERS] += written
        if written:
            self.late += late


class Starter:
    """Starts the queries of a pipeline where their checkpoints say."""

    def __init__(self, declaration: Declaration, connection: Connection, checkpoints: Path, trigger: str) -> None:
        self._declaration = declaration
        self._connection = connection
        self._checkpoints = checkpoints
        self._trigger = trigger

    def fan_out(self, query: PlannedQuery) -> FanOut | None:
        """None for a query that gives its rows to its only sink as they are."""
        if query.direct:
            return None

        def frames(rows: DataFrame) -> Frames:
            given = {query.trunk: rows}
            return Frames(rows.sparkSession, self._declaration, self._connection, given=given, judges=query.judges)

        return FanOut(query, frames, self._declaration.name)

    def start(self, query: PlannedQuery, fan_out: FanOut | None) -> StreamingQuery:
        """Raises `DeclarationError` when a sink lacks what it needs."""
        checkpoint = self._checkpoints / query.name
        sinks = Sinks(self._declaration.name, self._connection, checkpoint)
        if fan_out is not None:
            fan_out.open(sinks, dead_letter_sink(self._declaration))
            stream = query.rows.writeStream.foreachBatch(with_short_errors(fan_out))
        else:
            stream = _direct(sinks, query.sinks[0], query.rows)
        stream = _triggered(stream, self._trigger, checkpoint).outputMode(query.mode)
        return stream.queryName(f"{self._declaration.name}.{query.name}").start()


def _direct(sinks: Sinks, sink: Sink, rows: DataFrame) -> DataStreamWriter:
    counted = rows.observe(OBSERVED, functions.count(functions.lit(1)).alias("rows"))
    # Spark lets no sink that is written in Python have another mode than append.
    if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC) and sink.mode is OutputMode.APPEND:
        return messages(sink, counted).writeStream.format("queen").options(**sinks.options(sink))
    if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC):
        return messages(sink, counted).writeStream.foreachBatch(with_short_errors(sinks.publisher(sink)))
    store = sinks.batches(sink)

    def write(rows: DataFrame, batch: int) -> None:
        store(rows, batch)

    return sinks.columns(sink, counted).writeStream.foreachBatch(with_short_errors(write))


def _triggered(stream: DataStreamWriter, trigger: str, checkpoint: Path) -> DataStreamWriter:
    """With its checkpoint, and as often as the trigger says."""
    stream = stream.option("checkpointLocation", local(checkpoint))
    if trigger == ONCE:
        return stream.trigger(availableNow=True)
    return stream.trigger(processingTime=spark_interval(trigger))


# By these Spark tells the error of a query that is being stopped from one that fails.
_INTERRUPTED: Final = re.compile(
    r"java\.lang\.InterruptedException|java\.io\.InterruptedIOException|java\.nio\.channels\.ClosedByInterruptException"
)
_CANCELLED: Final = re.compile(r"\[?.*cancelled part of cancelled job group \S+")


def with_short_errors(write: Callable[[DataFrame, int], object]) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` whose errors are one line.

    Spark looks in the error of a query that is being stopped for the signs of an interruption, with a regular
    expression that overflows the stack of the JVM on some thousand characters, as tracebacks of Java have them.
    """

    @wraps(write, updated=())
    def write_batch(rows: DataFrame, batch: int) -> None:
        try:
            write(rows, batch)
        except Exception:
            raise PipelineError(_in_short(traceback.format_exc())) from None

    return write_batch


def _in_short(error: str) -> str:
    if interrupted := _INTERRUPTED.search(error):
        return f"py4j.protocol.Py4JJavaError: An error occurred while calling Spark: {interrupted[0]}"
    if cancelled := _CANCELLED.search(error):
        return f"org.apache.spark.SparkException: {cancelled[0]}"
    return cause_of(error)

"""Lineage of a pipeline: a job, and below it one for each sink, with the inputs and outputs of that sink alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from queen.errors import QueenError
from queen.pipelines.declaration import ONCE, Declaration, Sink, SinkKind, Source, SourceKind
from queen.pipelines.errors import cause_of
from queen.pipelines.lineage.emitter import Emitter, open_emitter
from queen.pipelines.lineage.jobs import (
    Dataset,
    Event,
    Fields,
    Job,
    parent_of_environment,
    path_dataset,
    queue_dataset,
    table_dataset,
)
from queen.pipelines.session import Connection
from queen.spark.options import names_in
from queen.spark.source.logs import ShardLog
from queen.wire.pipelines import PipelineState, PipelineStatus

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_RUNNING_SECONDS: Final = 60.0
_ENDS: Final = {
    PipelineState.DONE: Event.COMPLETE,
    PipelineState.FAILED: Event.FAIL,
}


class Lineage(Protocol):
    """What follows a run: `planned` before its queries start, `report` at every change of its status."""

    def planned(self, planned: Sequence[tuple[Sink, DataFrame]]) -> None: ...

    def report(self, status: PipelineStatus) -> None: ...


@contextmanager
def run_lineage(declaration: Declaration, connection: Connection, trigger: str | None) -> Iterator[Lineage]:
    """For one run; it does nothing where lineage is not configured. `trigger`: that of the run, if it has its own."""
    emitter = open_emitter()
    if emitter is None:
        yield _NoLineage()
        return
    try:
        yield RunLineage(emitter, declaration, connection, trigger)
    finally:
        emitter.close()


class _NoLineage:
    def planned(self, planned: Sequence[tuple[Sink, DataFrame]]) -> None:
        pass

    def report(self, status: PipelineStatus) -> None:
        pass


class RunLineage:
    """Makes the events of one run."""

    def __init__(self, emitter: Emitter, declaration: Declaration, connection: Connection, trigger: str | None) -> None:
        self._emitter = emitter
        self._declaration = declaration
        self._connection = connection
        self._streaming = (trigger or declaration.trigger) != ONCE
        self._sinks: dict[str, Job] = {}
        self._next = time.monotonic() + _RUNNING_SECONDS
        self._pipeline = self._job(declaration.name, "PIPELINE")
        self._pipeline.parent = parent_of_environment()

    def planned(self, planned: Sequence[tuple[Sink, DataFrame]]) -> None:
        for sink, rows in planned:
            job = self._job(f"{self._declaration.name}.{sink.name}", "QUERY")
            job.parent = self._pipeline.as_parent
            job.engine = rows.sparkSession.version
            job.inputs = [dataset for source in self._sources(sink) for dataset in self._inputs(source)]
            job.outputs = list(self._outputs(sink, _fields(rows.schema)))
            job.emit(Event.START)
            self._sinks[sink.name] = job

    def report(self, status: PipelineStatus) -> None:
        if status.state is PipelineState.STARTING:
            self._pipeline.emit(Event.START)
        elif status.state is not PipelineState.RUNNING:
            self._end(status)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _RUNNING_SECONDS
            self._count(status)
            for job in (self._pipeline, *self._sinks.values()):
                job.emit(Event.RUNNING)

    def _end(self, status: PipelineStatus) -> None:
        # To be stopped is how a stream ends; one that was to take all there is, has not.
        stopped = Event.COMPLETE if self._streaming else Event.ABORT
        error = cause_of(status.error) if status.error else None
        self._count(status)
        for job in (*self._sinks.values(), self._pipeline):
            job.emit(_ENDS.get(status.state, stopped), error)

    def _count(self, status: PipelineStatus) -> None:
        for query in status.queries:
            job = self._sinks.get(query.name)
            if job is not None:
                job.read, job.written = query.rows, query.written
        for name, job in self._sinks.items():
            if name not in {query.name for query in status.queries}:
                job.written = status.dead_letters

    def _job(self, name: str, kind: str) -> Job:
        return Job(self._emitter, name, kind, self._streaming)

    def _sources(self, sink: Sink) -> Iterator[Source]:
        """Those that a sink gets rows from; dead letters may be of all of them."""
        nodes = {node.name for node in self._declaration.upstream(sink.source)}
        return (source for source in self._declaration.sources if not sink.source or source.name in nodes)

    def _inputs(self, source: Source) -> Iterator[Dataset]:
        if source.kind in (SourceKind.QUEUE, SourceKind.QUEUE_PATTERN):
            for name in self._queues(source):
                yield queue_dataset(self._connection.server, name, _declared(source))
        elif source.kind is SourceKind.FILES:
            yield path_dataset(source.target, _declared(source))

    def _queues(self, source: Source) -> Iterable[str]:
        """Those of a pattern as they are now, where PostgreSQL can be asked; else the pattern stands for them."""
        if source.kind is SourceKind.QUEUE:
            return names_in(source.target)
        try:
            names = ShardLog(self._connection.databases).queue_names() if self._connection.databases else ()
        except QueenError:
            names = ()
        return [name for name in names if re.fullmatch(source.target, name)] or [source.target]

    def _outputs(self, sink: Sink, fields: Fields) -> Iterator[Dataset]:
        if sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC):
            yield queue_dataset(self._connection.server, sink.target, fields)
        elif sink.kind in (SinkKind.PARQUET, SinkKind.DELTA, SinkKind.ICEBERG):
            yield path_dataset(sink.target, fields)
        elif sink.kind is SinkKind.POSTGRES:
            database = sink.options.get("database") or next(iter(self._connection.databases), "")
            yield table_dataset(database, sink.target, fields)


def _declared(source: Source) -> Fields:
    """What a source says of its payloads; without that they are JSON of any kind."""
    from pyspark.sql.types import StructType

    if source.schema is None:
        return ()
    schema = StructType.fromDDL(source.schema)
    assert isinstance(schema, StructType)
    return _fields(schema)


def _fields(schema: StructType) -> Fields:
    """Columns without those that are the pipeline's."""
    return tuple((one.name, one.dataType.simpleString()) for one in schema if not one.name.startswith("_"))

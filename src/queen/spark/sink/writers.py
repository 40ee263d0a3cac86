"""Writes of `format("queen")`: tasks stage their rows, the driver publishes them, once."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from queen.errors import QueenError, SettingsError
from queen.spark.options import Access, WriteOptions, parse_write_options
from queen.spark.sink.publishers import Publisher, ServerPublisher, ShardPublisher, StagedPart
from queen.spark.sink.rows import RowPlan, items, messages, plan_rows

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


@dataclass
class StagedRows(WriterCommitMessage):
    """What one task staged, and for which run."""

    run: str
    parts: list[StagedPart]


class QueenWriter(DataSourceArrowWriter):
    """A single write: published when every task has staged its rows, or not at all."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan
        # Drawn where the write is planned: every task and the commit have the same.
        self._run = plan.options.run or f"write-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        return _stage(self._plan, self._run, self._plan.options.batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _publisher(self._plan.options).publish(self._run, self._plan.options.batch, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _publisher(self._plan.options).abandon(self._run, self._plan.options.batch)


class QueenStreamWriter(DataSourceStreamArrowWriter):
    """Micro-batches: each is published as a whole, once, however often it is tried."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context is not None else None
        batch = context.getLocalProperty(_BATCH) if context is not None else None
        if query is None or batch is None:
            raise QueenError("this Spark gives tasks no id of their query and batch: use PySpark 4.2 or newer")
        return _stage(self._plan, query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        # Spark makes a new writer for each commit, so only the tasks know the query.
        for run in {message.run for message in messages if isinstance(message, StagedRows)}:
            _publisher(self._plan.options).publish(run, batch_id, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        for run in {message.run for message in messages if isinstance(message, StagedRows)}:
            _publisher(self._plan.options).abandon(run, batch_id)


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> QueenWriter:
    return QueenWriter(_plan(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> QueenStreamWriter:
    plan = _plan(options, schema, overwrite)
    if plan.options.run is not None:
        raise SettingsError("a streaming query is its own run, numbered by its checkpoint: leave option run out")
    return QueenStreamWriter(plan)


def _plan(options: Mapping[str, str], schema: StructType, overwrite: bool) -> RowPlan:
    if overwrite:
        raise SettingsError('messages cannot be overwritten: write with mode("append")')
    return plan_rows(parse_write_options(options), schema.fieldNames())


def _stage(plan: RowPlan, run: str, batch: int, batches: Iterator[pa.RecordBatch]) -> StagedRows:
    staging = _publisher(plan.options).begin(run, batch)
    for rows in batches:
        if plan.to_topics:
            for topic, array, count in items(plan, rows):
                staging.add_topic_items(topic, array, count)
        elif rows.num_rows:
            staging.add(messages(plan, rows))
    return StagedRows(run, staging.finish())


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedPart]:
    """In the order of the tasks."""
    return [part for message in messages if isinstance(message, StagedRows) for part in message.parts]


def _publisher(options: WriteOptions) -> Publisher:
    """The connections of this process: Spark keeps its Python processes, and new connections per task are slow."""
    return _kept(options.access, options.dedup_window, os.getpid())


@lru_cache(maxsize=16)
def _kept(access: Access, dedup_window: float, pid: int) -> Publisher:
    # The process is part of the key, because a fork must not share its parent's connections.
    if access.server is not None:
        return ServerPublisher(access.server, access.token, access.outage_grace)
    return ShardPublisher(
        access.database_urls,
        encryption_keys=access.encryption_keys,
        dedup_window=dedup_window,
        outage_grace=access.outage_grace,
    )

"""Batch reads: everything between two edges.

Spark plans a DataFrame once and keeps the plan for every later action on it, and for a view as long as it exists. So
the plan says only how the work is shared out; where the logs end is looked up when the tasks run, unless an ending edge
was given. Filters are not taken: Spark would use a reader that took one for the unfiltered DataFrame as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from queen.spark.options import EARLIEST, LATEST, EdgeKind, ReadOptions
from queen.spark.source.logs import Log, Position, Span
from queen.spark.source.planning import edge_offsets, queues_to_read, share_out, spans_between
from queen.spark.source.reading import MessageReading, open_log


@dataclass
class BatchTask(InputPartition):
    """What one task reads: spans as they were planned, and what was appended since."""

    spans: tuple[Span, ...] = ()
    planned: dict[tuple[int, int], int] | None = None
    """In one task: where each partition (by shard and id) ended when the read was planned. It reads on from there."""


class QueenReader(DataSourceReader):
    """Reads messages between two edges."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._reading = MessageReading(options, schema, fail_on_data_loss=bool(options.fail_on_data_loss))

    def partitions(self) -> list[InputPartition]:
        options = self._options
        log = open_log(options.access)
        positions = self._positions(log)
        spans = self._spans(log, positions)
        tasks = [BatchTask(task.spans) for task in share_out(spans, options.max_tasks)] or [BatchTask()]
        if options.ending is LATEST:
            tasks[0].planned = {(position.shard, position.id): position.next for position in positions}
        return [*tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, BatchTask)
        yield from self._reading.read(partition.spans)
        if partition.planned is not None:
            yield from self._reading.read(self._appended(partition.planned))

    def _positions(self, log: Log) -> list[Position]:
        wanted = self._options.partitions
        found = log.positions(queues_to_read(log, self._options))
        return [position for position in found if wanted is None or position.partition in wanted]

    def _spans(self, log: Log, positions: Sequence[Position]) -> list[Span]:
        options = self._options
        starts = edge_offsets(log, positions, options.starting or EARLIEST, otherwise=EdgeKind.EARLIEST)
        ends = edge_offsets(log, positions, options.ending, otherwise=EdgeKind.LATEST)
        return spans_between(positions, starts, ends)

    def _appended(self, planned: dict[tuple[int, int], int]) -> list[Span]:
        """What was appended since the read was planned, new partitions included."""
        log = open_log(self._options.access)
        positions = [one for one in self._positions(log) if one.next > planned.get((one.shard, one.id), 0)]
        # Offsets are given for partitions that existed; others are read from their beginning.
        starts = [max(planned.get((one.shard, one.id), 0), one.first) for one in positions]
        starting = self._options.starting
        if starting is not None and starting.time is not None:
            starts = list(map(max, starts, log.offsets_from(positions, starting.time)))
        return spans_between(positions, starts, [one.next for one in positions])

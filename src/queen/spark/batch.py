"""Batch reads: everything between two edges, cut down by the filters that Spark pushes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from queen.spark.filters import Restriction
from queen.spark.options import EARLIEST, EdgeKind, ReadOptions
from queen.spark.ranges import edge_offsets, spans_between
from queen.spark.reading import MessageReading, open_log
from queen.spark.tasks import SpanTask, share_out


class QueenReader(DataSourceReader):
    """Reads messages between two edges."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._restriction = Restriction()
        self._reading = MessageReading(options, schema, fail_on_data_loss=bool(options.fail_on_data_loss))

    def partitions(self) -> list[InputPartition]:
        options, restriction = self._options, self._restriction
        log = open_log(options.access)
        positions = log.positions(options.queues)
        starts = edge_offsets(log, positions, options.starting or EARLIEST, otherwise=EdgeKind.EARLIEST)
        ends = edge_offsets(log, positions, options.ending, otherwise=EdgeKind.LATEST)
        spans = restriction.cut(log, positions, spans_between(positions, starts, ends))
        # Spark makes a task of an empty list too, with nothing in it.
        return [*share_out(spans, options.max_tasks)] or [SpanTask(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SpanTask)
        return self._reading.read(partition.spans)


class FilteringReader(QueenReader):
    """The same while Spark pushes filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            # A field of the payload may be called like a column that is not read.
            if getattr(one, "attribute", ("",))[0] not in self._reading.own or not self._restriction.take(one):
                yield one

"""Batch reads: everything between two edges, cut down by the filters that Spark pushes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from queen.spark.logs import Log, Position, Span
from queen.spark.options import EARLIEST, EdgeKind, ReadOptions
from queen.spark.planning import SpanTask, edge_offsets, share_out, spans_between
from queen.spark.reading import MessageReading, open_log

_NEVER_NULL = frozenset({"queue", "partition", "offset", "message_id", "transaction_id", "created_at", "payload"})
_TICK = timedelta(microseconds=1)


@dataclass
class Restriction:
    """What filters leave of queues, partitions, offsets and times. Ends are excluded."""

    names: dict[str, set[str]] = field(default_factory=dict)
    first_offset: int = 0
    end_offset: int | None = None
    since: datetime | None = None
    before: datetime | None = None

    def take(self, one: Filter) -> bool:
        """Take a filter in; False when it has to be evaluated for each row."""
        match one:
            case IsNotNull((name,)):
                return name in _NEVER_NULL
            case EqualTo((("queue" | "partition") as name,), str() as value):
                return self._take_names(name, {value})
            case In((("queue" | "partition") as name,), values) if all(isinstance(value, str) for value in values):
                return self._take_names(name, set(values))
            case EqualTo(("offset",), int() as value):
                return self._take_offsets(value, value + 1)
            case GreaterThan(("offset",), int() as value):
                return self._take_offsets(value + 1, None)
            case GreaterThanOrEqual(("offset",), int() as value):
                return self._take_offsets(value, None)
            case LessThan(("offset",), int() as value):
                return self._take_offsets(0, value)
            case LessThanOrEqual(("offset",), int() as value):
                return self._take_offsets(0, value + 1)
            case EqualTo(("created_at",), datetime() as moment):
                return self._take_times(moment, _after(moment))
            case GreaterThan(("created_at",), datetime() as moment):
                return self._take_times(_after(moment), None)
            case GreaterThanOrEqual(("created_at",), datetime() as moment):
                return self._take_times(moment, None)
            case LessThan(("created_at",), datetime() as moment):
                return self._take_times(None, moment)
            case LessThanOrEqual(("created_at",), datetime() as moment):
                return self._take_times(None, _after(moment))
        return False

    def cut(self, log: Log, positions: Sequence[Position], spans: Sequence[Span]) -> list[Span]:
        """The parts of spans that pass."""
        left = [
            span
            for span in spans
            if span.queue in self.names.get("queue", {span.queue})
            and span.partition in self.names.get("partition", {span.partition})
        ]
        left = _cut(left, [self.first_offset] * len(left), max)
        if self.end_offset is not None:
            left = _cut(left, [self.end_offset] * len(left), min)
        places = {(position.shard, position.id): position for position in positions}
        for moment, side in ((self.since, max), (self.before, min)):
            if moment is not None and left:
                held = [places[span.shard, span.id] for span in left]
                left = _cut(left, log.offsets_from(held, moment), side)
        return left

    def _take_names(self, name: str, values: set[str]) -> bool:
        self.names[name] = self.names[name] & values if name in self.names else values
        return True

    def _take_offsets(self, first: int, end: int | None) -> bool:
        self.first_offset = max(self.first_offset, first)
        if end is not None:
            self.end_offset = end if self.end_offset is None else min(self.end_offset, end)
        return True

    def _take_times(self, since: datetime | None, before: datetime | None) -> bool:
        if since is not None:
            since = _aware(since)
            self.since = since if self.since is None else max(self.since, since)
        if before is not None:
            before = _aware(before)
            self.before = before if self.before is None else min(self.before, before)
        return True


def _cut(spans: Sequence[Span], offsets: Sequence[int], side: Callable[[int, int], int]) -> list[Span]:
    """Move one side of each span to an offset: `max` moves where it starts, `min` where it ends."""
    moved = [
        replace(span, start=side(span.start, offset)) if side is max else replace(span, end=side(span.end, offset))
        for span, offset in zip(spans, offsets, strict=True)
    ]
    return [span for span in moved if span.count > 0]


def _after(moment: datetime) -> datetime:
    """The next moment: times are stored in whole microseconds."""
    return moment + _TICK if moment < datetime.max.replace(tzinfo=moment.tzinfo) else moment


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


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

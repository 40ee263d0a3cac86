"""Reading in a task: the segments of its spans as record batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from queen.errors import Conflict, SettingsError
from queen.spark.options import Access, ParseMode, ReadOptions
from queen.spark.payloads import PayloadParser, as_struct, check_payload_schema, raise_broken, whole_column
from queen.spark.schemas import CORRUPT_RECORD, MESSAGES
from queen.spark.source.columns import record_batches
from queen.spark.source.logs import Log, SegmentRun, ServerLog, ShardLog, Span
from queen.wire.envelope import Envelope

log = logging.getLogger(__name__)

_WORK_SECONDS: Final = 0.5
"""How long a read works between two pauses. In each, Spark catches up by what its buffers hold, a batch or so: with a
pause after every batch, most of its work would be done in pauses."""
_FIRST_PIECE: Final = 10_000
"""Offsets up to the first pause; from then on it is known how long they take."""
_CORES_PER_TASK: Final = 2
"""What a task at work keeps busy at most: its own process beside PostgreSQL's and Spark's, which work for it."""
_LONGEST_PAUSE: Final = 60.0
"""Spark may stop a query in between."""
_FOR_PARSING: Final = ("queue", "partition", "offset", "payload")


def open_log(access: Access) -> Log:
    """The log that the options name."""
    if access.server is not None:
        return ServerLog(access.server, access.token, access.outage_grace)
    return ShardLog(access.database_urls, access.outage_grace)


class MessageReading:
    """How messages are read: it travels to the workers with each task."""

    def __init__(self, options: ReadOptions, schema: StructType, *, fail_on_data_loss: bool) -> None:
        self._access = options.access
        self._schema = schema
        self._fail_on_data_loss = fail_on_data_loss
        self._parsed_column = options.parsed_column
        # What is no column of a message is a field of its payload, or the struct of all its fields.
        self.own = tuple(name for name in schema.fieldNames() if name in (options.columns or MESSAGES.fieldNames()))
        self._fields = tuple(name for name in schema.fieldNames() if name not in (*self.own, CORRUPT_RECORD))
        self._corrupt = CORRUPT_RECORD in schema.fieldNames()
        self._mode = options.mode
        self._share = options.max_read_share
        _check_columns(schema, self.own)
        check_payload_schema(self._payload_schema())

    def read(self, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        return self._read(spans) if self._share == 1 else paced(self._read, spans, self._share)

    def _read(self, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        segments = self._complete(open_log(self._access).segments(spans), spans)
        envelope = Envelope(self._access.encryption_keys)
        if not self._fields and not self._corrupt:
            return record_batches(segments, spans, self.own, envelope)
        wanted = (*self.own, *(name for name in _FOR_PARSING if name not in self.own))
        return map(self._parse, record_batches(segments, spans, wanted, envelope), repeat(self._parser()))

    def _parser(self) -> PayloadParser:
        return PayloadParser(self._payload_schema())

    def _parse(self, batch: pa.RecordBatch, parser: PayloadParser) -> pa.RecordBatch:
        """The batch with the fields of its payloads."""

        def broken(index: int, why: str) -> None:
            if self._mode is ParseMode.FAILFAST:
                queue, partition, offset = (batch[name][index].as_py() for name in ("queue", "partition", "offset"))
                raise_broken(f"offset {offset} of {queue}/{partition}", why)

        fields, unfit = parser.parse(batch["payload"], broken)
        columns = []
        for name in self._schema.fieldNames():
            if name in self.own:
                columns.append(batch[name])
            elif name == CORRUPT_RECORD:
                columns.append(pc.if_else(pa.array(unfit), batch["payload"], pa.scalar(None, pa.string())))
            elif name == self._parsed_column:
                columns.append(as_struct(fields))
            else:
                columns.append(whole_column(fields, name))
        return pa.RecordBatch.from_arrays(columns, schema=to_arrow_schema(self._schema, timezone="UTC"))

    def _payload_schema(self) -> pa.Schema:
        chosen = [self._schema[name] for name in self._fields]
        if self._parsed_column is not None:
            (parsed,) = chosen
            assert isinstance(parsed.dataType, StructType)
            chosen = parsed.dataType.fields
        return to_arrow_schema(StructType(chosen), timezone="UTC")

    def _complete(self, segments: Iterator[SegmentRun], spans: Sequence[Span]) -> Iterator[SegmentRun]:
        """The segments, while it is checked that none is missing: offsets are dense, until retention removes some."""
        reached = [span.start for span in spans]
        for run in segments:
            before = np.append(reached[run.slot], (run.bases + run.counts)[:-1])
            for gap in np.flatnonzero(run.bases > before):
                self._lost(spans[run.slot], int(before[gap]), int(run.bases[gap]))
            reached[run.slot] = run.end
            yield run
        for span, offset in zip(spans, reached, strict=True):
            if offset < span.end:
                self._lost(span, offset, span.end)

    def _lost(self, span: Span, start: int, end: int) -> None:
        report_loss(f"offsets {start} to {end - 1} of {span.queue}/{span.partition}", fail=self._fail_on_data_loss)


def paced(
    read: Callable[[Sequence[Span]], Iterator[pa.RecordBatch]],
    spans: Sequence[Span],
    share: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[pa.RecordBatch]:
    """The batches, with pauses: what is done with one counts as work too, since PostgreSQL and pushes wait for it.

    Before a pause a piece was read to its end: a statement that waits keeps its snapshot, for which PostgreSQL keeps
    every old version of the rows that pushes update.
    """
    size, left = _FIRST_PIECE, list(reversed(spans))
    while left:
        began = clock()
        yield from read(_take(left, size))
        worked = clock() - began
        sleep(_pause(worked, share))
        size = max(1, int(size * min(2.0, _WORK_SECONDS / max(worked, 1e-3))))


def _take(left: list[Span], size: int) -> list[Span]:
    """The next `size` offsets of what is left, whose last span is the first."""
    piece = []
    while left and size:
        span = left.pop()
        if span.count > size:
            left.append(replace(span, start=span.start + size))
            span = replace(span, end=span.start + size)
        piece.append(span)
        size -= span.count
    return piece


def _pause(worked: float, share: float) -> float:
    return min(worked * _CORES_PER_TASK * (1 / share - 1), _LONGEST_PAUSE)


def _check_columns(schema: StructType, own: Sequence[str]) -> None:
    """A schema that was given instead of the usual one must have the usual types, and every name once."""
    names = schema.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(
            f"the schema has {', '.join(twice)} twice: a field of the payload and a column of the message have the same"
            " name. Name the columns you want with option columns, or use from_json(payload, …)"
        )
    for name in own:
        if schema[name].dataType != MESSAGES[name].dataType or not schema[name].nullable:
            found, right = schema[name].dataType.simpleString(), MESSAGES[name].dataType.simpleString()
            raise SettingsError(f"the schema has {name} as {found}, but it is {right} (and may be null)")


def report_loss(what: str, *, fail: bool) -> None:
    """Messages that were to be read are lost: the query fails, or goes on without them."""
    if fail:
        raise Conflict(
            f"{what} were removed before they were read, by retention or a deletion."
            " Set failOnDataLoss to false to go on without them"
        )
    log.warning("%s were removed before they were read; going on without them (failOnDataLoss is false)", what)

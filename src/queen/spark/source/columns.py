"""From segments to Arrow: columns are made of whole buffers, with no Python object per message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from queen.spark.source.logs import SegmentRun, Span
from queen.spark.source.offsets import Numbers
from queen.wire.envelope import PLAIN, Envelope, EnvelopeError
from queen.wire.segment import DELETED, VERSION, MalformedSegment

ROWS_PER_BATCH: Final = 16_384
BYTES_PER_BATCH: Final = 8 << 20

_HEX: Final = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)
_LOW48: Final = np.uint64((1 << 48) - 1)
_HEADER: Final = np.dtype(
    [("version", "u1"), ("count", "<u4"), ("transactions", "<u4"), ("traces", "<u4"), ("producers", "<u4")]
)
_LENGTHS, _TRANSACTIONS, _TRACES, _PRODUCERS, _PAYLOADS = range(1, 6)
"""What follows the header of a segment, in this order."""

_strings = msgspec.json.Decoder(list[str])
_optional_strings = msgspec.json.Decoder(list[str | None])

Flags = npt.NDArray[np.bool_]


class ColumnBuilder:
    """Opened segments that become one record batch."""

    def __init__(self, spans: Sequence[Span], wanted: Sequence[str]) -> None:
        self._spans = spans
        self._wanted = wanted
        self._runs: list[SegmentRun] = []
        self.rows = 0
        self.nbytes = 0

    def add(self, run: SegmentRun) -> None:
        self._runs.append(run)
        self.rows += int(run.counts.sum())
        self.nbytes += len(run.bodies)

    def finish(self) -> pa.RecordBatch:
        """The columns that are wanted, without messages that were deleted or lie outside of their span."""
        segments = _Segments(self._spans, self._runs)
        columns = [segments.column(name) for name in self._wanted]
        batch = pa.RecordBatch.from_arrays(columns, names=list(self._wanted))
        unwanted = segments.deleted | segments.outside()
        return batch.filter(pa.array(~unwanted)) if unwanted.any() else batch


def opened(run: SegmentRun, spans: Sequence[Span], envelope: Envelope) -> Iterator[SegmentRun]:
    """The run with bodies that are neither compressed nor encrypted: in pieces, since they may be much larger then."""
    if len(run.sizes) == 1:
        # Large segments come one by one: what is done to the vectors of many would cost as much as to open its body.
        yield _with_bodies(run, [_content(run, 0, run.bodies, spans, envelope)])
        return
    starts = np.cumsum(run.sizes) - run.sizes
    if run.sizes.all() and not (np.frombuffer(run.bodies, np.uint8)[starts] != PLAIN).any():
        yield run
        return
    bodies: list[bytes] = []
    first = nbytes = 0
    for place, (start, size) in enumerate(zip(starts.tolist(), run.sizes.tolist(), strict=True)):
        bodies.append(_content(run, place, run.bodies[start : start + size], spans, envelope))
        nbytes += len(bodies[-1])
        if nbytes >= BYTES_PER_BATCH:
            yield _with_bodies(run.part(first, place + 1, b""), bodies)
            first, nbytes, bodies = place + 1, 0, []
    if bodies:
        yield _with_bodies(run.part(first, len(run.sizes), b""), bodies)


def _content(run: SegmentRun, place: int, stored: bytes, spans: Sequence[Span], envelope: Envelope) -> bytes:
    try:
        return envelope.open(stored)
    except EnvelopeError as error:
        raise type(error)(unreadable(spans[run.slot], int(run.bases[place]), error)) from error


def _with_bodies(run: SegmentRun, bodies: Sequence[bytes]) -> SegmentRun:
    """The run with bodies that have been opened."""
    sizes = np.array([*map(len, bodies)], np.int64)
    return SegmentRun(run.slot, run.bases, run.counts, run.micros, sizes, run.first_ids, b"".join(bodies), head=0)


class _Segments:
    """Opened segments, and the columns of their messages."""

    def __init__(self, spans: Sequence[Span], runs: Sequence[SegmentRun]) -> None:
        self._spans = spans
        each = [len(run.bases) for run in runs]
        self._slots = np.repeat(np.array([run.slot for run in runs], np.int64), each)
        self._starts = np.repeat(np.array([spans[run.slot].start for run in runs], np.int64), each)
        self._ends = np.repeat(np.array([spans[run.slot].end for run in runs], np.int64), each)
        self._bases = np.concatenate([run.bases for run in runs])
        self._counts = np.concatenate([run.counts for run in runs])
        self._micros = np.concatenate([run.micros for run in runs])
        self._first_ids = b"".join([run.first_ids for run in runs])
        heads = np.repeat(np.array([run.head for run in runs], np.int64), each)
        sizes = np.concatenate([run.sizes for run in runs])
        self._pieces = self._cut(b"".join([run.bodies for run in runs]), heads, sizes)
        self._rows = int(self._counts.sum())
        ends = np.cumsum(self._counts)
        self._within = np.arange(self._rows, dtype=np.int64) - np.repeat(ends - self._counts, self._counts)
        self._offsets = np.repeat(self._bases, self._counts) + self._within
        self._lengths = np.frombuffer(content(self._piece(_LENGTHS)), np.uint32)
        self.deleted: Flags = self._lengths == DELETED

    def _cut(self, bodies: bytes, heads: Numbers, sizes: Numbers) -> pa.Array:
        """Where the columns of each segment lie in its body, if they fit into it."""
        ends = np.cumsum(sizes)
        starts = ends - sizes + heads
        self._check(sizes >= heads + _HEADER.itemsize, "it is cut short")
        headers = sliding_window_view(np.frombuffer(bodies, np.uint8), _HEADER.itemsize)[starts]
        header = headers.view(_HEADER).reshape(-1)
        self._check(header["version"] == VERSION, "it has an unknown version; it was written by a newer Queen")
        self._check(header["count"] == self._counts, "it holds another number of messages than its row says")
        self._absent = {_TRACES: not header["traces"].any(), _PRODUCERS: not header["producers"].any()}
        cuts = np.empty((len(sizes), 6), np.int64)
        cuts[:, 0] = ends - sizes
        cuts[:, _LENGTHS] = starts + _HEADER.itemsize
        cuts[:, _TRANSACTIONS] = cuts[:, _LENGTHS] + 4 * self._counts
        for place, name in ((_TRACES, "transactions"), (_PRODUCERS, "traces"), (_PAYLOADS, "producers")):
            cuts[:, place] = cuts[:, place - 1] + header[name]
        self._check(cuts[:, -1] <= ends, "it is cut short")
        offsets = np.append(cuts, len(bodies)).astype(np.int32)
        return pa.Array.from_buffers(pa.binary(), cuts.size, [None, pa.py_buffer(offsets), pa.py_buffer(bodies)])

    def _check(self, fine: Flags, why: str) -> None:
        if not fine.all():
            broken = int(np.argmin(fine))
            span = self._spans[self._slots[broken]]
            raise MalformedSegment(unreadable(span, int(self._bases[broken]), why))

    def _piece(self, place: int) -> pa.Array:
        """One column of each segment."""
        return self._pieces.take(pa.array(np.arange(place, len(self._pieces), 6)))

    def column(self, name: str) -> pa.Array:
        counts = self._counts
        match name:
            case "queue":
                return self._repeated([span.queue for span in self._spans])
            case "partition":
                return self._repeated([span.partition for span in self._spans])
            case "offset":
                return pa.array(self._offsets)
            case "message_id":
                return message_ids(self._first_ids, counts, self._within)
            case "transaction_id":
                return self._transaction_ids()
            case "trace_id":
                return self._optional_texts(_TRACES)
            case "created_at":
                return pa.array(np.repeat(self._micros, counts)).cast(pa.timestamp("us", "UTC"))
            case "producer_sub":
                return self._optional_texts(_PRODUCERS)
            case "payload":
                payloads = self._piece(_PAYLOADS)
                lengths = np.where(self.deleted, 0, self._lengths).astype(np.int64)
                sizes = np.add.reduceat(lengths, np.cumsum(counts) - counts)
                self._check(sizes == pc.binary_length(payloads).to_numpy(), "its columns do not fit its body")
                return texts(lengths, content(payloads))
        raise ValueError(f"messages have no column {name}")

    def _repeated(self, names: list[str]) -> pa.Array:
        slots = self._slots
        if (slots == slots[0]).all():
            encoded = names[slots[0]].encode()
            return texts(np.full(self._rows, len(encoded), np.int64), encoded * self._rows)
        return pa.array(names, pa.string()).take(pa.array(np.repeat(slots, self._counts)))

    def _transaction_ids(self) -> pa.Array:
        """From columns that are JSON arrays of strings."""
        columns = self._piece(_TRANSACTIONS)
        joined = content(columns)
        data = np.frombuffer(joined, np.uint8)
        if (data == ord("\\")).any():
            return pa.array([id for column in columns.to_pylist() for id in _strings.decode(column)], pa.string())
        # Without an escape, a quote begins or ends a string: every other one begins one.
        quotes = np.flatnonzero(data == ord('"')).astype(np.int32)
        if len(quotes) != 2 * self._rows:
            raise MalformedSegment("a column of transaction ids is broken")
        offsets = np.zeros(len(quotes) + 1, np.int32)
        offsets[1::2] = quotes[::2] + 1
        offsets[2::2] = quotes[1::2]
        strings = pa.Array.from_buffers(pa.string(), len(quotes), [None, pa.py_buffer(offsets), joined])
        return strings.take(pa.array(np.arange(1, len(quotes), 2)))

    def _optional_texts(self, place: int) -> pa.Array:
        """From columns that are JSON arrays of strings and nulls, or absent when all are null."""
        if self._absent[place]:
            return pa.nulls(self._rows, pa.string())
        values: list[str | None] = []
        for column, count in zip(self._piece(place).to_pylist(), self._counts.tolist(), strict=True):
            values += _optional_strings.decode(column) if column else [None] * count
        return pa.array(values, pa.string())

    def outside(self) -> Flags:
        """Which messages are not of their span: a span may begin and end in the middle of a segment."""
        counts, offsets = self._counts, self._offsets
        if (self._bases >= self._starts).all() and (self._bases + counts <= self._ends).all():
            return np.zeros(len(offsets), np.bool_)
        outside: Flags = (offsets < np.repeat(self._starts, counts)) | (offsets >= np.repeat(self._ends, counts))
        return outside


def message_ids(first_ids: bytes, counts: Numbers, within: Numbers) -> pa.Array:
    """The ids of messages as text: those of a segment count up from its first."""
    first = np.frombuffer(first_ids, np.uint8).reshape(-1, 16)
    rows = len(within)
    # The 20 digits before the last dash are those of the segment; the last 12 count.
    digits = _HEX[first[:, :10]].view(np.uint8).reshape(-1, 20)
    prefix = np.full((len(first), 24), ord("-"), np.uint8)
    for here, there, size in ((0, 0, 8), (8, 9, 4), (12, 14, 4), (16, 19, 4)):
        prefix[:, there : there + size] = digits[:, here : here + size]
    low = np.ascontiguousarray(first[:, 8:]).view(">u8").reshape(-1).astype(np.uint64) & _LOW48
    numbers = np.repeat(low, counts) + within.astype(np.uint64)
    text = np.empty((rows, 36), np.uint8)
    text[:, :24] = np.repeat(prefix, counts, axis=0)
    text[:, 24:] = _HEX[numbers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:]].view(np.uint8).reshape(-1, 12)
    return texts(np.full(rows, 36, np.int64), text)


def texts(lengths: Numbers, data: Any) -> pa.Array:
    """An array of texts that lie one after the other in a buffer."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def content(values: pa.Array) -> pa.Buffer:
    """The bytes of an array of texts or bytes that begins where its buffer does."""
    _, offsets, data = values.buffers()
    size = int(np.frombuffer(offsets, np.int32)[len(values)]) if len(values) else 0
    return data.slice(0, size) if data is not None else pa.py_buffer(b"")


def unreadable(span: Span, base: int, why: object) -> str:
    return f"the segment at offset {base} of {span.queue}/{span.partition} cannot be read: {why}"


def record_batches(
    segments: Iterator[SegmentRun], spans: Sequence[Span], wanted: Sequence[str], envelope: Envelope
) -> Iterator[pa.RecordBatch]:
    """The messages of the segments, many to a batch."""
    builder = ColumnBuilder(spans, wanted)
    for piece in (piece for run in segments for piece in opened(run, spans, envelope)):
        builder.add(piece)
        if builder.rows >= ROWS_PER_BATCH or builder.nbytes >= BYTES_PER_BATCH:
            yield builder.finish()
            builder = ColumnBuilder(spans, wanted)
    if builder.rows:
        yield builder.finish()

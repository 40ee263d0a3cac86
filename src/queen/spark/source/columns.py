"""From segments to Arrow: columns are made of whole buffers, with no Python object per message."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from queen.spark.source.logs import Span, StoredSegment
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.segment import DELETED, HEADER, VERSION, MalformedSegment

ROWS_PER_BATCH: Final = 16_384
BYTES_PER_BATCH: Final = 8 << 20
_SMALL_BODY: Final = 4096

_HEX: Final = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)
_LOW48: Final = np.uint64((1 << 48) - 1)

_strings = msgspec.json.Decoder(list[str])
_optional_strings = msgspec.json.Decoder(list[str | None])

Piece: TypeAlias = bytes | memoryview
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


class ColumnBuilder:
    """Segments that become one record batch."""

    def __init__(self, spans: Sequence[Span], wanted: Sequence[str]) -> None:
        self._spans = spans
        self._wanted = wanted
        self.rows = 0
        self.nbytes = 0
        self._slots: list[int] = []
        self._bases: list[int] = []
        self._counts: list[int] = []
        self._micros: list[int] = []
        self._first_ids: list[bytes] = []
        self._lengths: list[Piece] = []
        self._transactions: list[Piece] = []
        self._traces: list[Piece] = []
        self._producers: list[Piece] = []
        self._payloads: list[Piece] = []

    def add(self, segment: StoredSegment, body: bytes) -> None:
        """Find the columns of a segment, and check that they fit its body."""
        try:
            version, count, transactions, traces, producers = HEADER.unpack_from(body)
        except struct.error as error:
            raise MalformedSegment("it is cut short") from error
        if version != VERSION:
            raise MalformedSegment(f"it has unknown version {version}; it was written by a newer Queen")
        if count != segment.messages:
            raise MalformedSegment(f"it holds {count} messages instead of {segment.messages}")
        # Copies of what is small are cheaper than views of it, which the garbage collector follows.
        content: Piece = body if len(body) < _SMALL_BODY else memoryview(body)
        transactions_at = HEADER.size + 4 * count
        rest_at = transactions_at + transactions
        payloads_at = rest_at + traces + producers
        if payloads_at > len(body):
            raise MalformedSegment("it is cut short")
        self._lengths.append(content[HEADER.size : transactions_at])
        self._transactions.append(content[transactions_at:rest_at])
        self._traces.append(content[rest_at : rest_at + traces] if traces else b"")
        self._producers.append(content[rest_at + traces : payloads_at] if producers else b"")
        self._payloads.append(content[payloads_at:])
        self._slots.append(segment.slot)
        self._bases.append(segment.base_offset)
        self._counts.append(count)
        self._micros.append(segment.created_micros)
        self._first_ids.append(segment.first_id)
        self.rows += count
        self.nbytes += len(body)

    def finish(self) -> pa.RecordBatch:
        """The columns that are wanted, without messages that were deleted or lie outside of their span."""
        counts = np.array(self._counts, np.int64)
        rows = int(counts.sum())
        within = np.arange(rows, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.repeat(np.array(self._bases, np.int64), counts) + within
        lengths = np.frombuffer(b"".join(self._lengths), np.uint32)
        deleted = lengths == DELETED
        columns = [self._column(name, counts, within, offsets, lengths, deleted) for name in self._wanted]
        batch = pa.RecordBatch.from_arrays(columns, names=list(self._wanted))
        unwanted = deleted | self._outside(counts, offsets)
        return batch.filter(pa.array(~unwanted)) if unwanted.any() else batch

    def _column(
        self,
        name: str,
        counts: Numbers,
        within: Numbers,
        offsets: Numbers,
        lengths: npt.NDArray[np.uint32],
        deleted: npt.NDArray[np.bool_],
    ) -> pa.Array:
        match name:
            case "queue":
                return self._repeated([span.queue for span in self._spans], counts)
            case "partition":
                return self._repeated([span.partition for span in self._spans], counts)
            case "offset":
                return pa.array(offsets)
            case "message_id":
                return message_ids(b"".join(self._first_ids), counts, within)
            case "transaction_id":
                return transaction_ids(self._transactions)
            case "trace_id":
                return optional_texts(self._traces, self._counts)
            case "created_at":
                micros = np.repeat(np.array(self._micros, np.int64), counts)
                return pa.array(micros).cast(pa.timestamp("us", "UTC"))
            case "producer_sub":
                return optional_texts(self._producers, self._counts)
            case "payload":
                return texts(np.where(deleted, 0, lengths).astype(np.int64), b"".join(self._payloads))
        raise ValueError(f"messages have no column {name}")

    def _repeated(self, names: list[str], counts: Numbers) -> pa.Array:
        slots = np.array(self._slots, np.int32)
        if (slots == slots[0]).all():
            encoded = names[slots[0]].encode()
            rows = int(counts.sum())
            return texts(np.full(rows, len(encoded), np.int64), encoded * rows)
        return pa.array(names, pa.string()).take(pa.array(np.repeat(slots, counts)))

    def _outside(self, counts: Numbers, offsets: Numbers) -> npt.NDArray[np.bool_]:
        """Which offsets are not of their span: a span may begin and end in the middle of a segment."""
        starts = np.array([self._spans[slot].start for slot in self._slots], np.int64)
        ends = np.array([self._spans[slot].end for slot in self._slots], np.int64)
        bases = np.array(self._bases, np.int64)
        if (bases >= starts).all() and (bases + counts <= ends).all():
            return np.zeros(len(offsets), np.bool_)
        outside: npt.NDArray[np.bool_] = (offsets < np.repeat(starts, counts)) | (offsets >= np.repeat(ends, counts))
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


def transaction_ids(columns: Sequence[Piece]) -> pa.Array:
    """Columns that are JSON arrays of strings, as one array of texts."""
    joined = b",".join([column[1:-1] for column in columns])
    if b"\\" in joined:
        return pa.array(_strings.decode(b"[" + joined + b"]"), pa.string())
    # Without an escape, a quote begins or ends a string: every other one begins one.
    quotes = np.flatnonzero(np.frombuffer(joined, np.uint8) == ord('"'))
    return texts(quotes[1::2] - quotes[::2] - 1, joined[1:-1].replace(b'","', b""))


def optional_texts(columns: Sequence[Piece], counts: Sequence[int]) -> pa.Array:
    """Columns that are JSON arrays of strings and nulls, or absent when all are null."""
    if not any(columns):
        return pa.nulls(sum(counts), pa.string())
    values: list[str | None] = []
    for column, count in zip(columns, counts, strict=True):
        values += _optional_strings.decode(column) if column else [None] * count
    return pa.array(values, pa.string())


def texts(lengths: Numbers, data: Any) -> pa.Array:
    """An array of texts that lie one after the other in a buffer."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    content = pa.py_buffer(data)
    if int(lengths.sum()) != content.size:
        raise MalformedSegment("its columns do not fit its body")
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(ends), content])


def record_batches(
    segments: Iterator[StoredSegment], spans: Sequence[Span], wanted: Sequence[str], envelope: Envelope
) -> Iterator[pa.RecordBatch]:
    """The messages of the segments, many to a batch."""
    builder = ColumnBuilder(spans, wanted)
    for segment in segments:
        try:
            builder.add(segment, envelope.open(segment.body))
        except (EnvelopeError, MalformedSegment) as error:
            span = spans[segment.slot]
            raise type(error)(
                f"the segment at offset {segment.base_offset} of {span.queue}/{span.partition} cannot be read: {error}"
            ) from error
        if builder.rows >= ROWS_PER_BATCH or builder.nbytes >= BYTES_PER_BATCH:
            yield builder.finish()
            builder = ColumnBuilder(spans, wanted)
    if builder.rows:
        yield builder.finish()

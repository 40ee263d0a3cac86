"""The segment: many messages of one partition in one row.

The columns of a segment lie one after the other, so that packing and unpacking are a few calls whatever the number of
messages: payload lengths, transaction ids (a JSON array of strings), trace ids and producers (JSON arrays, absent when
all are null), then the payloads as the producer sent them, never parsed and never encoded again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec
import xxhash

from queen.wire.ids import IdBlock
from queen.wire.times import iso_micros

HEADER = struct.Struct("<BIIII")
VERSION = 1
DELETED = 0xFFFFFFFF

_strings = msgspec.json.Decoder(list[str])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_optional_strings = msgspec.json.Decoder(list[str | None])
_encode = msgspec.json.encode


class MalformedSegment(ValueError):
    """The stored bytes are not a segment this version can read."""


def pack_segment(
    transactions_json: Sequence[bytes],
    payloads: Sequence[bytes | msgspec.Raw],
    trace_ids: Sequence[str | None] | None = None,
    producers: Sequence[str | None] | None = None,
    *,
    lengths: Sequence[int] | None = None,
) -> bytes:
    """Lay out the columns of one segment.

    Transaction ids come as JSON strings, because the answer to the push needs them in that form too. `trace_ids` and
    `producers` are None when every one of them is. `lengths` are those of the payloads, if they are known already.
    """
    transactions = b"[" + b",".join(transactions_json) + b"]"
    traces = _encode(trace_ids) if trace_ids else b""
    subjects = _encode(producers) if producers else b""
    if lengths is None:
        # memoryview, because a msgspec.Raw has a buffer but no len().
        lengths = [memoryview(payload).nbytes for payload in payloads]
    sizes = array("I", lengths).tobytes()
    header = HEADER.pack(VERSION, len(payloads), len(transactions), len(traces), len(subjects))
    return b"".join((header, sizes, transactions, traces, subjects, *payloads))


class Segment:
    """A segment as it was read: where it starts, when it was stored, and its messages on demand."""

    __slots__ = (
        "_body",
        "_created",
        "_lengths",
        "_producers",
        "_raw_transactions",
        "_starts",
        "_trace_ids",
        "base_offset",
        "block",
        "count",
        "created_at",
    )

    def __init__(self, base_offset: int, created_at: datetime, block: IdBlock, body: bytes) -> None:
        try:
            version, count, *_ = HEADER.unpack_from(body)
        except struct.error as error:
            raise MalformedSegment(f"segment at offset {base_offset} is cut short") from error
        if version != VERSION:
            raise MalformedSegment(f"segment at offset {base_offset} has unknown version {version}")
        self.count: int = count
        self.base_offset = base_offset
        self.created_at = created_at
        self.block = block
        self._body = body
        # The columns are found when first needed: most segments that a worker stores are read by another.
        self._starts: list[int] | None = None
        self._created: bytes | None = None

    def check(self) -> None:
        """Raises `MalformedSegment` unless the columns fit the body."""
        self._find_columns()

    def _find_columns(self) -> list[int]:
        body, count = self._body, self.count
        _, _, transactions, traces, producers = HEADER.unpack_from(body)
        at = HEADER.size + 4 * count + transactions + traces + producers
        if at > len(body):
            raise MalformedSegment(f"segment at offset {self.base_offset} is cut short")
        lengths = array("I")
        lengths.frombytes(body[HEADER.size : HEADER.size + 4 * count])
        starts = list(accumulate((n % DELETED for n in lengths) if DELETED in lengths else lengths, initial=at))
        if starts[-1] != len(body):
            raise MalformedSegment(f"segment at offset {self.base_offset} is cut short")
        try:
            at -= producers
            self._producers = _optional_strings.decode(body[at : at + producers]) if producers else None
            at -= traces
            self._trace_ids = _optional_strings.decode(body[at : at + traces]) if traces else None
            transactions_json = self.transactions_json
            if not transactions_json.isascii():
                transactions_json.decode()
            self._raw_transactions = _raws.decode(transactions_json)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedSegment(f"segment at offset {self.base_offset} has a broken column") from error
        if (
            len(self._raw_transactions) != count
            or (self._trace_ids is not None and len(self._trace_ids) != count)
            or (self._producers is not None and len(self._producers) != count)
        ):
            raise MalformedSegment(f"segment at offset {self.base_offset} has a column of another length")
        self._lengths = lengths
        self._starts = starts
        return starts

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def nbytes(self) -> int:
        """Roughly what the segment holds in memory."""
        return len(self._body) + 160 * self.count + 500

    @property
    def transactions_json(self) -> bytes:
        """The column of transaction ids as stored, for `decode_transactions`."""
        at = HEADER.size + 4 * self.count
        return self._body[at : at + HEADER.unpack_from(self._body)[2]]

    @staticmethod
    def decode_transactions(column: bytes) -> list[str]:
        return _strings.decode(column)

    def transaction_ids(self) -> list[str]:
        try:
            return _strings.decode(self.transactions_json)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedSegment(f"segment at offset {self.base_offset} has a broken column") from error

    def is_deleted(self, index: int) -> bool:
        if self._starts is None:
            self._find_columns()
        return self._lengths[index] == DELETED

    def payload(self, index: int) -> bytes:
        starts = self._starts or self._find_columns()
        return self._body[starts[index] : starts[index + 1]]

    def trace_id(self, index: int) -> str | None:
        if self._starts is None:
            self._find_columns()
        return self._trace_ids[index] if self._trace_ids else None

    def producer(self, index: int) -> str | None:
        if self._starts is None:
            self._find_columns()
        return self._producers[index] if self._producers else None

    def without(self, *indexes: int) -> bytes:
        """The segment packed again with some messages taken out; offsets and ids of the others stay."""
        if self._starts is None:
            self._find_columns()
        count = self.count
        gone = set(indexes)
        payloads = [b"" if i in gone else self.payload(i) for i in range(count)]
        transactions = [_encode(transaction_id) for transaction_id in self.transaction_ids()]
        packed = bytearray(pack_segment(transactions, payloads, self._trace_ids, self._producers))
        for i in range(count):
            if i in gone or self.is_deleted(i):
                struct.pack_into("<I", packed, HEADER.size + 4 * i, DELETED)
        return bytes(packed)

    def render(self, first: int, last: int, tail: bytes, out: list[bytes]) -> int:
        """Append the JSON of messages [first, last) to `out`, each ended by `tail`; returns how many there were.

        `tail` is the JSON after `createdAt`: what is the same for every message of one delivery.
        """
        starts = self._starts or self._find_columns()
        transactions, body, low = self._raw_transactions, self._body, self.block.low
        head = b'{"id":"' + self.block.prefix
        if self._created is None:
            self._created = iso_micros(self.created_at).encode()
        created = b',"createdAt":"%b"%b' % (self._created, tail)
        if self._trace_ids is None and self._producers is None and DELETED not in self._lengths:
            end = b',"producerSub":null' + created
            out += [
                b'%b%012x","transactionId":%b,"traceId":null,"data":%b%b'
                % (head, low + i, transactions[i], body[starts[i] : starts[i + 1]], end)
                for i in range(first, last)
            ]
            return last - first
        before = len(out)
        for i in range(first, last):
            if self._lengths[i] == DELETED:
                continue
            out.append(
                b'%b%012x","transactionId":%b,"traceId":%b,"data":%b,"producerSub":%b%b'
                % (
                    head,
                    low + i,
                    transactions[i],
                    _encode(self.trace_id(i)),
                    self.payload(i),
                    _encode(self.producer(i)),
                    created,
                )
            )
        return len(out) - before


MEDIA_TYPE: Final = "application/vnd.queen.segments"
_HEAD: Final = struct.Struct("<qIq16sI")


class Frame(NamedTuple):
    """One segment."""

    base_offset: int
    messages: int
    created_micros: int
    first_id: bytes
    body: bytes


def encode_frame(frame: Frame) -> bytes:
    base, messages, micros, first_id, body = frame
    return _HEAD.pack(base, messages, micros, first_id, len(body)) + body


def decode_frames(data: bytes) -> Iterator[Frame]:
    """Raises ValueError when the last frame is cut short."""
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError("the last segment is cut short")
        base, messages, micros, first_id, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + size > len(data):
            raise ValueError("the last segment is cut short")
        yield Frame(base, messages, micros, first_id, data[at : at + size])
        at += size


def transaction_hash(transaction_id: str, partition_id: int) -> int:
    """The 64-bit hash of a transaction id within its partition, the same in every process."""
    return xxhash.xxh3_64_intdigest(transaction_id.encode(), partition_id)

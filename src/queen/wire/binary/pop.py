"""The framed answer of a pop (`QPF1`): messages as binary records, for clients that ask with `frames=true`.

    "QPF1" 1 length JSON, queue, leaseId, consumerGroup, how many partitions; of each: its id and name, the first and
    the last offset, the attempt, how many records; of each record: offset of its first message, microseconds since
    1970, how many messages, codec (0: as they are, 1: zstd), length, bytes

Integers are little-endian; names are preceded by their length in 16 bits. The JSON object has what the other answer has
beside messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import zstandard

from queen.wire.segment import Segment

MAGIC: Final = b"QPF1"
MEDIA_TYPE: Final = b"application/x-queen-pop"

_TRACE, _PRODUCER = 1, 2
_COMPRESSED_FROM: Final = 1024
"""What is smaller is sent as it is."""
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_SPAN: Final = struct.Struct("<QQII")
_RECORD: Final = struct.Struct("<QqIBI")


class Delivered(NamedTuple):
    """Messages of one partition, from one offset to before another."""

    partition_id: int
    partition: str
    start: int
    end: int
    attempt: int
    segments: Iterable[Segment]


def encode_frames(queue: str, lease_id: str, group: str, own: bytes, delivered: Iterable[Delivered]) -> bytes | None:
    """The answer; `own` is a JSON object, or empty. None when there is no message in it."""
    compressor = zstandard.ZstdCompressor(level=1)
    claims: list[bytes] = []
    some = False
    for one in delivered:
        records = [
            _record(compressor, base, segment, count, data)
            for segment in one.segments
            for base, count, data in _runs(segment, one.start, one.end)
        ]
        some = some or bool(records)
        span = _SPAN.pack(one.start, max(one.start, one.end - 1), one.attempt, len(records))
        claims.append(b"".join((struct.pack("<Q", one.partition_id), _text(one.partition), span, *records)))
    if not some:
        return None
    head = (MAGIC, b"\x01", _U32.pack(len(own)), own, _text(queue), _text(lease_id), _text(group))
    return b"".join((*head, _U32.pack(len(claims)), *claims))


def _record(compressor: zstandard.ZstdCompressor, base: int, segment: Segment, count: int, data: bytes) -> bytes:
    codec = int(len(data) >= _COMPRESSED_FROM)
    if codec:
        data = compressor.compress(data)
    micros = int(segment.created_at.timestamp() * 1_000_000)
    return _RECORD.pack(base, micros, count, codec, len(data)) + data


def _runs(segment: Segment, start: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """The messages of a segment without those that were deleted: the offset of each run, how many, and their bytes."""
    base = segment.base_offset
    prefix = bytes.fromhex(segment.block.prefix.decode().replace("-", ""))
    transactions = segment.transaction_ids()
    run: list[bytes] = []
    first, last = max(0, start - base), min(segment.count, end - base)
    for i in range(first, last):
        if segment.is_deleted(i):
            if run:
                yield base + i - len(run), len(run), b"".join(run)
            run = []
            continue
        message_id = prefix + (segment.block.low + i).to_bytes(6, "big")
        trace, producer = segment.trace_id(i), segment.producer(i)
        flags = (_TRACE if trace else 0) | (_PRODUCER if producer else 0)
        frame = b"".join(
            (
                bytes((flags,)),
                message_id,
                bytes.fromhex(trace.replace("-", "")) if trace else b"",
                _text(transactions[i]),
                _text(producer) if producer else b"",
                segment.payload(i),
            )
        )
        run.append(_U32.pack(len(frame)) + frame)
    if run:
        yield base + last - len(run), len(run), b"".join(run)


def _text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data

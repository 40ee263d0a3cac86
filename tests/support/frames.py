"""Binary pushes as clients encode them, and framed answers of pops as they read them."""

from __future__ import annotations

import io
import struct
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import zstandard


@dataclass
class Group:
    """Messages of one partition: a transaction id (empty: none) and a payload each."""

    queue: str
    partition: str
    messages: list[tuple[str, bytes]]


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text.encode())) + text.encode()


def binary_push(groups: list[Group], *, compress: bool = False, counts: bool = False, named: bool = True) -> bytes:
    body = struct.pack("<I", len(groups))
    for group in groups:
        body += _text(group.queue) + _text(group.partition) + struct.pack("<I", len(group.messages))
        for transaction_id, payload in group.messages:
            body += (_text(transaction_id) if named else b"") + struct.pack("<I", len(payload)) + payload
    flags = (1 if compress else 0) | (2 if counts else 0) | (4 if named else 0)
    if compress:
        body = struct.pack("<I", len(body)) + zstandard.compress(body, 1)
    return b"QPB1" + bytes([flags]) + body


def _frame_groups(groups: list[Group]) -> bytes:
    out = struct.pack("<I", len(groups))
    for group in groups:
        frames = b""
        for transaction_id, payload in group.messages:
            message_id = uuid.uuid4()
            record = b"\0" + message_id.bytes + _text(transaction_id or str(message_id)) + payload
            frames += struct.pack("<I", len(record)) + record
        packed = zstandard.compress(frames, 1)
        out += _text(group.queue) + _text(group.partition)
        out += struct.pack("<II", len(group.messages), len(packed)) + packed
    return out


def framed_push(groups: list[Group], *, counts: bool = False) -> bytes:
    return b"QPB1" + bytes([8 | (2 if counts else 0)]) + _frame_groups(groups)


def framed_transaction(head: bytes, groups: list[Group], *, counts: bool = False) -> bytes:
    return b"QTB1" + bytes([2 if counts else 0]) + struct.pack("<I", len(head)) + head + _frame_groups(groups)


def read_frames(data: bytes) -> dict[str, Any]:
    """What a framed answer says; raises when it is not whole."""
    answer = io.BytesIO(data)

    def take(layout: str, source: io.BytesIO = answer) -> Any:
        return struct.unpack("<" + layout, source.read(struct.calcsize("<" + layout)))

    def text(source: io.BytesIO = answer) -> str:
        return source.read(take("H", source)[0]).decode()

    assert answer.read(5) == b"QPF1\x01"
    own = answer.read(take("I")[0])
    found: dict[str, Any] = msgspec.json.decode(own) if own else {}
    found |= {"queue": text(), "leaseId": text(), "consumerGroup": text(), "messages": []}
    for _ in range(take("I")[0]):
        partition_id, partition = take("Q")[0], text()
        start, end, attempt, records = take("QQII")
        for _ in range(records):
            base, micros, count, codec, length = take("QqIBI")
            raw = answer.read(length)
            frames = io.BytesIO(zstandard.decompress(raw) if codec else raw)
            for i in range(count):
                record = io.BytesIO(frames.read(take("I", frames)[0]))
                flags = record.read(1)[0]
                message: dict[str, Any] = {
                    "id": str(uuid.UUID(bytes=record.read(16))),
                    "traceId": str(uuid.UUID(bytes=record.read(16))) if flags & 1 else None,
                    "transactionId": text(record),
                    "producerSub": text(record) if flags & 2 else None,
                    "partitionId": str(partition_id),
                    "partition": partition,
                    "offset": base + i,
                    "deliveryAttempt": attempt,
                    "leaseId": found["leaseId"],
                    "micros": micros,
                }
                assert start <= base + i <= end
                found["messages"].append(message | {"data": msgspec.json.decode(record.read())})
            assert not frames.read()
    assert not answer.read()
    return found

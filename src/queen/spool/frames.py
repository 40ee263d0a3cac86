"""The format of a spool file: a header with the id of the file, then frames.

A frame is a mark, the length and the checksum of its body, and the body. The checksum is seeded with the file's id, so
that bytes which only look like a frame, in a payload or from another file, are not taken for one.
"""

from __future__ import annotations

import os
import struct
import uuid

import xxhash

_SIGNATURE = b"QUEENSP1"
_FRAME = struct.Struct("<4sIQ")
_MARK = b"\xf5Qr\n"
HEADER_BYTES = len(_SIGNATURE) + 16
FRAME_BYTES = _FRAME.size


def file_header(file_id: uuid.UUID) -> bytes:
    return _SIGNATURE + file_id.bytes


def parse_header(data: bytes) -> uuid.UUID | None:
    """The id of a file, or None when it does not begin like a spool file."""
    if len(data) < HEADER_BYTES or not data.startswith(_SIGNATURE):
        return None
    return uuid.UUID(bytes=data[len(_SIGNATURE) : HEADER_BYTES])


def frame(body: bytes, file_id: uuid.UUID) -> bytes:
    return _FRAME.pack(_MARK, len(body), _checksum(body, file_id)) + body


def read_frame(file: int, at: int, size: int, file_id: uuid.UUID) -> bytes | None:
    """The body of the frame at a position of an open file of that size, or None when no whole frame is there."""
    head = os.pread(file, FRAME_BYTES, at)
    if len(head) < FRAME_BYTES:
        return None
    mark, length, checksum = _FRAME.unpack(head)
    if mark != _MARK or at + FRAME_BYTES + length > size:
        return None
    body = os.pread(file, length, at + FRAME_BYTES)
    return body if len(body) == length and _checksum(body, file_id) == checksum else None


def find_frame(file: int, after: int, size: int, file_id: uuid.UUID) -> int:
    """Where the next whole frame begins after a position; the size of the file when there is none."""
    rest = os.pread(file, max(0, size - after), after)
    at = rest.find(_MARK, 1)
    while at >= 0:
        if read_frame(file, after + at, size, file_id) is not None:
            return after + at
        at = rest.find(_MARK, at + 1)
    return size


def _checksum(body: bytes, file_id: uuid.UUID) -> int:
    return xxhash.xxh3_64_intdigest(body, file_id.int & 0xFFFF_FFFF_FFFF_FFFF)

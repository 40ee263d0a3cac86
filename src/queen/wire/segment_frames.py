"""Segments one after the other, as they travel to those who read whole logs: a frame each, and nothing around them.

A frame is its head (base offset, messages, microseconds since 1970, first message id, bytes of the body; little-endian)
and the body as `Envelope.seal` makes it without encryption.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

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

"""What hosts send each other: events and signs of life, many of them in one packet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

import msgspec

Event: TypeAlias = tuple[str, int, int, int, int, str]
"""(kind, queue id, partition id, group id, number, name); this package does not care what the kinds mean."""

ROUTE = "/internal/api/events"
"""Where a host takes packets over HTTP."""

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# What a packet takes beside its events: the frame, the signature, and the fields before them.
_OVERHEAD = 96


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """A sign of life. `to` is the address it was sent to, so that a host that is its own peer recognises itself."""

    name: str
    to: str
    leaving: bool = False


class Packet(msgspec.Struct, array_like=True):
    """One message from a worker of one host to another host."""

    boot: _Number
    """The host, since it was started; all its workers say the same."""
    sender: _Number
    """The worker process."""
    sequence: _Number
    """Grows with every packet of a sender."""
    sent_ms: _Number
    events: list[tuple[str, _Number, _Number, _Number, _Number, str]] = []
    heartbeat: Heartbeat | None = None


class _Outgoing(msgspec.Struct, array_like=True):
    """A packet whose events are encoded already."""

    boot: int
    sender: int
    sequence: int
    sent_ms: int
    events: list[msgspec.Raw]
    heartbeat: Heartbeat | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def encode_events(events: Iterable[Event], room: int) -> Iterator[list[msgspec.Raw]]:
    """Events in portions, each of which makes a packet of at most `room` bytes; a larger event goes alone."""
    some: list[msgspec.Raw] = []
    left = room - _OVERHEAD
    for event in events:
        encoded = _encoder.encode(event)
        if some and len(encoded) > left:
            yield some
            some, left = [], room - _OVERHEAD
        some.append(msgspec.Raw(encoded))
        left -= len(encoded)
    if some:
        yield some


def encode_packet(
    boot: int, sender: int, sequence: int, sent_ms: int, events: list[msgspec.Raw], heartbeat: Heartbeat | None
) -> bytes:
    return _encoder.encode(_Outgoing(boot, sender, sequence, sent_ms, events, heartbeat))


def decode_packet(body: bytes) -> Packet:
    """Raises msgspec.DecodeError (ValidationError is one) for anything but a packet."""
    return _decoder.decode(body)

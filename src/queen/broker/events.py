"""What workers tell each other: that something can be popped, that something they may remember has changed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class EventKind(StrEnum):
    PUSHED = "p"
    """(queue id, partition id, messages added)"""
    FREED = "f"
    """(queue id, partition id, group id, messages waiting): a lease ended"""
    PARTITION_CHANGED = "s"
    """(queue id, partition id): messages in the middle of it were removed"""
    QUEUE_CHANGED = "c"
    """(queue name): its options were replaced, or it was made"""
    QUEUE_GONE = "d"
    """(queue name)"""
    GROUP_CHANGED = "g"
    """(group name): its cursors were moved or removed"""


Event = tuple[str, int, int, int, int, str]

_decode = msgspec.msgpack.Decoder(list[Event]).decode
_encode = msgspec.msgpack.Encoder().encode


def pushed(queue_id: int, partition_id: int, count: int) -> Event:
    return (EventKind.PUSHED.value, queue_id, partition_id, 0, count, "")


def freed(queue_id: int, partition_id: int, group_id: int, available: int) -> Event:
    return (EventKind.FREED.value, queue_id, partition_id, group_id, available, "")


def partition_changed(queue_id: int, partition_id: int) -> Event:
    return (EventKind.PARTITION_CHANGED.value, queue_id, partition_id, 0, 0, "")


def named(kind: EventKind, name: str) -> Event:
    return (kind.value, 0, 0, 0, 0, name)


def encode_events(events: Iterable[Event]) -> bytes:
    return _encode(list(events))


def decode_events(datagram: bytes) -> list[Event]:
    """Raises msgspec.DecodeError or msgspec.ValidationError for anything but what `encode_events` makes."""
    return _decode(datagram)

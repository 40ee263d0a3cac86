"""The events that workers notify each other of, and their encoding on the bus."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from queen.bus.packets import Event as Event


class EventKind(StrEnum):
    PUSHED = "p"
    """(queue id, partition id, messages added)"""
    FREED = "f"
    """(queue id, partition id, group id, messages waiting): a lease ended"""
    HELD = "h"
    """(queue id, partition id, group id, milliseconds): a lease began"""
    TAKEN = "k"
    """(queue id, partition id, group id): all that a worker saw in it was consumed at once"""
    PARTITION_CHANGED = "s"
    """(queue id, partition id): messages in the middle of it were removed"""
    PARTITION_GONE = "x"
    """(queue id, partition id): it was empty and unused, and was removed"""
    QUEUE_CHANGED = "c"
    """(queue name, 1 when it was made): its options were replaced, it was paused or resumed, or it was made"""
    QUEUE_GONE = "d"
    """(queue name)"""
    APPEND_LOCK_WANTED = "w"
    """a worker waits for the append lock"""
    APPEND_LOCK_RELEASED = "t"
    """a worker has released the append lock"""
    GROUP_CHANGED = "g"
    """(group name, number of the change): its cursors were moved or removed"""
    RESCAN = "l"
    """(queue id): there may be messages without a PUSHED event"""
    MODES_CHANGED = "m"
    """a maintenance mode was switched on or off"""
    TOPIC_DUE = "e"
    """(milliseconds, namespace and topic): it has items that are due after this time"""
    TOPIC_CHANGED = "o"
    """(namespace and topic): its options were replaced, or it is gone"""
    QUOTAS_CHANGED = "q"
    """the quota of a namespace was changed"""
    TOPIC_MODES_CHANGED = "n"
    """the write mode of a namespace was changed"""
    EPHEMERAL_PUSHED = "v"
    """(queue name): an ephemeral queue has messages"""
    TOPICS_BUFFERED = "b"
    """items lie in the log of this host, and wait to be flushed"""


HOST_ONLY = frozenset(
    {
        EventKind.HELD.value,
        EventKind.TAKEN.value,
        EventKind.APPEND_LOCK_WANTED.value,
        EventKind.APPEND_LOCK_RELEASED.value,
        EventKind.TOPICS_BUFFERED.value,
    }
)
"""Neither sent to other hosts nor accepted from them: that a lease began could arrive after it has ended."""


class Datagram(msgspec.Struct, array_like=True):
    """One message on the bus: events, and the hashes of pushed transaction ids, so that others need not read them."""

    events: list[Event]
    spans: list[tuple[int, int, int]] = []
    """(partition id, first offset, messages) of each run of ids in `hashes`."""
    hashes: bytes = b""
    """8 bytes for each transaction id."""


_decoder = msgspec.msgpack.Decoder(Datagram)
_encoder = msgspec.msgpack.Encoder()

# `value` is a call, and these are sent with every push, pop and ack.
_PUSHED, _FREED = EventKind.PUSHED.value, EventKind.FREED.value
_HELD, _TAKEN = EventKind.HELD.value, EventKind.TAKEN.value


def pushed(queue_id: int, partition_id: int, count: int) -> Event:
    return (_PUSHED, queue_id, partition_id, 0, count, "")


def freed(queue_id: int, partition_id: int, group_id: int, available: int) -> Event:
    return (_FREED, queue_id, partition_id, group_id, available, "")


def held(queue_id: int, partition_id: int, group_id: int, seconds: float) -> Event:
    return (_HELD, queue_id, partition_id, group_id, int(seconds * 1000), "")


def taken(queue_id: int, partition_id: int, group_id: int) -> Event:
    return (_TAKEN, queue_id, partition_id, group_id, 0, "")


def partition_changed(queue_id: int, partition_id: int) -> Event:
    return (EventKind.PARTITION_CHANGED.value, queue_id, partition_id, 0, 0, "")


def partition_gone(queue_id: int, partition_id: int) -> Event:
    return (EventKind.PARTITION_GONE.value, queue_id, partition_id, 0, 0, "")


def named(kind: EventKind, name: str, change: int = 0) -> Event:
    """`change` is its number in the change log, if it is there; of a queue, 1 when it was made."""
    return (kind.value, 0, 0, 0, change, name)


def rescan(queue_id: int) -> Event:
    return (EventKind.RESCAN.value, queue_id, 0, 0, 0, "")


def topic_due(name: str, seconds: float) -> Event:
    # Rounded up: to look too early is to look twice.
    return (EventKind.TOPIC_DUE.value, 0, 0, 0, math.ceil(max(seconds, 0.0) * 1000), name)


def signal(kind: EventKind) -> Event:
    return (kind.value, 0, 0, 0, 0, "")


def encode_datagram(datagram: Datagram) -> bytes:
    return _encoder.encode(datagram)


def decode_datagram(data: bytes) -> Datagram:
    """Raises msgspec.DecodeError or msgspec.ValidationError for anything but what `encode_datagram` makes."""
    return _decoder.decode(data)

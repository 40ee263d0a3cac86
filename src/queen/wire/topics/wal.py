"""Buffered items as records of the log on disk, with the ids that were answered."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from queen.wire.topics.requests import EnqueueItem


class WalItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One item; `topic` is its place in the batch's list of topics."""

    id: int
    topic: int
    priority: int
    deliver_after: datetime | None
    delay: float | None
    ttl: float | None
    is_json: bool
    metadata: bytes | None
    payload: bytes


class WalBatch(msgspec.Struct, array_like=True, frozen=True):
    """Items that were accepted together, by one worker."""

    boot: str
    """The boot id of the machine, within which `ticks` are comparable; empty where it is unknown."""
    ticks: float
    """When they were accepted, by the monotonic clock, in seconds."""
    topics: list[tuple[str, str]]
    items: list[WalItem]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WalBatch)


def make_batch(boot: str, ticks: float, items: Iterable[EnqueueItem], ids: Iterable[int]) -> WalBatch:
    """The batch of valid items that were given these ids."""
    topics: dict[tuple[str, str], int] = {}
    kept = [
        WalItem(
            id,
            topics.setdefault((item.namespace, item.topic), len(topics)),
            item.priority or 0,
            item.deliver_after,
            item.delay,
            item.ttl,
            item.is_json,
            item.stored_metadata,
            item.stored_payload,
        )
        for item, id in zip(items, ids, strict=True)
    ]
    return WalBatch(boot, ticks, list(topics), kept)


def encode_batch(batch: WalBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> WalBatch:
    """Raises msgspec.DecodeError (or ValidationError, which is one) for anything but what `encode_batch` makes."""
    return _decoder.decode(data)

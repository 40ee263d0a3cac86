"""A record of the spool: messages that become a segment, with the message ids that were answered for them."""

from __future__ import annotations

import msgspec
import xxhash

BUCKETS = 4096
UNNUMBERED = 1 << 62
"""The order of a record that has none yet; encoded, it is as long as any other."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Messages of one partition that become one segment, or less where some turn out to be duplicates."""

    order: int
    """Its place among the records of all workers of the host."""
    at: float
    """When it was accepted, in seconds since 1970."""
    queue: str
    partition: str
    block: bytes
    """The id of its first message; the others follow by counting."""
    count: int
    tried: list[bytes]
    """First message ids of segments in which an earlier attempt of unknown outcome may have stored its messages."""
    sealed: bytes
    """The messages: a segment body, compressed, and encrypted when the server has a key."""
    reason: str = ""
    """Why it was quarantined."""

    @property
    def bucket(self) -> int:
        return bucket_of(self.queue, self.partition)


def bucket_of(queue: str, partition: str) -> int:
    """The counter of the shared state that stands for a partition (and for a few others)."""
    return xxhash.xxh3_64_intdigest(f"{queue}\0{partition}".encode()) % BUCKETS


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Raises msgspec.DecodeError (or ValidationError, which is one) for anything but what `encode_record` makes."""
    return _decoder.decode(data)

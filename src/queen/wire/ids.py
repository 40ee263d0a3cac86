"""Identifiers: message ids, partition ids, lease ids and item ids.

Message ids are UUIDv7 given out in blocks: the ids of one segment are `block.first`, `block.first + 1`, …, so a
segment stores 16 bytes for all of them. Partition ids and lease ids carry the number of the partition's row, so an ack
or a renewal finds it without a look-up; which shard made a partition is part of that number (`wire.shards`).
"""

from __future__ import annotations

import os
import random
import re
import time
import uuid
from collections.abc import Callable
from typing import Final

_PARTITION_TAG = "51756565"
# The tag and the middle say that it is ours; the top bit of the rest is always set.
_PARTITION_UUID = re.compile(
    rf"{_PARTITION_TAG}-0000-8000-([89a-f][0-9a-f]{{3}})-([0-9a-f]{{12}})", re.ASCII | re.IGNORECASE
)
_LOW48 = (1 << 48) - 1
_PARTITION_BITS = 41
_LEASE_RANDOM_BITS = 20


class IdBlock:
    """A run of consecutive message ids: 24 characters they share, and the first value of the last 12 digits."""

    # Not a dataclass: one is made for every segment, and a frozen one takes three times as long to make.
    __slots__ = ("low", "prefix")

    def __init__(self, prefix: bytes, low: int) -> None:
        self.prefix = prefix
        self.low = low

    @classmethod
    def parse(cls, raw: bytes) -> IdBlock:
        """Read a block from the 16 bytes it is stored as."""
        digits = raw.hex()
        prefix = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-"
        return cls(prefix.encode(), int.from_bytes(raw[10:16], "big"))

    def pack(self) -> bytes:
        return bytes.fromhex(self.prefix.replace(b"-", b"").decode()) + self.low.to_bytes(6, "big")

    def behind(self, count: int) -> IdBlock:
        """The block without its first `count` ids."""
        return IdBlock(self.prefix, self.low + count) if count else self

    def text(self, index: int) -> str:
        """The id of the message at `index`, as the client sees it."""
        return f"{self.prefix.decode()}{self.low + index:012x}"


class IdSource:
    """Makes UUIDv7 values that never go backwards inside one process."""

    __slots__ = ("_last_ms", "_low", "_noise", "_prefix", "_sequence")

    def __init__(self) -> None:
        self._last_ms = 0
        self._sequence = 0
        self._prefix = b""
        self._low = 0
        # Seeded by the system once; asking it for every id would cost more than the id.
        self._noise = random.Random(os.urandom(32)).getrandbits

    def block(self, count: int) -> IdBlock:
        """A fresh block of that many message ids. Blocks of one millisecond follow each other without a gap."""
        if time.time_ns() // 1_000_000 != self._last_ms or not self._prefix:
            self._begin_prefix()
        low = self._low
        self._low += count
        return IdBlock(self._prefix, low)

    def _begin_prefix(self) -> None:
        ms, sequence = self._tick()
        noise = self._noise(64)
        variant = 0x8000 | (noise >> 50) & 0x3FFF
        self._prefix = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{sequence:03x}-{variant:04x}-".encode()
        # Starting below 2^47 leaves more room than a millisecond can use.
        self._low = noise & (_LOW48 >> 1)

    def lease(self, partition_id: int, *, several: bool) -> str:
        """A lease id that names the (first) partition it holds and says whether it holds more than one."""
        ms, sequence = self._tick()
        noise = self._noise(_LEASE_RANDOM_BITS)
        tail = (partition_id & ((1 << _PARTITION_BITS) - 1)) << _LEASE_RANDOM_BITS | noise
        tail |= (0b101 if several else 0b100) << 61
        return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{sequence:03x}-{tail >> 48:04x}-{tail & _LOW48:012x}"

    def uuid(self) -> str:
        """One UUIDv7 as text."""
        return self.block(1).text(0)

    def _tick(self) -> tuple[int, int]:
        now = time.time_ns() // 1_000_000
        if now > self._last_ms:
            self._last_ms, self._sequence = now, 0
        elif self._sequence == 0xFFF:
            self._last_ms, self._sequence = self._last_ms + 1, 0
        else:
            self._sequence += 1
        return self._last_ms, self._sequence


_LONGEST_NUMBER: Final = 19


def partition_uuid(partition_id: int) -> str:
    """The public id of a partition: a UUID (version 8) that names its row."""
    tail = 1 << 63 | partition_id
    return f"{_PARTITION_TAG}-0000-8000-{tail >> 48:04x}-{tail & _LOW48:012x}"


def parse_partition_uuid(text: str) -> int | None:
    """The partition of a public partition id, or None when the text is not one of ours."""
    found = _PARTITION_UUID.fullmatch(text)
    if found is None:
        # Framed answers have partitions as numbers.
        return int(text) if len(text) < _LONGEST_NUMBER and text.isascii() and text.isdecimal() else None
    high, low = found.groups()
    return (int(high, 16) << 48 | int(low, 16)) & ~(1 << 63)


def partition_number(text: str) -> int:
    """The partition that a public id names; 0, which no partition has, when it is not one."""
    return parse_partition_uuid(text) or 0


def parse_lease(text: str) -> tuple[int, bool] | None:
    """(first partition, holds several) of a lease id, or None when the text is not one of ours."""
    if len(text) != 36 or text[14] != "7":
        return None
    try:
        tail = int(text[19:23] + text[24:], 16)
    except ValueError:
        return None
    return tail >> _LEASE_RANDOM_BITS & ((1 << _PARTITION_BITS) - 1), bool(tail >> 61 & 1)


def lease_partition(text: str) -> int:
    """The first partition that a lease id names; 0, which no partition has, when it is not one."""
    place = parse_lease(text) if is_uuid(text) else None
    return place[0] if place is not None else 0


def is_uuid(text: str) -> bool:
    """Whether the text is a UUID in its canonical 8-4-4-4-12 form."""
    if len(text) != 36:
        return False
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


EPOCH_MS: Final = 1_704_067_200_000
NODES: Final = 1024
_SEQUENCES: Final = 4096
LARGEST_ID: Final = (1 << 63) - 1


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class SnowflakeSource:
    """Generates the ids of one worker within the time ranges that it was granted."""

    __slots__ = ("_last", "_node", "_now", "_upto")

    def __init__(self, now_ms: Callable[[], int] = _wall_ms) -> None:
        self._now = now_ms
        self._node = 0
        # The last millisecond and sequence as one number; counting it up is what runs over into the next millisecond.
        self._last = -1
        self._upto = 0

    def now_ms(self) -> int:
        """The millisecond of the next ids, if it is in the granted range."""
        return max(self._now(), EPOCH_MS)

    def grant(self, node: int, from_ms: int, upto_ms: int) -> None:
        """Grant the ids of `node` for the milliseconds from `from_ms` to before `upto_ms`."""
        self._node = node
        self._last = (from_ms - EPOCH_MS) * _SEQUENCES - 1
        self._upto = (upto_ms - EPOCH_MS) * _SEQUENCES

    def take(self, count: int, *, keep_ms: int = 0) -> list[int] | None:
        """`count` new ids in ascending order; None when the granted range, except for its reserve, has no room."""
        first = max(self._last + 1, (self.now_ms() - EPOCH_MS) * _SEQUENCES)
        return self._give(first, first + count) if first + count <= self._upto - keep_ms * _SEQUENCES else None

    def take_kept(self, count: int, *, keep_ms: int) -> list[int] | None:
        """`count` ids from the reserve at the end of the granted range, whatever the time is."""
        first = max(self._last + 1, self._upto - keep_ms * _SEQUENCES)
        return self._give(first, first + count) if first + count <= self._upto else None

    def _give(self, first: int, end: int) -> list[int]:
        self._last = end - 1
        node = self._node
        return [(tick // _SEQUENCES) << 22 | node << 12 | tick % _SEQUENCES for tick in range(first, end)]

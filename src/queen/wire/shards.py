"""Sharding by hash: the shard of a new name, and the shard that created an id."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from queen.wire.push import LONGEST_NAME

MOST_SHARDS: Final = 32
PARTITION_BITS: Final = 32
"""Bits of a partition id below the number of the shard that made it: no two shards make the same one."""
SMALL_ID_BITS: Final = 24
"""The same for ids that PostgreSQL keeps in 32 bits."""

_FNV_OFFSET: Final = 2_166_136_261
_FNV_PRIME: Final = 16_777_619
# Names hold no control characters, so this cannot be part of one.
_SEPARATOR: Final = "\n"


class Kind(StrEnum):
    """The kinds of names that are placed on shards."""

    QUEUE = "queue"
    TOPIC = "topic"
    NAMESPACE = "namespace"
    """A namespace of topics: its quota, and the claims of its idempotency keys."""


class Name(NamedTuple):
    """A queue, a topic or a namespace, as the directory knows it."""

    kind: Kind
    key: str

    @classmethod
    def queue(cls, name: str) -> Name:
        return cls(Kind.QUEUE, name)

    @classmethod
    def topic(cls, namespace: str, topic: str) -> Name:
        return cls(Kind.TOPIC, namespace + _SEPARATOR + topic)

    @classmethod
    def namespace(cls, namespace: str) -> Name:
        return cls(Kind.NAMESPACE, namespace)

    @property
    def parts(self) -> tuple[str, str]:
        """Namespace and topic."""
        namespace, _, topic = self.key.partition(_SEPARATOR)
        return namespace, topic

    @property
    def can_exist(self) -> bool:
        """Whether anything may have this name."""
        parts = self.parts if self.kind is Kind.TOPIC else (self.key,)
        return all(0 < len(part) <= LONGEST_NAME and part.isprintable() for part in parts)

    @property
    def hashed(self) -> str:
        """The text whose hash picks a shard: `namespace:name`, without a namespace for queues, as theirs can change."""
        if self.kind is Kind.QUEUE:
            return f":{self.key}"
        return ":".join(self.parts)

    def __str__(self) -> str:
        return f"{self.kind} {self.key.replace(_SEPARATOR, '/')}"


def fnv1a32(text: str) -> int:
    """The 32-bit FNV-1a hash of the text in UTF-8."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _FNV_PRIME & 0xFFFF_FFFF
    return value


def home(name: Name, layout: Sequence[int]) -> int:
    """The shard that a new name is made on; `layout`: the shards that take new names."""
    return layout[fnv1a32(name.hashed) % len(layout)]


def shard_of_partition(partition_id: int) -> int:
    """The shard that made a partition; it may have been moved since."""
    return partition_id >> PARTITION_BITS

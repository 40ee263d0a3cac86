"""What Redis is used for, and memory where there is none: caches and counters, never the only copy of anything.

Implementations on Redis raise `RedisUnavailable`; the caller then goes on with PostgreSQL. All of them may lose
everything at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from queen.wire.topics.items import ReadyItem

TURN_SECONDS: Final = 2.0
"""A fill turn that lasts longer counts as abandoned, and its queue as lost."""


class FillTurnState(StrEnum):
    YOURS = "yours"
    BUSY = "busy"
    """Another worker has the turn."""
    LOST = "lost"
    """The queue has another token, or its last turn never ended: it has to be opened again."""


class FillTurn(msgspec.Struct):
    """Exclusive use of the ready queue of a topic.

    `items` are its most urgent ones, in order; they stay until the turn ends. `depth` is how many there are in all.
    `number` counts the turns in which the queue was changed.
    """

    state: FillTurnState
    items: list[ReadyItem] = []
    depth: int = 0
    number: int = 0


class ReadyQueue(Protocol):
    """Items that were leased ahead, by topic, in the order of service."""

    @property
    def nbytes(self) -> int:
        """What they take of the memory of this process."""
        ...

    async def open(self, topic: int, token: str) -> None:
        """Start an empty queue; other tokens of this topic become invalid."""
        ...

    def drop(self, topic: int, token: str) -> None:
        """The queue is no longer used."""
        ...

    async def begin(self, topic: int, token: str, limit: int) -> FillTurn:
        """Take the turn, and look at the `limit` most urgent items."""
        ...

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        """End the turn: remove the `taken` most urgent items, add those `offered`. Returns the depth.

        The next turn has this `number`.
        """
        ...


class Keys(Protocol):
    """Recently stored idempotency keys of namespaces."""

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """Those of the keys that were added and have not expired."""
        ...

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        """Remember keys for `seconds`, or less when there are too many."""
        ...


class Counted(msgspec.Struct, frozen=True):
    """Whether it was admitted, how much more would be, and in how many seconds to retry."""

    admitted: bool
    left: int
    wait: int


class Counters(Protocol):
    """Sliding-window counters over the last minute."""

    async def add(self, name: str, count: int, limit: int) -> Counted:
        """Count unless that would exceed `limit` in any minute."""
        ...

"""What the hot side offers, whether it is Redis or memory. Nothing here is the only copy of anything.

Every implementation passes the suite in tests/hot. Those on Redis raise `RedisAway` when it cannot be asked; whoever
calls goes on with PostgreSQL then. All of it may be emptied at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from queen.wire.ready_item import ReadyItem


class Buffered(msgspec.Struct, frozen=True, array_like=True):
    """An item that was accepted and is not in PostgreSQL yet."""

    id: int
    namespace: str
    idempotency_key: str | None
    body: bytes


class Buffer(Protocol):
    """Items on their way to a shard, oldest first."""

    async def append(self, shard: int, items: Sequence[Buffered]) -> int:
        """Add items at the end; those whose ids are there stay as they are. Gives how many are in the buffer now."""
        ...

    async def take(self, shard: int, limit: int, seconds: float) -> list[Buffered]:
        """The oldest that nobody else has taken; they are kept, and offered again unless confirmed in so long."""
        ...

    async def confirm(self, shard: int, ids: Sequence[int]) -> None:
        """These are in PostgreSQL: they leave the buffer."""
        ...

    async def length(self, shard: int) -> int: ...

    async def find_key(self, shard: int, namespace: str, key: str) -> int | None:
        """The id of the buffered item with an idempotency key."""
        ...


TURN_SECONDS: Final = 2.0
"""A turn that did not end in this time never will: its queue is lost."""


class TurnState(StrEnum):
    YOURS = "yours"
    BUSY = "busy"
    """Somebody else has the turn."""
    LOST = "lost"
    """The queue is not what it was opened as, or its last turn never ended: it has to be opened anew."""


class Turn(msgspec.Struct):
    """A stretch of time in which nobody else touches the ready queue of a topic.

    `items` are its most urgent ones, in order; they stay until the turn ends. `depth` is how many there are in all.
    `number` counts the turns in which the queue was changed.
    """

    state: TurnState
    items: list[ReadyItem] = []
    depth: int = 0
    number: int = 0


class ReadyQueue(Protocol):
    """Items leased for consumers yet to come, by topic, in the order of service."""

    async def open(self, topic: int, token: str) -> None:
        """Begin with nothing; whoever knows another token of this topic has lost it."""
        ...

    async def begin(self, topic: int, token: str, limit: int) -> Turn:
        """Take the turn, and look at the `limit` most urgent items."""
        ...

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        """End the turn: so many of the most urgent have gone, others have come. Gives the depth.

        The next turn has this number.
        """
        ...

    async def drop(self, topic: int) -> None:
        """Forget the queue of a topic."""
        ...

    async def depth(self, topic: int) -> int: ...


class Keys(Protocol):
    """Idempotency keys of namespaces, each with the id of the item that has it; forgotten after a time."""

    async def reserve(self, namespace: str, ids: Mapping[str, int], seconds: float) -> dict[str, int]:
        """Give keys to ids, unless they are given already; returns the ids that have them now."""
        ...

    async def lookup(self, namespace: str, keys: Sequence[str]) -> dict[str, int]:
        """Those of the keys that are known."""
        ...

    async def forget(self, namespace: str, keys: Sequence[str]) -> None: ...


class Counted(msgspec.Struct, frozen=True):
    """Whether it was admitted, how much more would be, and in how many seconds to try again."""

    admitted: bool
    left: int
    wait: int


class Counters(Protocol):
    """How often something happened in the last minute."""

    async def add(self, name: str, count: int, limit: int) -> Counted:
        """Count it, unless it would be more than `limit` in any minute."""
        ...

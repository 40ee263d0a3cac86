"""What the hot side offers, whether it is Redis or memory. Nothing here is the only copy of anything.

Every implementation passes the suite in tests/hot. Those on Redis raise `RedisAway` when it cannot be asked; whoever
calls goes on with PostgreSQL then. All of it may be emptied at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from queen.wire.topic_items import ReadyItem


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """A record of some host's log: from which byte of its file to which, and what it says."""

    start: int
    end: int
    body: bytes


class Copies(Protocol):
    """What hosts have in their logs and not in PostgreSQL yet, for others to store should their host be gone."""

    async def add(self, file_id: str, records: Sequence[Copied]) -> None:
        """Records were written to a file of a log."""
        ...

    async def files(self) -> set[str]:
        """The files of which there are copies, or were lately."""
        ...

    async def read(self, file_id: str, since: int, limit: int) -> list[Copied]:
        """The first records of a file that end behind a byte, in order; some may be missing."""
        ...

    async def trim(self, file_id: str, upto: int) -> None:
        """What ends at this byte or before is in PostgreSQL: it goes."""
        ...


TURN_SECONDS: Final = 2.0
"""A turn that did not end in this time never will: its queue is lost."""


class FillTurnState(StrEnum):
    YOURS = "yours"
    BUSY = "busy"
    """Somebody else has the turn."""
    LOST = "lost"
    """The queue is not what it was opened as, or its last turn never ended: it has to be opened anew."""


class FillTurn(msgspec.Struct):
    """A stretch of time in which nobody else touches the ready queue of a topic.

    `items` are its most urgent ones, in order; they stay until the turn ends. `depth` is how many there are in all.
    `number` counts the turns in which the queue was changed.
    """

    state: FillTurnState
    items: list[ReadyItem] = []
    depth: int = 0
    number: int = 0


class ReadyQueue(Protocol):
    """Items leased for consumers yet to come, by topic, in the order of service."""

    async def open(self, topic: int, token: str) -> None:
        """Begin with nothing; whoever knows another token of this topic has lost it."""
        ...

    async def begin(self, topic: int, token: str, limit: int) -> FillTurn:
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
    """Idempotency keys of namespaces that were stored lately."""

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """Those of the keys that were learnt, and not forgotten since."""
        ...

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        """Remember keys for so long, or less where there are too many."""
        ...


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

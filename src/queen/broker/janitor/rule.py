"""The rules by which the old end of a partition is cut off, and why messages were removed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from queen.storage.database import Record

LONGEST_PAUSE = 3600.0
"""How late a change may be noticed of which nobody is told: a group that went back, say."""
_SHORTEST_PAUSE = 1.0


class Kind(StrEnum):
    """Why messages were removed, as the history names it."""

    RETENTION = "retention"
    COMPLETED_RETENTION = "completed_retention"
    MAX_WAIT = "max_wait_time_eviction"
    TTL = "ttl_expiration"


class Rule(Enum):
    """Up to where a partition is cut: (statement that looks at partitions, statement that raises their floors)."""

    AGED = ("look_aged", "raise_floors_aged")
    """Everything older than so many seconds."""
    CONSUMED = ("look_consumed", "raise_floors_consumed")
    """What is older, as far as every group that has a cursor has consumed it."""
    WAITING = ("look_waiting", "raise_floors_waiting")
    """Everything older, if there is something among it that a group has not consumed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rule as an option of a queue asks for it."""

    rule: Rule
    kind: Kind
    queue_id: int
    queue_name: str
    seconds: float


def cuts_of(queues: Sequence[Record], options: Sequence[tuple[Rule, Kind, str]]) -> list[Cut]:
    """The cuts that queues ask for, by options under the names of their columns."""
    return [
        Cut(rule, kind, queue["id"], queue["name"], queue[column])
        for queue in queues
        for rule, kind, column in options
        if queue[column] > 0
    ]


def pause_after(cut: Cut, seen: Record) -> float:
    """How long a partition need not be looked at again, after a look that found nothing to remove.

    Nobody says when a group has consumed something, and that a partition was pushed to may not be heard. Where only
    that could make it due, the pause is as long as it has been waited for already.
    """
    wait: float | None = seen["wait"]
    if wait is None:
        idle: float = seen["idle"]
        pause = max(cut.seconds, min(idle, LONGEST_PAUSE))
    elif wait > 0:
        pause = wait
    else:
        pause = min(max(-wait, _SHORTEST_PAUSE), LONGEST_PAUSE)
    # What waits gets older all at once when a group goes back, or a new one comes.
    if cut.rule is Rule.WAITING:
        pause = min(pause, LONGEST_PAUSE)
    # Partitions that were met together are not looked at together for ever.
    return pause * random.uniform(0.5, 1.0) if pause == LONGEST_PAUSE else pause

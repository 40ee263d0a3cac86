"""What consumers and operators do to a queue: the steps of `OperatedQueue`, and how histories of them are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.broker.test_model import (
    Expire,
    History,
    Nothing,
    Pop,
    Push,
    Renew,
    acks_of_all,
    acks_of_one,
    acks_of_some,
    deliveries,
    failures,
    items,
    partitions,
    small_batches,
    transactions,
    workers,
)

QUEUE_MODE, CONFLATED = "__QUEUE_MODE__", "newest"
GROUPS = (QUEUE_MODE, "readers", CONFLATED)
OLD = 50
"""Seconds, in the options that depend on the age of messages."""


@dataclass(frozen=True)
class Single:
    """Delete, retry or dead-letter one message, by its place in a partition, from the newest."""

    worker: int
    action: str
    partition: str
    which: int
    group: str


@dataclass(frozen=True)
class Bulk:
    """The same for many: by name (partition, place), or by a filter (partition, dead letters alone, least payload)."""

    worker: int
    action: str
    refs: list[tuple[str, int]] | None
    filter: tuple[str | None, bool, int | None]
    group: str


@dataclass(frozen=True)
class DeadLetters:
    """Retry or purge dead letters: of a group, of a partition, of some names."""

    worker: int
    action: str
    group: str | None
    partition: str | None
    names: list[int] | None


@dataclass(frozen=True)
class Seek:
    worker: int
    group: str
    where: str
    partition: str | None
    number: int


@dataclass(frozen=True)
class Undo:
    worker: int
    which: int


@dataclass(frozen=True)
class Release:
    worker: int
    group: str
    partition: str


@dataclass(frozen=True)
class Pause:
    worker: int
    group: str
    action: str


@dataclass(frozen=True)
class Configure:
    worker: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Age:
    pass


@dataclass(frozen=True)
class Retain:
    """The job runs once with an option that removes what is old."""

    worker: int
    option: str


@dataclass(frozen=True)
class Clear:
    worker: int
    partition: str | None


@dataclass(frozen=True)
class Recreate:
    """The queue is deleted and made again."""

    worker: int


@dataclass(frozen=True)
class Forget:
    """A group is deleted on the queue."""

    worker: int
    group: str


@dataclass(frozen=True)
class Look:
    """What the lists say of groups and of the queue is what the model says."""

    worker: int
    group: str


groups = st.sampled_from([QUEUE_MODE, QUEUE_MODE, "readers", CONFLATED])
places = st.integers(0, 30)
some_partition = st.none() | partitions
singles = st.builds(
    Single, workers, st.sampled_from(["delete", "delete", "delete", "retry", "dlq"]), partitions, places, groups
)
filters = st.tuples(some_partition, st.booleans(), st.none() | st.integers(0, 40))
bulks = st.builds(
    Bulk,
    workers,
    st.sampled_from(["delete", "delete", "retry", "dlq"]),
    st.none() | st.lists(st.tuples(partitions, places), min_size=1, max_size=6),
    filters,
    groups,
)
letters = st.builds(
    DeadLetters,
    workers,
    st.sampled_from(["retry", "retry", "retry", "purge"]),
    st.none() | groups,
    some_partition,
    st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=10),
)
seeks = st.builds(
    Seek, workers, groups, st.sampled_from(["toEnd", "toBeginning", "time", "offset"]), some_partition, places
)
pauses = st.builds(
    Pause, workers, st.sampled_from(["", *GROUPS]), st.sampled_from(["pause", "resume", "resume", "resume"])
)
options = st.sampled_from(
    [
        {},
        {},
        {"retryLimit": 0},
        {"retryLimit": 2, "deadLetterQueue": True},
        {"retryDelay": 1_000_000},
        {"leaseTime": 1000},
        {"delayedProcessing": OLD},
        {"ttl": OLD},
    ]
)
configurations = st.builds(Configure, workers, options)
retentions = st.builds(
    Retain, workers, st.sampled_from(["retentionSeconds", "completedRetentionSeconds", "maxWaitTimeSeconds"])
)
leasing_pops = st.builds(Pop, workers, groups, some_partition, st.integers(2, 6), st.just(1), st.just(False))
any_pops = st.builds(Pop, workers, groups, some_partition, small_batches, st.integers(1, 3), st.booleans())

WEIGHTS = [
    (1, st.just(Nothing())),
    (6, st.builds(Push, workers, items)),
    (7, leasing_pops),
    (3, any_pops),
    (4, acks_of_one),
    (4, acks_of_some),
    (3, acks_of_all),
    (2, failures),
    (2, transactions),
    (2, st.builds(Expire)),
    (1, st.builds(Renew, workers, deliveries)),
    (5, singles),
    (3, bulks),
    (2, letters),
    (2, seeks),
    (1, st.builds(Undo, workers, st.integers(0, 2))),
    (1, st.builds(Release, workers, groups, partitions)),
    (2, pauses),
    (2, configurations),
    (1, st.builds(Age)),
    (1, retentions),
    (1, st.builds(Clear, workers, some_partition)),
    (1, st.builds(Forget, workers, groups)),
    (1, st.builds(Look, workers, groups)),
]
ALL = [kind for weight, kind in WEIGHTS for _ in range(weight)] * 2 + [st.builds(Recreate, workers)]


@st.composite
def steps(draw: st.DrawFn) -> Any:
    return draw(draw(st.sampled_from(ALL)))


@st.composite
def episodes(draw: st.DrawFn) -> list[Any]:
    """A batch goes out, operators work on what it holds, and it is acked bit by bit."""
    worker, group, partition = draw(workers), draw(groups), draw(partitions)
    here = st.just(partition)
    pushes = st.builds(Push, workers, st.lists(st.tuples(here, st.integers(0, 40)), min_size=1, max_size=2))
    actions = st.sampled_from(["delete", "delete", "delete", "retry", "dlq"])
    near = st.builds(Single, workers, actions, here, st.integers(0, 3), groups)
    several = st.lists(st.tuples(here, st.integers(0, 4)), min_size=1, max_size=4)
    nearby = st.builds(Bulk, workers, actions, several, filters, groups)
    acks = acks_of_one | acks_of_some | acks_of_all | failures
    return [
        *draw(st.lists(pushes, min_size=1, max_size=4)),
        *draw(st.lists(near | nearby, max_size=2)),
        Pop(worker, group, partition, draw(st.integers(2, 12)), 1, False),
        *draw(st.lists(st.one_of(near, nearby, pushes, letters, seeks, steps()), max_size=2)),
        *draw(st.lists(acks, min_size=1, max_size=3)),
    ]


histories = st.lists(steps().map(lambda step: [step]) | episodes(), min_size=15, max_size=40).map(
    lambda several: History(step for some in several for step in some)
)

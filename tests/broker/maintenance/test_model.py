"""Random histories against a model of the rules: nothing goes that should stay, and what should go does in time."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from queen.broker.maintenance.election import Session
from queen.broker.maintenance.retention import LONGEST_PAUSE, Eviction, Retention, Trimmer
from queen.broker.maintenance.schedule import PushListener
from queen.storage.database import Database
from tests.support.database import Connection

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
NAMES = itertools.count()
GRAIN = 20.0
"""What is due may be found a thousandth of the option's seconds later, and a second of rest is nothing."""
BATCH = 3


@dataclass(frozen=True)
class Push:
    partition: int
    messages: int
    heard: bool


@dataclass(frozen=True)
class Consume:
    """Move a group forward, or back: to an offset from the first that is stored on."""

    partition: int
    group: int
    offset: int


@dataclass(frozen=True)
class Pass:
    seconds: int


@dataclass(frozen=True)
class Configure:
    seconds: int


@dataclass(frozen=True)
class Clear:
    partition: int


@dataclass(frozen=True)
class Run:
    """A run of the elected janitor; or of one that remembers nothing."""

    fresh: bool = False


partitions = st.sampled_from([0, 0, 0, 1])
pushes = st.builds(Push, partitions, st.integers(1, 3), st.sampled_from([True, True, False]))
moves = st.builds(Consume, partitions, st.sampled_from([1, 1, 2]), st.sampled_from([0, 2, 6, 6, 6]))
# Options are odd multiples of 100 and times even ones, so that nothing is ever a moment short of being due.
times = st.builds(Pass, st.sampled_from([200, 1000, 1000, 4000, 20_000]))
runs = st.builds(Run, st.sampled_from([False] * 9 + [True]))
changes = pushes | moves | st.builds(Configure, st.sampled_from([500, 500, 2500, 7500])) | st.builds(Clear, partitions)
episodes = st.lists(changes, max_size=3).flatmap(lambda some: st.tuples(st.just(some), times, runs))
operations = st.lists(episodes, min_size=4, max_size=12).map(
    lambda several: [step for some, time, run in several for step in (*some, time, run)]
)


@dataclass(frozen=True)
class Segment:
    base: int
    end: int
    stored: float
    heard: bool


@dataclass
class Partition:
    id: int
    next_offset: int = 0
    floor: int = 0
    segments: list[Segment] = field(default_factory=list)
    cursors: dict[int, int] = field(default_factory=dict)
    changed: float = 0.0
    """When a group was moved, of which the janitor gets no notification."""

    def due(self, option: str, seconds: float, now: float) -> list[Segment]:
        """What is to be cut off."""
        old = [segment for segment in self.segments if segment.end > self.floor and segment.stored + seconds < now]
        if option == "completed_retention_seconds":
            consumed = min(self.cursors.values(), default=0)
            return [segment for segment in old if segment.end <= consumed]
        if option == "max_wait_time_seconds":
            return old if self.waiting(old) else []
        return old

    def waiting(self, segments: list[Segment]) -> list[Segment]:
        """Those of the segments that hold the first message which the slowest group has before it."""
        first = max(self.floor, min(self.cursors.values(), default=0))
        return [segment for segment in segments if segment.base <= first < segment.end]


class History:
    """One queue, and what should have become of it."""

    def __init__(self, connection: Connection, session: Session, option: str) -> None:
        self.connection = connection
        self.session = session
        self.option = option
        self.seconds = 500
        self.now = 1e6
        self.push_listener = PushListener()
        self.job = self.new_job()
        self.queue_id = 0
        self.partitions: dict[int, Partition] = {}

    def new_job(self) -> Retention | Eviction:
        trimmer = Trimmer(BATCH, self.push_listener, clock=lambda: self.now)
        return Eviction(trimmer) if self.option in ("ttl", "max_wait_time_seconds") else Retention(trimmer)

    async def make_queue(self) -> None:
        await self.connection.execute("DELETE FROM queen.queues")
        self.queue_id = await self.connection.fetchval(
            f"INSERT INTO queen.queues (name, retention_enabled, {self.option}) VALUES ($1, true, $2) RETURNING id",
            f"queue-{next(NAMES)}",
            self.seconds,
        )

    async def step(self, operation: Any) -> None:
        match operation:
            case Pass(seconds):
                self.now += seconds
            case Configure(seconds):
                self.seconds = seconds
                await self.connection.execute(f"UPDATE queen.queues SET {self.option} = $1", seconds)
            case Push(number, messages, heard):
                await self.push(await self.partition(number), messages, heard)
            case Consume(number, group, offset):
                await self.consume(await self.partition(number), group, offset)
            case Clear(number):
                partition = await self.partition(number)
                partition.floor = partition.next_offset
                await self.connection.execute(
                    "UPDATE queen.partitions SET floor_offset = next_offset WHERE id = $1", partition.id
                )
            case Run(fresh):
                await self.run(fresh)

    async def partition(self, number: int) -> Partition:
        if number not in self.partitions:
            id_ = await self.connection.fetchval(
                "INSERT INTO queen.partitions (queue_id, name) VALUES ($1, $2) RETURNING id",
                self.queue_id,
                str(number),
            )
            self.partitions[number] = Partition(id_, changed=self.now)
        return self.partitions[number]

    async def push(self, partition: Partition, messages: int, heard: bool) -> None:
        base, partition.next_offset = partition.next_offset, partition.next_offset + messages
        partition.segments.append(Segment(base, partition.next_offset, self.now, heard))
        await self.connection.execute(
            "INSERT INTO queen.segments VALUES ($1, $2, $3, now(), '', '')", partition.id, base, messages
        )
        await self.connection.execute(
            "UPDATE queen.partitions SET next_offset = $2 WHERE id = $1", partition.id, partition.next_offset
        )
        if heard:
            self.push_listener.pushed(self.queue_id, partition.id)

    async def consume(self, partition: Partition, group: int, offset: int) -> None:
        position = min(partition.floor + offset, partition.next_offset)
        partition.cursors[group] = position
        partition.changed = self.now
        await self.connection.execute(
            "INSERT INTO queen.cursors (partition_id, group_id, committed) VALUES ($1, $2, $3)"
            " ON CONFLICT (partition_id, group_id) DO UPDATE SET committed = $3",
            partition.id,
            group,
            position,
        )

    async def run(self, fresh: bool) -> None:
        await self.tell_the_time()
        job = self.new_job() if fresh else self.job
        while await job.run(self.session):
            pass
        for partition in self.partitions.values():
            due = partition.due(self.option, self.seconds, self.now)
            floor = await self.connection.fetchval(
                "SELECT floor_offset FROM queen.partitions WHERE id = $1", partition.id
            )
            upto = due[-1].end if due else partition.floor
            assert floor in (partition.floor, upto)
            # What was consumed goes along with what has waited for too long, and only then.
            oldest = partition.waiting(due) if self.option == "max_wait_time_seconds" else due
            if fresh or (due and self.must_be_gone(partition, oldest[0])):
                assert floor == upto
            partition.floor = floor
            await self.check_stored(partition, swept=fresh)

    def must_be_gone(self, partition: Partition, oldest: Segment) -> bool:
        since = oldest.stored + self.seconds
        if oldest.heard and self.option in ("ttl", "retention_seconds"):
            return self.now - since > GRAIN
        return self.now - max(since, partition.changed) > LONGEST_PAUSE + GRAIN

    async def tell_the_time(self) -> None:
        """Have everything in the database be as old as it is here."""
        for partition in self.partitions.values():
            for segment in partition.segments:
                await self.connection.execute(
                    "UPDATE queen.segments SET created_at = clock_timestamp() - make_interval(secs => $3)"
                    " WHERE partition_id = $1 AND base_offset = $2",
                    partition.id,
                    segment.base,
                    self.now - segment.stored,
                )
            if partition.segments:
                await self.connection.execute(
                    "UPDATE queen.partitions SET last_at = clock_timestamp() - make_interval(secs => $2) WHERE id = $1",
                    partition.id,
                    self.now - partition.segments[-1].stored,
                )

    async def check_stored(self, partition: Partition, *, swept: bool) -> None:
        """Everything above the floor is there; what lies below it is removed by the next run."""
        rows = await self.connection.fetch(
            "SELECT base_offset FROM queen.segments WHERE partition_id = $1 ORDER BY base_offset", partition.id
        )
        stored = [row["base_offset"] for row in rows]
        kept = [segment.base for segment in partition.segments if segment.end > partition.floor]
        assert stored == kept if swept else stored[len(stored) - len(kept) :] == kept


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[Session]:
    database = Database(dsn)
    session = await Session.open(database)
    yield session
    await session.close()
    await database.close()


@pytest.mark.timeout(24 * 3600 if SOAK else 600)
@pytest.mark.parametrize("option", ["retention_seconds", "completed_retention_seconds", "max_wait_time_seconds", "ttl"])
@settings(
    max_examples=2000 if SOAK else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    steps=[
        Push(0, 1, heard=True),
        Consume(0, 1, 2),
        Pass(4000),
        Run(),
        # Nobody is told of this one: it may be found to have waited too long a while after it has.
        Push(0, 1, heard=False),
        *[Pass(200), Run()] * 3,
    ]
)
@given(steps=operations)
async def test_what_is_due_goes_and_nothing_else(
    connection: Connection, session: Session, option: str, steps: list[Any]
) -> None:
    history = History(connection, session, option)
    await history.make_queue()
    for operation in steps:
        await history.step(operation)
    await history.step(Run(fresh=True))

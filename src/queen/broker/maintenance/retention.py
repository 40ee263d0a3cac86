"""Retention: removes messages of queues with `retentionEnabled` when they are old enough."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

import asyncpg

from queen.broker.maintenance.election import Session
from queen.broker.maintenance.schedule import PAGE, UNSETTLED_SECONDS, Capacity, Memory, PushListener, Schedule
from queen.chunks import chunks
from queen.storage.database import Record

LONGEST_PAUSE = 3600.0
"""Delay until a change without a notification is noticed, such as a seek backwards."""
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
    """Everything older than `seconds`."""
    CONSUMED = ("look_consumed", "raise_floors_consumed")
    """What is older, as far as every group that has a cursor has consumed it."""
    WAITING = ("look_waiting", "raise_floors_waiting")
    """Everything older, if there is something among it that a group has not consumed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rule as an option of a queue configures it."""

    rule: Rule
    kind: Kind
    queue_id: int
    queue_name: str
    seconds: float


def cuts_of(queues: Sequence[Record], options: Sequence[tuple[Rule, Kind, str]]) -> list[Cut]:
    """The cuts that the options of queues configure, by the names of their columns."""
    return [
        Cut(rule, kind, queue["id"], queue["name"], queue[column])
        for queue in queues
        for rule, kind, column in options
        if queue[column] > 0
    ]


def pause_after(cut: Cut, found: Record) -> float:
    """How long a partition in which nothing was found to remove is not examined again.

    There is no notification when a group has consumed something, and one of a push may be lost. Where only
    that could make it due, the pause is as long as the wait has lasted already.
    """
    wait: float | None = found["wait"]
    if wait is None:
        idle: float = found["idle"]
        pause = max(cut.seconds, min(idle, LONGEST_PAUSE))
    elif wait > 0:
        pause = wait
    else:
        pause = min(max(-wait, _SHORTEST_PAUSE), LONGEST_PAUSE)
    # What waits gets older all at once when a group goes back, or a new one comes.
    if cut.rule is Rule.WAITING:
        pause = min(pause, LONGEST_PAUSE)
    # So that partitions that were first seen together are not always examined together.
    return pause * random.uniform(0.5, 1.0) if pause == LONGEST_PAUSE else pause


STEPS = 100
"""Statements that a run may spend on the same partitions."""
_SHORTEST_SWEEP_PAUSE = 0.002


@dataclass(slots=True)
class Sweep:
    """How far partitions have been swept, and how many messages that were."""

    starts: dict[int, int]
    messages: int = 0
    unfinished: bool = False


class Sweeper:
    """Removes segments below the floors of partitions, `batch` at a time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def sweep(self, session: Session, ids: list[int]) -> None:
        """Remove what lies below the floors of partitions, or as much of it as a run may."""
        sweep = Sweep(dict.fromkeys(ids, 0))
        for _ in range(STEPS):
            if await self.sweep_some(session, sweep):
                return

    async def sweep_some(self, session: Session, sweep: Sweep) -> bool:
        """Remove one batch; whether that was all."""
        pause = Pause()
        rows = await session.fetch("sweep", list(sweep.starts), list(sweep.starts.values()), self._batch)
        ends = {row["id"]: row["upto"] for row in rows}
        sweep.starts.update(ends)
        sweep.messages += sum(row["messages"] for row in rows)
        if rows:
            await self._remove_traces(session, ends)
            await pause.rest()
        segments: int = sum(row["segments"] for row in rows)
        return segments < self._batch

    async def _remove_traces(self, session: Session, ends: dict[int, int]) -> None:
        """Remove the traces of removed messages."""
        ids, offsets = list(ends), list(ends.values())
        while len(await session.fetch("remove_old_traces", ids, offsets, self._batch)) == self._batch:
            pass


class Pause:
    """Sleeps as long as a step has taken, so that removing takes at most half of PostgreSQL's capacity."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def rest(self) -> None:
        await asyncio.sleep(max(_SHORTEST_SWEEP_PAUSE, self._loop.time() - self._began))


log = logging.getLogger(__name__)

_MOST_KNOWN = 4_000_000
"""Partitions, each counted for every option of its queue."""
_MOST_RECENT = 100_000
_PAGES_PER_RUN = 10
_TOGETHER = 100
_LOOK_AT_FIRST = 16
_LEASE_PAUSE = 1.0


@dataclass(slots=True)
class _Tally:
    """What a run has done to a queue."""

    messages: int = 0
    more: bool = False


class Trimmer:
    """Makes cuts, `batch` segments at a time, and remembers where there can be nothing to cut yet."""

    def __init__(
        self,
        batch: int,
        push_listener: PushListener,
        *,
        clock: Callable[[], float] = time.monotonic,
        most_known: int = _MOST_KNOWN,
    ) -> None:
        self._batch = batch
        self._clock = clock
        self._push_listener = push_listener
        self._memory = Memory(Capacity(most_known), Capacity(_MOST_RECENT))
        self._sweeper = Sweeper(batch)
        self._schedules: dict[Cut, Schedule] = {}

    async def trim(self, session: Session, cuts: Sequence[Cut]) -> bool:
        """Make the cuts that are due, of all those that queues ask for now; True when more is waiting."""
        self._keep_schedules(cuts)
        more = False
        for cut, schedule in self._schedules.items():
            try:
                more |= await self._trim_queue(session, cut, schedule)
            except Exception:
                # The partitions that the schedule returned were not examined.
                schedule.forget(self._clock())
                raise
        return more

    def _keep_schedules(self, cuts: Sequence[Cut]) -> None:
        """Have a schedule for each cut; drop those of queues that are gone or have another option now."""
        now = self._clock()
        kept, self._schedules = self._schedules, {}
        for cut in cuts:
            schedule = kept.pop(cut, None)
            if schedule is None:
                schedule = Schedule(cut.seconds, self._memory, self._push_listener.listen(cut.queue_id), now)
            self._schedules[cut] = schedule
        for cut, schedule in kept.items():
            schedule.forget(now)
            self._push_listener.stop(cut.queue_id, schedule.listener)

    async def _trim_queue(self, session: Session, cut: Cut, schedule: Schedule) -> bool:
        tally = _Tally()
        for ids in chunks(schedule.due(self._clock()), PAGE):
            await self._trim_partitions(session, cut, schedule, ids, tally)
        tally.more |= await self._trim_unknown(session, cut, schedule, tally)
        if tally.messages:
            await session.fetch("note_removed", cut.queue_name, cut.kind.value, tally.messages)
            log.info("removed %d messages of queue %r (%s)", tally.messages, cut.queue_name, cut.kind.value)
        return tally.more

    async def _trim_unknown(self, session: Session, cut: Cut, schedule: Schedule, tally: _Tally) -> bool:
        """Examine partitions for the first time, a bounded number in a run; whether there are more."""
        for _ in range(_PAGES_PER_RUN):
            if schedule.after is None:
                return False
            rows = await session.fetch("partitions_after", cut.queue_id, schedule.after, PAGE, UNSETTLED_SECONDS)
            page = [(row["id"], row["settled"]) for row in rows]
            ids, last = schedule.add_page(page, self._clock())
            await self._trim_partitions(session, cut, schedule, ids, tally)
            if last:
                return False
        return True

    async def _trim_partitions(
        self, session: Session, cut: Cut, schedule: Schedule, ids: Sequence[int], tally: _Tally
    ) -> None:
        for some in chunks(await self._look(session, cut, schedule, ids), _TOGETHER):
            sweep = Sweep(dict.fromkeys(some, 0))
            try:
                await self._make(session, cut, sweep)
            except asyncpg.PostgresError as error:
                # Partitions that another session keeps locked, for example, must not prevent the others from being cut.
                log.warning("some partitions of queue %r are left to the next run: %s", cut.queue_name, error)
            tally.messages += sweep.messages
            tally.more |= sweep.unfinished
            # Where a live lease holds what was cut off, there is still something to do, but not at once.
            pause = 0.0 if sweep.unfinished else _LEASE_PAUSE
            for partition_id in await self._look(session, cut, schedule, some):
                schedule.check_again(partition_id, pause, self._clock(), empty=False)

    async def _look(self, session: Session, cut: Cut, schedule: Schedule, ids: Sequence[int]) -> list[int]:
        """The partitions where there is something to do; when to look at the others again is noted."""
        if not ids:
            return []
        statement, _ = cut.rule.value
        rows = await session.fetch(statement, ids, float(cut.seconds))
        now = self._clock()
        due = []
        for row in rows:
            if row["due"]:
                due.append(row["id"])
            else:
                schedule.check_again(row["id"], pause_after(cut, row), now, empty=row["wait"] is None)
        return sorted(due)

    async def _make(self, session: Session, cut: Cut, sweep: Sweep) -> None:
        """Raise floors and sweep below them, alternately."""
        _, raise_floors = cut.rule.value
        ids = list(sweep.starts)
        # Few segments are examined first: where only some are old, it is a waste to read many young ones.
        look_at = min(_LOOK_AT_FIRST, self._batch)
        for _ in range(STEPS):
            if ids:
                raised = await session.fetch(raise_floors, ids, float(cut.seconds), look_at)
                ids = sorted(row["id"] for row in raised if row["full"])
                look_at = min(look_at * 4, self._batch)
            if await self._sweeper.sweep_some(session, sweep) and not ids:
                return
        sweep.unfinished = True


_CUTS = (
    (Rule.AGED, Kind.RETENTION, "retention_seconds"),
    (Rule.CONSUMED, Kind.COMPLETED_RETENTION, "completed_retention_seconds"),
)


class Retention:
    """`retentionSeconds` removes consumed or not, `completedRetentionSeconds` only what every group has consumed."""

    def __init__(self, trimmer: Trimmer) -> None:
        self._trimmer = trimmer

    async def run(self, session: Session) -> bool:
        return await self._trimmer.trim(session, cuts_of(await session.fetch("queues_with_retention"), _CUTS))


_EVICTION_CUTS = (
    (Rule.AGED, Kind.TTL, "ttl"),
    (Rule.WAITING, Kind.MAX_WAIT, "max_wait_time_seconds"),
)


class Eviction:
    """`ttl` ends every message at an age; `maxWaitTimeSeconds` ends what some group has not consumed by then.

    A partition is cut at one place, so what all groups have consumed before an evicted message goes with it.
    """

    def __init__(self, trimmer: Trimmer) -> None:
        self._trimmer = trimmer

    async def run(self, session: Session) -> bool:
        return await self._trimmer.trim(session, cuts_of(await session.fetch("queues_with_eviction"), _EVICTION_CUTS))

"""Cutting the old end off partitions.

A rule says up to where: it raises a partition's floor, below which nothing is delivered. Then the segments below the
floor are swept away without any lock that a push could wait for. Each statement is a transaction of its own and looks
at a bounded number of segments of a few partitions, so a run that ends in the middle has done no harm.

Which partitions to look at comes from memory. Whether something is removed never does: every statement that raises a
floor checks for itself that the time has come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import asyncpg

from queen.broker.janitor.agenda import Room
from queen.broker.janitor.ears import Ears
from queen.broker.janitor.election import Session
from queen.broker.janitor.rule import Cut, pause_after
from queen.broker.janitor.schedule import PAGE, UNSETTLED_SECONDS, Memory, Schedule
from queen.broker.janitor.sweep import STEPS, Sweep, Sweeper

log = logging.getLogger(__name__)

_MOST_KNOWN = 4_000_000
"""Partitions, each counted for every option of its queue."""
_MOST_AWAKE = 100_000
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
        self, batch: int, ears: Ears, *, clock: Callable[[], float] = time.monotonic, most_known: int = _MOST_KNOWN
    ) -> None:
        self._batch = batch
        self._clock = clock
        self._ears = ears
        self._memory = Memory(Room(most_known), Room(_MOST_AWAKE))
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
                # What the schedule gave out was not looked at.
                schedule.forget(self._clock())
                raise
        return more

    def _keep_schedules(self, cuts: Sequence[Cut]) -> None:
        """Have one for each cut, and forget those of queues that are gone or have another option now."""
        now = self._clock()
        kept, self._schedules = self._schedules, {}
        for cut in cuts:
            schedule = kept.pop(cut, None)
            if schedule is None:
                schedule = Schedule(cut.seconds, self._memory, self._ears.listen(cut.queue_id), now)
            self._schedules[cut] = schedule
        for cut, schedule in kept.items():
            schedule.forget(now)
            self._ears.stop(cut.queue_id, schedule.listener)

    async def _trim_queue(self, session: Session, cut: Cut, schedule: Schedule) -> bool:
        tally = _Tally()
        for ids in _portions(schedule.due(self._clock()), PAGE):
            await self._trim_partitions(session, cut, schedule, ids, tally)
        tally.more |= await self._trim_unknown(session, cut, schedule, tally)
        if tally.messages:
            await session.fetch("note_removed", cut.queue_name, cut.kind.value, tally.messages)
            log.info("removed %d messages of queue %r (%s)", tally.messages, cut.queue_name, cut.kind.value)
        return tally.more

    async def _trim_unknown(self, session: Session, cut: Cut, schedule: Schedule, tally: _Tally) -> bool:
        """Get to know partitions, a bounded number in a run; whether there are more."""
        for _ in range(_PAGES_PER_RUN):
            if schedule.after is None:
                return False
            rows = await session.fetch("partitions_after", cut.queue_id, schedule.after, PAGE, UNSETTLED_SECONDS)
            page = [(row["id"], row["settled"]) for row in rows]
            ids, last = schedule.meet(page, self._clock())
            await self._trim_partitions(session, cut, schedule, ids, tally)
            if last:
                return False
        return True

    async def _trim_partitions(
        self, session: Session, cut: Cut, schedule: Schedule, ids: Sequence[int], tally: _Tally
    ) -> None:
        for some in _portions(await self._look(session, cut, schedule, ids), _TOGETHER):
            sweep = Sweep(dict.fromkeys(some, 0))
            try:
                await self._make(session, cut, sweep)
            except asyncpg.PostgresError as error:
                # Partitions that somebody locks for long, say, must not keep the others from being cut.
                log.warning("some partitions of queue %r are left to the next run: %s", cut.queue_name, error)
            tally.messages += sweep.messages
            tally.more |= sweep.unfinished
            # Where a live lease holds what was cut off, there is still something to do, but not at once.
            pause = 0.0 if sweep.unfinished else _LEASE_PAUSE
            for partition_id in await self._look(session, cut, schedule, some):
                schedule.look_again(partition_id, pause, self._clock(), empty=False)

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
                schedule.look_again(row["id"], pause_after(cut, row), now, empty=row["wait"] is None)
        return sorted(due)

    async def _make(self, session: Session, cut: Cut, sweep: Sweep) -> None:
        """Raise floors and sweep below them, by turns."""
        _, raise_floors = cut.rule.value
        ids = list(sweep.starts)
        # Few segments are looked at first: where only some are old, it is a waste to read many young ones.
        look_at = min(_LOOK_AT_FIRST, self._batch)
        for _ in range(STEPS):
            if ids:
                raised = await session.fetch(raise_floors, ids, float(cut.seconds), look_at)
                ids = sorted(row["id"] for row in raised if row["full"])
                look_at = min(look_at * 4, self._batch)
            if await self._sweeper.sweep_some(session, sweep) and not ids:
                return
        sweep.unfinished = True


def _portions(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]

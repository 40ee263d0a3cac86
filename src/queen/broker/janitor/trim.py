"""Cutting the old end off partitions.

A rule says up to where: it raises a partition's floor, below which nothing is delivered. Then the segments below the
floor are swept away without any lock that a push could wait for. Each statement is a transaction of its own and looks
at a bounded number of segments of a few partitions, so a run that ends in the middle has done no harm.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum, StrEnum

import asyncpg

from queen.broker.janitor.election import Session

log = logging.getLogger(__name__)

_PAGE = 1000
_TOGETHER = 100
_STEPS = 100
_LOOK_AT_FIRST = 16
_SHORTEST_PAUSE = 0.002


class Kind(StrEnum):
    """Why messages were removed, as the history names it."""

    RETENTION = "retention"
    COMPLETED_RETENTION = "completed_retention"
    MAX_WAIT = "max_wait_time_eviction"
    TTL = "ttl_expiration"


class Rule(Enum):
    """Up to where a partition is cut: (statement that finds partitions, statement that raises their floors)."""

    AGED = ("aged_partitions", "raise_floors_aged")
    """Everything older than so many seconds."""
    CONSUMED = ("consumed_partitions", "raise_floors_consumed")
    """What is older, as far as every group that has a cursor has consumed it."""
    WAITING = ("waiting_partitions", "raise_floors_waiting")
    """Everything older, if there is something among it that a group has not consumed."""


@dataclass(slots=True)
class _Sweep:
    """How far partitions have been swept, and how many messages that were."""

    starts: dict[int, int]
    messages: int = 0
    unfinished: bool = False


class Trimmer:
    """Applies rules to queues, `batch` segments at a time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def trim(
        self, session: Session, rule: Rule, kind: Kind, queue_id: int, queue_name: str, seconds: float
    ) -> bool:
        """Cut the partitions of a queue; True when some were too long to be cut in one go."""
        find, _ = rule.value
        messages, more = 0, False
        after: int | None = 0
        while after is not None:
            (page,) = await session.fetch("partition_page_end", queue_id, after, _PAGE)
            due = [row["id"] for row in await session.fetch(find, queue_id, after, _PAGE, float(seconds))]
            for start in range(0, len(due), _TOGETHER):
                sweep = _Sweep(dict.fromkeys(due[start : start + _TOGETHER], 0))
                try:
                    await self._cut(session, rule, sweep, seconds)
                except asyncpg.PostgresError as error:
                    # Partitions that somebody locks for long, say, must not keep the others from being cut.
                    log.warning("some partitions of queue %r are left to the next run: %s", queue_name, error)
                messages += sweep.messages
                more |= sweep.unfinished
            after = page["last_id"] if page["found"] == _PAGE else None
        if messages:
            await session.fetch("note_removed", queue_name, kind.value, messages)
            log.info("removed %d messages of queue %r (%s)", messages, queue_name, kind.value)
        return more

    async def sweep(self, session: Session, ids: list[int]) -> None:
        """Remove what lies below the floors of partitions, or as much of it as a run may."""
        sweep = _Sweep(dict.fromkeys(ids, 0))
        for _ in range(_STEPS):
            if await self._sweep_some(session, sweep):
                return

    async def _cut(self, session: Session, rule: Rule, sweep: _Sweep, seconds: float) -> None:
        """Raise floors and sweep below them, by turns."""
        _, raise_floors = rule.value
        ids = list(sweep.starts)
        # Few segments are looked at first: where only some are old, it is a waste to read many young ones.
        look_at = min(_LOOK_AT_FIRST, self._batch)
        for _ in range(_STEPS):
            if ids:
                raised = await session.fetch(raise_floors, ids, float(seconds), look_at)
                ids = sorted(row["id"] for row in raised if row["full"])
                look_at = min(look_at * 4, self._batch)
            if await self._sweep_some(session, sweep) and not ids:
                return
        sweep.unfinished = True

    async def _sweep_some(self, session: Session, sweep: _Sweep) -> bool:
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
        """A trace goes with its message."""
        ids, offsets = list(ends), list(ends.values())
        while len(await session.fetch("remove_old_traces", ids, offsets, self._batch)) == self._batch:
            pass


class Pause:
    """Rests as long as a step has taken, so that removing takes no more than half of PostgreSQL's attention."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def rest(self) -> None:
        await asyncio.sleep(max(_SHORTEST_PAUSE, self._loop.time() - self._began))

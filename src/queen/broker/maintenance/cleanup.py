"""Cleanup: remains of deleted queues, unused partitions, and old records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from queen.broker.events import Event, EventKind, named, partition_gone
from queen.broker.maintenance.election import Job, Session
from queen.broker.maintenance.retention import Pause, Sweeper
from queen.settings import Settings

log = logging.getLogger(__name__)

Publish: TypeAlias = Callable[[Sequence[Event]], None]

_PAGE = 1000
_PAGES_PER_RUN = 10
_STEPS_PER_RUN = 100
_ROUND_SECONDS = 86_400.0
_UNUSED_SECONDS = 3600.0


class DroppedPartitions:
    """Removes what partitions that were deleted have left behind, `batch` rows at a time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def run(self, session: Session) -> bool:
        ids = [row["partition_id"] for row in await session.fetch("dropped_partitions", _PAGE)]
        if not ids:
            return False
        if not await self._remove_segments(session, ids):
            return True
        for statement in ("sweep_cursors", "sweep_dead_letters", "sweep_traces", "sweep_stream_state"):
            while len(await session.fetch(statement, ids, self._batch)) == self._batch:
                pass
        await session.fetch("forget_dropped", ids)
        return len(ids) == _PAGE

    async def _remove_segments(self, session: Session, ids: list[int]) -> bool:
        """Whether all of them are gone."""
        # Where to go on in each partition, so that rows deleted a moment ago are not walked over again.
        starts = dict.fromkeys(ids, 0)
        for _ in range(_STEPS_PER_RUN):
            pause = Pause()
            rows = await session.fetch("remove_dropped_segments", list(starts), list(starts.values()), self._batch)
            if sum(row["segments"] for row in rows) < self._batch:
                return True
            for row in rows:
                starts[row["partition_id"]] = row["last_offset"] + 1
            await pause.rest()
        return False


class ExpiredKeys:
    """Removes keys that have expired, `batch` at a time; they are invisible before."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def run(self, session: Session) -> bool:
        return len(await session.fetch("kv_expire", self._batch)) == self._batch


class PartitionSweep:
    """Checks all partitions once a day, a bounded number in each run, continuing where the last run ended.

    Removes segments below the floor that were not removed when it was raised (as by an interrupted clear), and
    partitions that have been empty and unused for `days`.
    """

    def __init__(self, batch: int, days: int, publish: Publish) -> None:
        self._sweeper = Sweeper(batch)
        self._days = days
        self._publish = publish
        self._after = 0
        self._next_round = 0.0

    async def run(self, session: Session) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._next_round:
            return False
        for _ in range(_PAGES_PER_RUN):
            (page,) = await session.fetch("all_partitions_page_end", self._after, _PAGE)
            unswept = await session.fetch("unswept_partitions", self._after, _PAGE)
            if unswept:
                await self._sweeper.sweep(session, [row["id"] for row in unswept])
            await self._remove_idle(session)
            self._after = page["last_id"] if page["found"] == _PAGE else 0
            if not self._after:
                self._next_round = now + _ROUND_SECONDS
                break
        return False

    async def _remove_idle(self, session: Session) -> None:
        gone = [
            partition_gone(row["queue_id"], row["id"])
            for row in await session.fetch("idle_partitions", self._after, _PAGE, self._days)
            if await session.fetch("remove_partition", row["id"], row["next_offset"])
        ]
        if gone:
            self._publish(gone)
            log.info("removed %d partitions that were empty and unused for %d days", len(gone), self._days)


class OldRows:
    """Removes rows that have reached an age, by a statement that takes it and the most rows to remove at once."""

    def __init__(self, statement: str, age: float, batch: int) -> None:
        self._statement = statement
        self._age = age
        self._batch = batch

    async def run(self, session: Session) -> bool:
        return len(await session.fetch(self._statement, self._age, self._batch)) == self._batch


class UnusedGroups:
    """Removes consumer groups older than an hour that have consumed nothing: names can be made up."""

    def __init__(self, batch: int, publish: Publish) -> None:
        self._batch = batch
        self._publish = publish
        self._newest: int | None = None
        self._next_look = 0.0

    async def run(self, session: Session) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return False
        if self._newest is not None:
            gone = await session.fetch("remove_unused_groups", self._newest, self._batch)
            self._publish([named(EventKind.GROUP_CHANGED, row["name"], row["xid"]) for row in gone])
            if len(gone) == self._batch:
                return True
        (row,) = await session.fetch("newest_group")
        self._newest, self._next_look = row["id"], now + _UNUSED_SECONDS
        return False


class OldMetrics:
    """Removes what workers counted minute by minute, after `days`; what they counted in all stays, summed up."""

    def __init__(self, batch: int, days: int) -> None:
        self._batch = batch
        self._days = days

    async def run(self, session: Session) -> bool:
        more = False
        for statement in ("remove_old_minutes", "remove_old_queue_minutes", "fold_old_lives"):
            more |= len(await session.fetch(statement, self._days, self._batch)) == self._batch
        return more


_UPKEEP_SECONDS: Final = 300.0
# A key is kept as long as its item, and the window after that.
_LONGER_SECONDS: Final = 7 * 86_400.0


def shard_jobs(settings: Settings) -> list[Job]:
    """Claims of idempotency keys go a week after the keys themselves may."""
    keep, batch = settings.dedup_window_seconds + _LONGER_SECONDS, settings.eviction_batch_size

    async def forget_claims(session: Session) -> bool:
        return len(await session.fetch("forget_topic_key_claims", keep, batch)) == batch

    return [Job("topic key claims", _UPKEEP_SECONDS, forget_claims)]

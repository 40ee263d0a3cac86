"""The lane scanner: reads from PostgreSQL which partitions of a lane are ready, and ends holds in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import asyncpg

from queen.broker.pop.lanes import Holds, Lane
from queen.broker.pop.requests import Pop
from queen.chunks import chunks
from queen.concurrency import DeadlineTimer
from queen.errors import QueenError
from queen.storage.database import Database, Fetcher, Record

# Timers may ring a little early.
_SLACK_SECONDS = 0.001


class HoldTimer:
    """Ends holds in time; `on_ready` gets each lane that has a ready partition by it."""

    def __init__(self, holds: Holds, on_ready: Callable[[Lane], None]) -> None:
        self._holds = holds
        self._on_ready = on_ready
        self._timer = DeadlineTimer(self._ring)

    def arm(self) -> None:
        """Holds were added: one of them may be the next to end."""
        at = self._holds.next_at()
        if at is not None:
            self._timer.set(at)

    def _ring(self) -> None:
        try:
            for lane in self._holds.expire(asyncio.get_running_loop().time() + _SLACK_SECONDS):
                self._on_ready(lane)
        finally:
            self.arm()


SCAN_PAGE = 10_000
_ENOUGH_READY = 50_000


@dataclass(frozen=True, slots=True)
class Share:
    """Which partitions a worker tries first, so that the workers of a host do not all try for the same ones."""

    worker: int = 0
    workers: int = 1

    def is_other(self, row: Record) -> bool:
        return bool(row["id"] % self.workers != self.worker)


async def scan_lane(database: Fetcher, lane: Lane, holds: Holds, share: Share, on_page: Callable[[], None]) -> None:
    """Read which partitions have something: all pages the first time, the next page after that."""
    loop = asyncio.get_running_loop()
    whole = lane.scanned_at is None
    after = lane.scan_after
    total = 0
    while True:
        rows = await database.fetch("ready_partitions", lane.queue_id, lane.group_id, after, SCAN_PAGE, lane.since)
        (page,) = await database.fetch("partition_page_end", lane.queue_id, after, SCAN_PAGE)
        now = loop.time()
        for row in sorted(rows, key=share.is_other):
            _note(lane, holds, row["id"], row["available"], row["held_for"], now)
        total += page["found"]
        finished = page["found"] < SCAN_PAGE
        after = 0 if finished else page["last_id"]
        if finished or len(lane.ready) > _ENOUGH_READY or not whole:
            break
        on_page()
    lane.total_partitions = max(total, lane.total_partitions if lane.scan_after else 0)
    lane.scan_after = after
    lane.scanned_at = loop.time()


async def check_stale(database: Fetcher, lane: Lane, holds: Holds) -> None:
    """Read which of the partitions that another worker has taken from have something all the same."""
    stale, lane.stale = lane.stale, {}
    partitions = sorted(stale)
    try:
        for some in chunks(partitions, SCAN_PAGE):
            rows = await database.fetch("ready_among", some, lane.group_id)
            now = asyncio.get_running_loop().time()
            for row in rows:
                _note(lane, holds, row["id"], row["available"], row["held_for"], now)
    except BaseException:
        lane.stale = stale | lane.stale
        raise


def _note(lane: Lane, holds: Holds, partition_id: int, available: int, held_for: float, now: float) -> None:
    if partition_id in lane.claiming or partition_id in lane.ready:
        return
    if held_for > 0 and partition_id not in lane.freed_since_read:
        if partition_id not in lane.held:
            holds.add(lane, partition_id, now + held_for)
            lane.held_with_messages.add(partition_id)
    elif partition_id not in lane.held:
        lane.ready[partition_id] = available
        lane.stale.pop(partition_id, None)
    elif lane.held[partition_id] - now > 0.05 and partition_id not in lane.not_due:
        # Freed by a host that could not notify us.
        lane.free(partition_id, available)


Look: TypeAlias = Callable[[Lane, Iterable[Pop]], Coroutine[None, None, None]]


class LaneScanner:
    """Reads from PostgreSQL what lanes have."""

    def __init__(
        self,
        database: Database,
        holds: Holds,
        hold_timer: HoldTimer,
        share: Share,
        kick: Callable[[Lane], None],
        spawn: Callable[[Coroutine[None, None, None]], None],
        *,
        safety_poll: float,
    ) -> None:
        """`kick` has a lane served that may have something; `spawn` runs a background task."""
        self._database = database
        self._holds = holds
        self._hold_timer = hold_timer
        self._share = share
        self._kick = kick
        self._spawn = spawn
        self._safety_poll = safety_poll

    def settle_empty(self, lane: Lane) -> None:
        """Nothing is known to be ready: find out whether that is so, then answer the pops that do not wait."""
        if not lane.parked:
            return
        nonblocking = lane.nonblocking_pops()
        now = asyncio.get_running_loop().time()
        if lane.stale and lane.waiting:
            self._look_once(lane, self._check_stale, nonblocking)
        elif (
            lane.scanned_at is None
            or (nonblocking and lane.total_partitions <= SCAN_PAGE)
            or (lane.waiting and now - lane.scanned_at > self._safety_poll)
        ):
            self._look_once(lane, self.scan, nonblocking)
        elif nonblocking:
            self._answer_empty(lane, nonblocking)

    def _look_once(self, lane: Lane, look: Look, nonblocking: list[Pop]) -> None:
        if not lane.scanning:
            lane.scanning = True
            self._spawn(look(lane, nonblocking))

    async def _check_stale(self, lane: Lane, nonblocking: Iterable[Pop]) -> None:
        """Check whether stale partitions still have messages, then serve the lane again."""
        if await self._is_read(lane, check_stale(self._database, lane, self._holds), nonblocking):
            self._kick(lane)

    async def scan(self, lane: Lane, nonblocking: Iterable[Pop] = ()) -> None:
        """Find out what a lane has, and answer the pops that do not wait if that is nothing."""
        nonblocking = list(nonblocking)
        scanning = scan_lane(self._database, lane, self._holds, self._share, on_page=lambda: self._kick(lane))
        if await self._is_read(lane, scanning, nonblocking):
            if not lane.has_work and not lane.claiming:
                self._answer_empty(lane, nonblocking)
            self._kick(lane)

    async def _is_read(self, lane: Lane, reading: Awaitable[None], nonblocking: Iterable[Pop]) -> bool:
        """Whether a lane could be read; if not, the pops that do not wait fail."""
        try:
            with lane.reading():
                await reading
        except (QueenError, asyncpg.PostgresError) as error:
            for pop in nonblocking:
                pop.fail(error)
            return False
        finally:
            lane.scanning = False
            if lane.scan_again:
                lane.scan_again = False
                self._look_once(lane, self.scan, [])
        self._hold_timer.arm()
        return True

    def _answer_empty(self, lane: Lane, pops: Iterable[Pop]) -> None:
        for pop in pops:
            if lane not in pop.lanes:
                # It has left, to enter another lane, while this one was scanned for it.
                continue
            pop.lanes.discard(lane)
            lane.nonblocking.discard(pop)
            if not pop.lanes and not pop.busy:
                pop.resolve(None)
        lane.waiting = deque(pop for pop in lane.waiting if lane in pop.lanes)
        lane.sweep()

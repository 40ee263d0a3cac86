"""Lanes of which nothing is known to be ready: finding out whether that is so, and answering those who do not wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TypeAlias

import asyncpg

from queen.broker.hold_timer import HoldTimer
from queen.broker.lanes import Holds, Lane
from queen.broker.pop import Pop
from queen.broker.scans import SCAN_PAGE, Share, check_doubted, scan_lane
from queen.errors import QueenError
from queen.storage.database import Database

Look: TypeAlias = Callable[[Lane, Iterable[Pop]], Coroutine[None, None, None]]


class Lookout:
    """Looks into PostgreSQL for lanes."""

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
        """`kick` has a lane served that may have got something; `spawn` runs what nobody waits for."""
        self._database = database
        self._holds = holds
        self._hold_timer = hold_timer
        self._share = share
        self._kick = kick
        self._spawn = spawn
        self._safety_poll = safety_poll

    def settle_empty(self, lane: Lane) -> None:
        """Nothing is known to be ready: find out whether that is so, then answer those who do not wait."""
        if not lane.parked:
            return
        impatient = lane.impatient_pops()
        now = asyncio.get_running_loop().time()
        if lane.doubted and lane.waiting:
            self._look_once(lane, self._check_doubted, impatient)
        elif (
            lane.scanned_at is None
            or (impatient and lane.total_partitions <= SCAN_PAGE)
            or (lane.waiting and now - lane.scanned_at > self._safety_poll)
        ):
            self._look_once(lane, self.scan, impatient)
        elif impatient:
            self._answer_empty(lane, impatient)

    def _look_once(self, lane: Lane, look: Look, impatient: list[Pop]) -> None:
        if not lane.scanning:
            lane.scanning = True
            self._spawn(look(lane, impatient))

    async def _check_doubted(self, lane: Lane, impatient: Iterable[Pop]) -> None:
        """Find out whether what other workers took from has something left, then go on as if they had not."""
        if await self._is_read(lane, check_doubted(self._database, lane, self._holds), impatient):
            self._kick(lane)

    async def scan(self, lane: Lane, impatient: Iterable[Pop] = ()) -> None:
        """Find out what a lane has, and answer those who do not wait if that is nothing."""
        impatient = list(impatient)
        scanning = scan_lane(self._database, lane, self._holds, self._share, on_page=lambda: self._kick(lane))
        if await self._is_read(lane, scanning, impatient):
            if not lane.has_work and not lane.claiming:
                self._answer_empty(lane, impatient)
            self._kick(lane)

    async def _is_read(self, lane: Lane, reading: Awaitable[None], impatient: Iterable[Pop]) -> bool:
        """Whether a lane could be read; those who do not wait are told if it could not."""
        try:
            await reading
        except (QueenError, asyncpg.PostgresError) as error:
            for pop in impatient:
                pop.fail(error)
            return False
        finally:
            lane.scanning = False
        self._hold_timer.arm()
        return True

    def _answer_empty(self, lane: Lane, pops: Iterable[Pop]) -> None:
        for pop in pops:
            if lane not in pop.lanes:
                # It has left, to enter anew elsewhere, while this lane was scanned for it.
                continue
            pop.lanes.discard(lane)
            lane.impatient.discard(pop)
            if not pop.lanes and not pop.busy:
                pop.resolve(None)
        lane.waiting = deque(pop for pop in lane.waiting if lane in pop.lanes)
        lane.sweep()

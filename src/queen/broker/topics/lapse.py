"""Leases that nobody renewed: their items are ready again, or become dead letters."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg

from queen.background import Background
from queen.broker.topics.catalog import lock_keys
from queen.broker.topics.enqueue import OnFed
from queen.errors import QueenError
from queen.storage.database import Database

log = logging.getLogger(__name__)

LAPSED: Final = "The lease ended before the item was acknowledged"
SETTLED_SECONDS: Final = 3.0
"""Items that were handed out of a ready queue longer ago have their leases written to them."""
_AT_ONCE: Final = 1000
_FINE_SECONDS: Final = 0.05
_COARSE_SECONDS: Final = 1.0
_LONG_LEASE_SECONDS: Final = 60.0
# A lease may become visible a little after its time was read; what is older was looked at before.
_OVERLAP: Final = timedelta(seconds=5)
_EVER: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Lapses:
    """Looks when a lease that this worker has given may end, and now and then for those of workers that died."""

    def __init__(self, database: Database, on_fed: OnFed) -> None:
        self._link = database.link()
        self._on_fed = on_fed
        self._due: list[float] = []
        self._known: set[float] = set()
        self._looked_at = _EVER
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._background = Background()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    def note(self, seconds: float) -> None:
        """A lease that has just begun, or was extended, lasts so long; those that end together are seen together."""
        grain = _FINE_SECONDS if seconds <= _LONG_LEASE_SECONDS else _COARSE_SECONDS
        at = math.ceil((asyncio.get_running_loop().time() + seconds) / grain) * grain
        if at in self._known:
            return
        self._known.add(at)
        heapq.heappush(self._due, at)
        if self._due[0] == at:
            self._wake.set()

    async def look(self, *, everywhere: bool = False) -> None:
        """Free what has lapsed since the last look; `everywhere`: whenever it did."""
        async with self._looking:
            await self._look(_EVER if everywhere else self._looked_at - _OVERLAP)

    async def _look(self, since: datetime) -> None:
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        while True:
            (row,) = await self._link.fetch("topic_lapsed", since, _AT_ONCE)
            if row["ids"]:
                topics = await self._link.fetch("topic_lapse", lock_keys(row["topic_ids"]), sorted(row["ids"]), LAPSED)
                self._on_fed([((topic["namespace"], topic["topic"]), 0.0) for topic in topics])
            if len(row["ids"] or ()) < _AT_ONCE:
                self._looked_at = row["at"]
                return
            since = row["last"]

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            wait = self._due[0] - loop.time() if self._due else None
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                continue
            except TimeoutError:
                pass
            while self._due and self._due[0] <= loop.time():
                self._known.discard(heapq.heappop(self._due))
            try:
                await self.look()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("lapsed leases could not be looked for; the slow poll does it: %s", error)

"""The lease daemon: keeps the leases of ready queues, and of what was handed out of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import asyncpg

from queen.background import Background
from queen.broker.topics.catalog import TopicCatalog
from queen.broker.topics.lapse import SETTLED_SECONDS
from queen.broker.topics.ready import LEASE_SECONDS, ReadyDesk
from queen.errors import QueenError
from queen.storage.database import Database

log = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 5.0


class LeaseDaemon:
    """Once a second: renews the leases of queues in use, ends those nobody renewed, and writes handouts to items."""

    def __init__(self, database: Database, catalog: TopicCatalog, desk: ReadyDesk) -> None:
        self._link = database.link()
        self._catalog = catalog
        self._desk = desk
        self._background = Background()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        await self._background.stop()

    async def run_once(self) -> None:
        idle = asyncio.get_running_loop().time() - _IDLE_SECONDS
        for topic_id, seat in list(self._desk.seats.items()):
            if seat.used_at < idle:
                await self._desk.leave(topic_id)
        tokens = [seat.token for seat in self._desk.seats.values()]
        if tokens:
            await self._link.fetch("topic_ready_renew", tokens, LEASE_SECONDS)
        await self._link.fetch("topic_settle_handouts", SETTLED_SECONDS, None, None)
        for row in await self._link.fetch("topic_ready_lapsed"):
            topic = await self._catalog.one((row["namespace"], row["topic"])) if row["topic"] is not None else None
            if topic is not None:
                await self._desk.recall(topic, row["token"], 0.0)

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            if not self._catalog.used:
                # Where nobody uses topics, nobody waits for what a dead server has left.
                continue
            try:
                await self.run_once()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("leases of ready queues could not be looked after; tried again in a second: %s", error)

"""Shards that were away when the server started are set up when they come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import asyncpg

from queen.background import Background
from queen.errors import QueenError
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class Joining:
    """Has every database know which shard it is."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        self._background = Background()

    async def start(self) -> None:
        """Raises `QueenError` when the databases cannot be the shards they are named as."""
        away = await set_up_shards(self._dsns)
        if away:
            self._background.start(self._wait_for(away))

    async def stop(self) -> None:
        await self._background.stop()

    async def _wait_for(self, away: Sequence[int]) -> None:
        while away:
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                for number in away:
                    await migrate(self._dsns[number], wait_seconds=0)
                away = await set_up_shards(self._dsns)
            except (QueenError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("a shard that was away at the start still is: %s", error)
        log.info("every shard is there now")

"""Heads: where the ready items of a topic begin, moved forward as items are consumed.

A dequeue starts at the head of each priority, so it does not step over what was consumed before. Without heads that
would be the work of vacuum, which can do nothing while some transaction runs for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import asyncpg

from queen.broker.topics.catalog import LOCKS
from queen.errors import QueenError
from queen.storage.database import Database

log = logging.getLogger(__name__)

_EVERY: Final = 1000
"""Items that are leased between two moves of a topic's heads."""
_MOST_PRIORITIES: Final = 1000


class Heads:
    """Moves the heads of topics that are being consumed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._leased: Counter[int] = Counter()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def note(self, topic_id: int, count: int) -> None:
        """So many items of a topic were leased."""
        self._leased[topic_id] += count
        if self._leased[topic_id] >= _EVERY and topic_id not in self._tasks:
            del self._leased[topic_id]
            task = self._tasks[topic_id] = asyncio.get_running_loop().create_task(self._advance(topic_id))
            task.add_done_callback(lambda _: self._tasks.pop(topic_id, None))

    async def stop(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _advance(self, topic_id: int) -> None:
        try:
            await self.advance(topic_id)
        except (QueenError, asyncpg.PostgresError) as error:
            # It is tried again after as many items; until then dequeues have a longer way.
            log.debug("the heads of topic %d could not be moved: %s", topic_id, error)

    async def advance(self, topic_id: int) -> None:
        """Move the heads of a topic to its first ready items."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("topic_lock_alone", topic_id % LOCKS)
            await transaction.fetch("topic_advance_heads", topic_id, _MOST_PRIORITIES)

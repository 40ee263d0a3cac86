"""Ids of items, made in stretches of time that PostgreSQL reserves for this worker."""

from __future__ import annotations

from typing import Final

from queen.errors import DatabaseAway, Overloaded
from queen.storage.database import Database
from queen.wire.snowflake import NODES, SnowflakeSource

_STRETCH_MS: Final = 60_000
# Eight million ids, for when no stretch can be reserved because PostgreSQL is away.
_KEPT_MS: Final = 2000


class ItemIds:
    """Gives out ids; about once a minute that takes a statement."""

    def __init__(self, database: Database, preferred_node: int | None, source: SnowflakeSource | None = None) -> None:
        self._database = database
        self._preferred = -1 if preferred_node is None else preferred_node % NODES
        self._source = source if source is not None else SnowflakeSource()

    async def take(self, count: int, *, offline: bool = False) -> list[int]:
        """New ids; with `offline`, also while PostgreSQL is away, out of what is kept back for then."""
        ids = self._source.take(count, keep_ms=_KEPT_MS)
        if ids is not None:
            return ids
        try:
            return await self._reserve(count)
        except DatabaseAway:
            ids = self._source.take_kept(count, keep_ms=_KEPT_MS) if offline else None
            if ids is None:
                raise
            return ids

    async def _reserve(self, count: int) -> list[int]:
        ids = None
        while ids is None:
            rows = await self._database.fetch("topic_reserve_ids", self._source.now_ms(), _STRETCH_MS, self._preferred)
            if not rows:
                raise Overloaded("every node number for ids is being reserved by somebody else; try again soon")
            self._source.grant(rows[0]["node"], rows[0]["from_ms"], rows[0]["upto_ms"])
            ids = self._source.take(count, keep_ms=_KEPT_MS)
        return ids

"""Rewriting hot tables when vacuum cannot clean them.

A cursor or a partition is one row that changes with every batch. The versions it leaves behind are removed in passing,
unless a transaction somewhere in the database has been open for long: then they stay, and every look at the row has to
step over all of them. Vacuum must keep them, for that transaction might ask. It hardly ever does, and the tables are
small: so the live rows are rewritten, which leaves the old versions behind for good.
"""

from __future__ import annotations

import logging

import asyncpg

from queen.broker.maintenance.election import Session
from queen.storage.database import Record

log = logging.getLogger(__name__)

_TABLES = ("partitions", "cursors")
_DEAD_ROWS = 4000
_MOST_ROWS = 50_000
"""More rows than this take too long to write under the lock."""


class Rewrite:
    """Keeps the tables that change with every batch as small as their live rows."""

    async def run(self, session: Session) -> bool:
        for table in _TABLES:
            if await self._bloat(session, table):
                await session.fetch(f"vacuum_{table}")
                size = await self._bloat(session, table)
                if size is not None:
                    await self._rewrite(session, table, size)
        return False

    async def _bloat(self, session: Session, table: str) -> Record | None:
        """How many rows of a table are alive and dead, when too many are dead."""
        (size,) = await session.fetch("dead_rows", table)
        return size if size["dead"] > _DEAD_ROWS + size["live"] else None

    async def _rewrite(self, session: Session, table: str, size: Record) -> None:
        (row,) = await session.fetch("oldest_transaction")
        holder = row["holder"] or "something unseen, such as a replication slot or a prepared transaction"
        if size["live"] > _MOST_ROWS:
            log.warning("vacuum cannot clean queen.%s, pops get slower: held back by %s", table, holder)
            return
        try:
            await session.fetch(f"rewrite_{table}")
        except (asyncpg.LockNotAvailableError, asyncpg.InsufficientPrivilegeError) as error:
            log.warning(
                "queen.%s keeps %d dead rows, pops get slower: %s; held back by %s", table, size["dead"], error, holder
            )
            return
        log.info("rewrote queen.%s without %d dead rows that vacuum had to keep: %s", table, size["dead"], holder)

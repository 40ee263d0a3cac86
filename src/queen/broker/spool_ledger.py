"""How far the files of a spool were replayed: kept in PostgreSQL, in the transactions that store what they hold."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection

from queen.spool.spool import Spool
from queen.storage.database import Database


class SpoolLedger:
    """For the one process of a host that replays a spool: where to go on, and which files can go."""

    def __init__(
        self, spool: Spool, database: Database, *, keep_seconds: int = 0, remember_files: bool = False
    ) -> None:
        """`keep_seconds`: how long a file stays that is not needed any more. `remember_files`: copies of it may too."""
        self._reader = spool.reader
        self._database = database
        self._keep_seconds = keep_seconds
        self._forget = "spool_retire" if remember_files else "spool_forget"
        self.begun = False
        self.unsure = False
        """Set while something is being stored: should that fail, nobody knows how far it came."""

    async def begin(self) -> None:
        """Find the files, and how far they were replayed before, by whomever."""
        reader = self._reader
        await asyncio.to_thread(reader.begin, {})
        progress = await self.progress(reader.file_ids())
        await asyncio.to_thread(reader.begin, progress)
        # Some may have nothing left that could be replayed.
        await self.remove_finished()
        await asyncio.to_thread(reader.clear_if_drained)
        self.begun, self.unsure = True, False

    async def find_place(self) -> None:
        """The last attempt may have been committed, or not."""
        progress = await self.progress(self._reader.file_ids())
        await asyncio.to_thread(self._reader.rewind, progress)
        self.unsure = False

    async def progress(self, file_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, int]:
        if not file_ids:
            return {}
        rows = await self._database.fetch("spool_progress", list(file_ids))
        # The driver's UUIDs are equal to Python's but slower to compare.
        return {uuid.UUID(int=row["file_id"].int): row["position"] for row in rows}

    async def remove_finished(self) -> None:
        """Remove the files of which everything is stored or set aside."""
        gone = await asyncio.to_thread(self._reader.remove_finished, self._keep_seconds)
        if gone:
            await self._database.fetch(self._forget, gone)

"""Rescue: what a host had in its log when it went is stored by another, from the copies of the log.

Copies are for haste alone: the log itself is on the disk of its host, and is flushed when that is back. Whoever stores
a stretch of a file claims it in PostgreSQL, so it does not matter whether the host is gone, slow, or at it as well.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

import asyncpg

from queen.background import Background
from queen.broker.spool_ledger import SpoolLedger
from queen.broker.topics.wal_store import Moved, Stretch, WalStore
from queen.errors import QueenError
from queen.hot.interfaces import Copied, Copies
from queen.spool.frames import HEADER_BYTES
from queen.spool.record import decode_record
from queen.spool.spool import Spool
from queen.storage.database import Presence

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 5.0
_AT_ONCE: Final = 50


class Rescuer:
    """In the worker that flushes the log of this host: looks for what other hosts do not get done."""

    def __init__(self, wal: Spool, copies: Copies, ledger: SpoolLedger, store: WalStore, presence: Presence) -> None:
        self._wal = wal
        self._copies = copies
        self._ledger = ledger
        self._store = store
        self._presence = presence
        self._stuck: dict[str, tuple[int, float]] = {}
        """Files of others: how far they are stored, and since when no further."""
        self._background = Background()

    def start(self) -> None:
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._wal.replays or self._presence.away:
                continue
            try:
                await self._look()
            except (QueenError, asyncpg.PostgresError, OSError) as error:
                log.debug("the logs of other hosts could not be looked after: %s", error)
            except Exception:
                # Nobody else on this host would look.
                log.exception("looking after the logs of other hosts failed; it is tried again")

    async def _look(self) -> None:
        files = await self._copies.files()
        stored = await self._ledger.progress({uuid.UUID(file_id) for file_id in files})
        own = await asyncio.to_thread(self._wal.file_names)
        now = asyncio.get_running_loop().time()
        stuck: dict[str, tuple[int, float]] = {}
        for file_id in files:
            position = stored.get(uuid.UUID(file_id), HEADER_BYTES)
            # What came after its file was flushed, or while nobody could be told.
            await self._copies.trim(file_id, position)
            known, since = self._stuck.get(file_id, (position, now))
            if file_id in own or known != position:
                since = now
            elif now - since >= _PATIENCE_SECONDS:
                position = await self._rescue(file_id, position)
            stuck[file_id] = (position, since)
        self._stuck = stuck

    async def _rescue(self, file_id: str, position: int) -> int:
        """Store what there is of a file; returns how far that is."""
        begun = position
        while records := _in_a_row(await self._copies.read(file_id, position, _AT_ONCE), position):
            stretch = Stretch(uuid.UUID(file_id), position, records[-1].end)
            try:
                await self._store.store([stretch], [decode_record(copied.body) for copied in records])
            except Moved:
                break
            position = stretch.upto
            await self._copies.trim(file_id, position)
        if position > begun:
            log.warning(
                "bytes %d to %d of %s, a log of another host, were stored in its stead", begun, position, file_id
            )
        return position


def _in_a_row(records: Sequence[Copied], position: int) -> list[Copied]:
    """Those that follow each other from a byte on: what is missing in between is for their own host to store."""
    following: list[Copied] = []
    for record in records:
        if record.start != position:
            break
        following.append(record)
        position = record.end
    return following

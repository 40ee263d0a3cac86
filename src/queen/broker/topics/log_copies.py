"""Copies of the log of buffered items in Redis, and the recovery of logs of hosts that are down. Only with Redis."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

import asyncpg

from queen.broker.topics.buffered import TopicRecords
from queen.concurrency import BackgroundTask
from queen.errors import QueenError, RedisUnavailable
from queen.redis.stores import Copied, RedisCopies
from queen.spool.drainer import PositionMoved, Positions, RecordsRefused, Span
from queen.spool.files import HEADER_BYTES
from queen.spool.record import Record, decode_record
from queen.spool.spool import Spool
from queen.spool.writer import Placed
from queen.storage.database import Availability

log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_STUCK_SECONDS: Final = 5.0
"""The log of another host is recovered when its position has not moved for this long although copies exist."""
_BATCH: Final = 50


class LogCopies:
    """Copies records of this host's log to Redis, and removes the copies of those that are stored."""

    def __init__(self, copies: RedisCopies) -> None:
        self._copies = copies

    async def add(self, placed: Sequence[Placed]) -> None:
        """Copy records that were written together, and thereby to one file."""
        if not placed:
            return
        try:
            await self._copies.add(str(placed[0].file_id), [Copied(one.start, one.end, one.body) for one in placed])
        except RedisUnavailable as error:
            # They are durable on the disk of this host, which is what is promised.
            log.debug("%d records of buffered items not copied: %s", len(placed), error)

    async def trim(self, spans: Sequence[Span]) -> None:
        """Remove the copies of records that are stored."""
        try:
            for span in spans:
                await self._copies.trim(str(span.file_id), span.upto)
        except RedisUnavailable as error:
            # A recovery finds that they are stored.
            log.debug("copies of stored records not removed: %s", error)


class LogRecovery:
    """Stores records of other hosts from their copies, in the worker that drains the log of this host."""

    def __init__(
        self, wal: Spool, copies: RedisCopies, positions: Positions, records: TopicRecords, availability: Availability
    ) -> None:
        self._wal = wal
        self._copies = copies
        self._positions = positions
        self._records = records
        self._availability = availability
        self._stuck: dict[str, tuple[int, float]] = {}
        """Files of other hosts: their position, and since when it has not moved."""
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if not self._wal.replays or self._availability.down:
                continue
            try:
                await self._search()
            except (QueenError, asyncpg.PostgresError, OSError) as error:
                log.debug("recovery of logs of other hosts suspended: %s", error)
            except Exception:
                log.exception("recovery of logs of other hosts failed")

    async def _search(self) -> None:
        files = await self._copies.files()
        stored = await self._positions.of({uuid.UUID(file_id) for file_id in files})
        own = await asyncio.to_thread(self._wal.file_names)
        now = asyncio.get_running_loop().time()
        stuck: dict[str, tuple[int, float]] = {}
        for file_id in files:
            position = stored.get(uuid.UUID(file_id), HEADER_BYTES)
            # Copies that were added after their file was stored, or could not be removed then.
            await self._copies.trim(file_id, position)
            known, since = self._stuck.get(file_id, (position, now))
            if file_id in own or known != position:
                since = now
            elif now - since >= _STUCK_SECONDS:
                position = await self._recover(file_id, position)
            stuck[file_id] = (position, since)
        self._stuck = stuck

    async def _recover(self, file_id: str, position: int) -> int:
        """Store the copied records of a file; returns its position."""
        start = position
        while copies := _consecutive(await self._copies.read(file_id, position, _BATCH), position):
            records = [decode_record(copied.body) for copied in copies]
            try:
                await self._records.store([Span(uuid.UUID(file_id), position, copies[-1].end)], records)
                position = copies[-1].end
            except PositionMoved:
                break
            except RecordsRefused:
                for copied, record in zip(copies, records, strict=True):
                    await self._recover_one(Span(uuid.UUID(file_id), position, copied.end), record)
                    position = copied.end
            await self._copies.trim(file_id, position)
        if position > start:
            log.warning("log file %s of another host: bytes %d to %d stored from copies", file_id, start, position)
        return position

    async def _recover_one(self, span: Span, record: Record) -> None:
        try:
            await self._records.store([span], [record])
        except RecordsRefused as error:
            await self._records.divert(span, record, error)


def _consecutive(copies: Sequence[Copied], position: int) -> list[Copied]:
    """The records that follow each other from a byte on: what is missing in between is left to its own host."""
    following: list[Copied] = []
    for copied in copies:
        if copied.start != position:
            break
        following.append(copied)
        position = copied.end
    return following

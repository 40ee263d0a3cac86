"""Reads logs by offset, without consuming: for readers of whole queues that have no access to PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from queen.errors import Conflict, NotFound
from queen.log.segments import TimeSearch, offsets_after
from queen.storage.database import Database, Record
from queen.wire.api.messages.reading import LogPosition, LogPositions
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import partition_uuid
from queen.wire.segment import Frame, encode_frame

_MOST_BYTES: Final = 8 << 20
_MOST_SEGMENTS: Final = 2000


class LogReader:
    """Shows what the partitions of one shard hold, and hands out their segments."""

    def __init__(self, database: Database, shard: int, envelope: Envelope) -> None:
        self._database = database
        self._shard = shard
        self._envelope = envelope

    async def positions(self, queue: str, moment: datetime | None) -> LogPositions:
        """The partitions of a queue, by name: the offsets they hold, and the first that was stored from a moment on."""
        rows = await self._database.fetch("log_positions", [queue])
        if not rows:
            await self._check_queue(queue)
        reached = await self._offsets(rows, moment)
        positions = [
            LogPosition(
                row["partition"],
                partition_uuid(self._shard, row["id"]),
                row["floor_offset"],
                row["next_offset"],
                offset,
            )
            for row, offset in zip(rows, reached, strict=True)
        ]
        return LogPositions(queue, positions)

    async def segments(self, queue: str, partition: str, start: int, end: int) -> bytes:
        """Frames of the segments that hold offsets [start, end): as many as fit in one answer, at least one.

        Who wants the rest asks again from the end of the last. Bodies are not encrypted, whatever their queue says.
        """
        found = await self._database.fetch("queue_by_name", queue)
        named = await self._database.fetch("partitions_by_names", [found[0]["id"]], [partition]) if found else []
        if not named:
            raise NotFound(f"there is no partition {partition!r} of a queue {queue!r}")
        where = named[0]["id"]
        sizes = await self._database.fetch("log_sizes", where, start, end, _MOST_SEGMENTS)
        if not sizes:
            return b""
        upto = _fitting(sizes)
        rows = await self._database.fetch("log_spans", [where], [start], [min(end, upto)])
        return b"".join([encode_frame(self._frame(row)) for row in rows])

    def _frame(self, row: Record) -> Frame:
        body = row["body"]
        if self._envelope.is_encrypted(body):
            try:
                body = self._envelope.seal(self._envelope.open(body))
            except EnvelopeError as error:
                raise Conflict(f"the segment at offset {row['base_offset']} cannot be read: {error}") from error
        return Frame(row["base_offset"], row["count"], row["micros"], row["first_id"], body)

    async def _offsets(self, rows: Sequence[Record], moment: datetime | None) -> Sequence[int | None]:
        if moment is None:
            return [None] * len(rows)
        # What is found was stored after a time; times are whole microseconds.
        before = max(moment, datetime.min.replace(tzinfo=moment.tzinfo) + timedelta(days=2)) - timedelta(microseconds=1)
        return await offsets_after(
            self._database, [TimeSearch(row["id"], row["floor_offset"], row["next_offset"], before) for row in rows]
        )

    async def _check_queue(self, queue: str) -> None:
        if not await self._database.fetch("known_queues", [queue]):
            raise NotFound(f"there is no queue {queue!r}")


def _fitting(sizes: Sequence[Record]) -> int:
    """The offset up to which segments fit in an answer."""
    nbytes = 0
    for row in sizes:
        nbytes += row["nbytes"]
        if nbytes > _MOST_BYTES and row is not sizes[0]:
            return int(row["base_offset"])
    return int(sizes[-1]["base_offset"] + sizes[-1]["count"])

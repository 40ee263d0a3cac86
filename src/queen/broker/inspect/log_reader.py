"""Reads logs by offset, without consuming: for readers of whole queues that have no access to PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Raw

from queen.errors import Conflict, NotFound
from queen.log.segments import Place, TimeSearch, offsets_after, read_segment
from queen.storage.database import Database, Record
from queen.wire.api.messages.reading import (
    MOST_CHANGED,
    MOST_FETCHED,
    OUT_OF_RANGE,
    UNKNOWN_PARTITION,
    Changed,
    ChangedEntry,
    ChangedPartition,
    ChangedPartitions,
    FetchBody,
    Fetched,
    FetchedEntry,
    FetchedRecord,
    LogPosition,
    LogPositions,
)
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import partition_uuid
from queen.wire.segment import Frame, MalformedSegment, Segment, encode_frame
from queen.wire.times import iso_micros

_MOST_BYTES: Final = 8 << 20
_MOST_SEGMENTS: Final = 2000
_MOST_SEGMENTS_OF_ENTRY: Final = 256


class LogReader:
    """Shows what the partitions of one shard hold, and hands out their segments."""

    def __init__(self, database: Database, envelope: Envelope) -> None:
        self._database = database
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
                partition_uuid(row["id"]),
                row["floor_offset"],
                row["next_offset"],
                offset,
            )
            for row, offset in zip(rows, reached, strict=True)
        ]
        return LogPositions(queue, positions)

    async def segments(self, queue: str, partition: str, start: int, end: int) -> bytes:
        """Frames of the segments that hold offsets [start, end): as many as fit in one answer, at least one.

        For the rest, ask again from the end of the last. Bodies are not encrypted, whatever their queue says.
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

    async def fetch(self, asked: FetchBody) -> Fetched:
        """The messages of partitions from an offset on each, as many as fit in the bytes that were asked for."""
        entries = asked.entries
        found = [FetchedEntry(entry.queue, entry.partition, [], error=UNKNOWN_PARTITION) for entry in entries]
        starts: dict[int, int] = {}
        rows = await self._database.fetch(
            "fetch_ends", [entry.queue for entry in entries], [entry.partition for entry in entries]
        )
        for row in rows:
            slot = row["slot"] - 1
            one, start = found[slot], entries[slot].offset
            one.high_watermark, one.log_start_offset = row["next_offset"], row["floor_offset"]
            is_held = row["floor_offset"] <= start <= row["next_offset"]
            one.error = None if is_held else OUT_OF_RANGE
            if is_held and start < row["next_offset"]:
                starts[slot] = row["id"]
        if starts:
            await self._read_entries(asked, found, starts)
        return Fetched(found)

    async def _read_entries(self, asked: FetchBody, found: Sequence[FetchedEntry], starts: dict[int, int]) -> None:
        """Read what fits of the entries in `starts`, each with the id of its partition."""
        slots = list(starts)
        entries = asked.entries
        rows = await self._database.fetch(
            "fetch_sizes",
            [starts[slot] for slot in slots],
            [entries[slot].offset for slot in slots],
            _MOST_SEGMENTS_OF_ENTRY,
        )
        room = min(asked.max_bytes, MOST_FETCHED)
        own_room = {slot: min(entries[slot].max_bytes, MOST_FETCHED) for slot in slots}
        chosen: dict[int, list[Place]] = {}
        for row in rows:
            slot = slots[row["slot"] - 1]
            if (room > 0 and own_room[slot] > 0) or not chosen:
                chosen.setdefault(slot, []).append((row["partition_id"], row["base_offset"]))
                room -= row["nbytes"]
                own_room[slot] -= row["nbytes"]
        segments = await self._segments({place for places in chosen.values() for place in places})
        room = min(asked.max_bytes, MOST_FETCHED)
        for slot, places in chosen.items():
            entry, one = entries[slot], found[slot]
            most = min(room, entry.max_bytes)
            for place in places:
                if most > 0 and place in segments:
                    most, room = _add_records(one, segments[place], entry.offset, most, room)

    async def _segments(self, places: set[Place]) -> dict[Place, Segment]:
        rows = await self._database.fetch("segments_at", [id for id, _ in places], [base for _, base in places])
        segments: dict[Place, Segment] = {}
        for row in rows:
            try:
                segments[row["partition_id"], row["base_offset"]] = read_segment(self._envelope, row)
            except (EnvelopeError, MalformedSegment) as error:
                raise Conflict(f"the segment at offset {row['base_offset']} cannot be read: {error}") from error
        return segments

    async def changed(self, entries: Sequence[ChangedEntry]) -> Changed:
        """The partitions of queues that were written to since a time each, in the order of their creation."""
        (safe,) = await self._database.fetch("safe_time")
        return Changed([await self._changed_of(entry) for entry in entries], iso_micros(safe["safe_time"]))

    async def _changed_of(self, entry: ChangedEntry) -> ChangedPartitions:
        queues = await self._database.fetch("queue_by_name", entry.queue)
        if not queues:
            return ChangedPartitions(entry.queue, [], error=UNKNOWN_PARTITION)
        limit = min(entry.limit, MOST_CHANGED)
        rows = await self._database.fetch(
            "changed_partitions", queues[0]["id"], int(entry.after or 0), _in_utc(entry.since), limit + 1
        )
        partitions = [
            ChangedPartition(
                row["name"],
                partition_uuid(row["id"]),
                row["next_offset"] - 1,
                row["floor_offset"],
                iso_micros(row["last_at"]),
            )
            for row in rows[:limit]
        ]
        after = str(rows[limit - 1]["id"]) if len(rows) > limit else None
        return ChangedPartitions(entry.queue, partitions, after)

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


def _add_records(one: FetchedEntry, segment: Segment, start: int, most: int, room: int) -> tuple[int, int]:
    """Add the records of a segment while there is room, at least one; what room is left of both."""
    ids, stored_at = segment.transaction_ids(), iso_micros(segment.created_at)
    for index in range(max(0, start - segment.base_offset), segment.count):
        if most <= 0:
            break
        if segment.is_deleted(index):
            continue
        payload = segment.payload(index)
        one.records.append(FetchedRecord(segment.base_offset + index, ids[index], Raw(payload), stored_at))
        most -= len(payload)
        room -= len(payload)
    return most, room


def _in_utc(moment: datetime | None) -> datetime | None:
    """A time without a zone is in UTC."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment

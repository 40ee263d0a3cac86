"""Searching messages: a bounded number of them at a time, with a cursor to go on from.

Partitions are searched in the order of their names, each from its newest message back. So what is stored meanwhile,
such as copies of the messages that were found, is not met by the search that goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec

from queen.broker.answer_size import Answers, AnswerSize, NewSize
from queen.broker.inspect.browse import Readers, listed_message, read_positions
from queen.errors import BadRequest, NotFound
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.segments import Place, StoredMessage, TimeSearch, offsets_after, read_segment, stored_message
from queen.storage.database import Database, Record, can_be_stored
from queen.wire.api.messages.browse import MessageStatus, SearchedMessage
from queen.wire.conditions import PayloadFilter
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdBlock
from queen.wire.segment import MalformedSegment, Segment

_MOST_MESSAGES: Final = 20_000
_MOST_BYTES: Final = 32 << 20
_MOST_PARTITIONS: Final = 1000
_MOST_SECONDS: Final = 2.0
"""A search stops after examining this much, or after this time, whatever it has found."""
_PARTITIONS_AT_ONCE: Final = 200
_SEGMENTS_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 4 << 20
_NOTHING_DEAD: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class SearchFilter:
    """Which messages of a queue are meant; what is None does not matter."""

    queue: str
    partition: str | None = None
    since: datetime | None = None
    before: datetime | None = None
    status: MessageStatus | None = None
    payload: PayloadFilter = field(default_factory=PayloadFilter)


@dataclass(frozen=True, slots=True)
class Found:
    """A message that was found, its readers, and whether it is a dead letter."""

    partition: Partition
    offset: int
    message: StoredMessage
    readers: Readers
    dead: bool

    @property
    def place(self) -> Place:
        return self.partition.id, self.offset


@dataclass(slots=True)
class Searched:
    """The matches of a search, how many messages it examined, and where to continue; None: it is complete."""

    queue: Queue
    found: list[Found]
    scanned: int = 0
    cursor: str | None = None


class _Cursor(msgspec.Struct, array_like=True):
    """Go on below an offset of a partition, or (None) behind the partition."""

    partition: str
    below: int | None


def describe_found(found: Found, queue: Queue) -> SearchedMessage:
    """A message that was found as clients are shown it."""
    listed = listed_message(found.message, found.partition, queue, found.place, found.readers, found.dead)
    return SearchedMessage(
        **msgspec.structs.asdict(listed), offset=found.offset, data=msgspec.Raw(found.message.payload)
    )


class MessageSearch:
    """Searches queues of one shard."""

    def __init__(self, database: Database, catalog: Catalog, envelope: Envelope, answers: Answers) -> None:
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._envelope = envelope

    async def search(self, wanted: SearchFilter, most: int, cursor: str | None) -> Searched:
        """The next messages that pass the filter, at most `most`. Raises `NotFound` when there is no such queue."""
        queue = await self._catalog.queue(wanted.queue) if can_be_stored(wanted.queue) else None
        if queue is None:
            raise NotFound("Queue not found")
        start = _parse(cursor)

        async def scan(new_size: NewSize) -> Searched:
            return await _Scan(self._database, self._envelope, queue, wanted, most, new_size()).run(start)

        return await self._answers.make(scan)


class _Scan:
    """One search, as far as it goes."""

    def __init__(
        self, database: Database, envelope: Envelope, queue: Queue, wanted: SearchFilter, most: int, size: AnswerSize
    ) -> None:
        self._size = size
        self._database = database
        self._envelope = envelope
        self._queue = queue
        self._wanted = wanted
        self._most = most
        self._result = Searched(queue, [])
        self._bytes = 0
        self._partitions = 0
        self._deadline = asyncio.get_running_loop().time() + _MOST_SECONDS

    async def run(self, start: _Cursor | None) -> Searched:
        """Search until enough messages are found or examined."""
        async for row, readers, low, high in self._spans(start):
            below = await self._search_partition(row, readers, low, high)
            if below is not None:
                self._result.cursor = _encode(_Cursor(row["name"], below))
                return self._result
            self._partitions += 1
            if self._is_enough:
                self._result.cursor = _encode(_Cursor(row["name"], None))
                return self._result
        return self._result

    @property
    def _is_enough(self) -> bool:
        return (
            len(self._result.found) >= self._most
            or self._result.scanned >= _MOST_MESSAGES
            or self._bytes >= _MOST_BYTES
            or self._partitions >= _MOST_PARTITIONS
            or asyncio.get_running_loop().time() >= self._deadline
        )

    async def _spans(self, start: _Cursor | None) -> AsyncIterator[tuple[Record, Readers, int, int]]:
        """The partitions from where the search begins, each with the offsets to examine."""
        wanted = self._wanted
        after, inclusive = (start.partition, start.below is not None) if start is not None else ("", True)
        while True:
            rows = await self._database.fetch(
                "search_partitions",
                self._queue.id,
                wanted.partition,
                after,
                inclusive,
                wanted.since,
                wanted.status is MessageStatus.DEAD_LETTER,
                _PARTITIONS_AT_ONCE,
            )
            if not rows:
                return
            readers = await read_positions(self._database, [row["id"] for row in rows])
            lows = await self._offsets(rows, wanted.since, "floor_offset")
            highs = await self._offsets(rows, wanted.before, "next_offset")
            for row, low, high in zip(rows, lows, highs, strict=True):
                if start is not None and start.below is not None and row["name"] == start.partition:
                    high = min(high, start.below)
                low, high = _narrow(readers[row["id"]], wanted.status, low, high)
                yield row, readers[row["id"]], low, high
            if len(rows) < _PARTITIONS_AT_ONCE:
                return
            after, inclusive = rows[-1]["name"], False

    async def _offsets(self, rows: Sequence[Record], moment: datetime | None, otherwise: str) -> list[int]:
        """The first offset of each partition that was stored at a moment or later; without one, a column of it."""
        if moment is None:
            return [row[otherwise] for row in rows]
        before = moment - timedelta(microseconds=1)
        return await offsets_after(
            self._database, [TimeSearch(row["id"], row["floor_offset"], row["next_offset"], before) for row in rows]
        )

    async def _search_partition(self, row: Record, readers: Readers, low: int, high: int) -> int | None:
        """Search a partition backwards; the offset below which to go on, or None when it is done."""
        partition = Partition(row["id"], self._queue.id, self._queue.name, row["name"])
        only_dead = self._wanted.status is MessageStatus.DEAD_LETTER
        while low < high:
            segments = await self._database.fetch(
                "search_segments", row["id"], low, high, _SEGMENTS_AT_ONCE, _BYTES_AT_ONCE, only_dead
            )
            if not segments:
                return None
            first = segments[-1]["base_offset"]
            dead = await self._dead(row["id"], first, high)
            for segment in segments:
                self._bytes += len(segment["body"])
                offsets = range(
                    min(high, segment["base_offset"] + segment["count"]) - 1, max(low, segment["base_offset"]) - 1, -1
                )
                for found in self._matching(partition, segment, offsets, readers, dead):
                    if not self._size.fits(len(found.message.payload)):
                        self._result.scanned += offsets.start - found.offset
                        return found.offset + 1
                    self._result.found.append(found)
                    if len(self._result.found) >= self._most:
                        self._result.scanned += offsets.start - found.offset + 1
                        return found.offset
                self._result.scanned += len(offsets)
                high = offsets.stop + 1
                if self._is_enough:
                    return high if low < high else None
                # Unpacking takes time that others may need.
                await asyncio.sleep(0)
        return None

    async def _dead(self, partition_id: int, first: int, last: int) -> frozenset[int]:
        rows = await self._database.fetch("dead_between", partition_id, first, last)
        return frozenset(row["message_offset"] for row in rows) if rows else _NOTHING_DEAD

    def _matching(
        self, partition: Partition, row: Record, offsets: range, readers: Readers, dead: frozenset[int]
    ) -> Iterator[Found]:
        wanted = self._wanted
        chosen = [
            offset
            for offset in offsets
            if wanted.status is None or readers.status(offset, dead=offset in dead) is wanted.status
        ]
        if not chosen:
            return
        base = row["base_offset"]
        try:
            segment = read_segment(self._envelope, row)
        except (EnvelopeError, MalformedSegment) as error:
            if wanted.payload.is_empty:
                block = IdBlock.parse(row["ids"][:16])
                for offset in chosen:
                    message = StoredMessage(block.text(offset - base), row["created_at"], unreadable=str(error))
                    yield Found(partition, offset, message, readers, offset in dead)
            return
        yield from self._read(partition, segment, chosen, readers, dead)

    def _read(
        self, partition: Partition, segment: Segment, offsets: Sequence[int], readers: Readers, dead: frozenset[int]
    ) -> Iterator[Found]:
        names: list[str] | None = None
        for offset in offsets:
            index = offset - segment.base_offset
            if segment.is_deleted(index) or not self._wanted.payload.admits(segment.payload(index)):
                continue
            names = names if names is not None else segment.transaction_ids()
            message = stored_message(segment, index, names[index])
            yield Found(partition, offset, message, readers, offset in dead)


def _narrow(readers: Readers, status: MessageStatus | None, low: int, high: int) -> tuple[int, int]:
    """Leave out offsets that cannot have a status, because the group that decides has or has not consumed them."""
    if status is None or status is MessageStatus.DEAD_LETTER:
        return low, high
    if readers.queue_mode is not None:
        consumed = readers.queue_mode.committed
    else:
        consumed = min((position.committed for position in readers.groups), default=0)
    if status is MessageStatus.COMPLETED:
        return low, min(high, consumed)
    return max(low, consumed), high


def _parse(cursor: str | None) -> _Cursor | None:
    if not cursor:
        return None
    try:
        return msgspec.json.decode(cursor, type=_Cursor)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest("cursor must be that of the previous answer to this search") from error


def _encode(cursor: _Cursor) -> str:
    return msgspec.json.encode(cursor).decode()

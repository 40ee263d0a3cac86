"""The dead letter queue: listing, redriving and deleting messages that could not be processed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import msgspec

from queen.broker.ack.redrive import Redriver
from queen.broker.answer_size import Answers, AnswerSize
from queen.errors import Conflict, NotFound
from queen.log.catalog import Catalog, Queue
from queen.log.segments import Place
from queen.storage.database import Database, Record, can_be_stored, storable
from queen.wire.api.messages.dead_letters import (
    DeadLetter,
    DeadLetterList,
    DeadLetterReason,
    DeadLetterReport,
    Purged,
    Retried,
)
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.fields import Pagination
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis

_REDRIVE_MESSAGES = 100
_REPORTED = 100_000
_REDRIVE_BYTES = 8 << 20
_PURGE_ROWS = 5000

FilterArguments: TypeAlias = tuple[
    int | None, int | None, str | None, datetime | None, datetime | None, list[str] | None
]


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """A filter of dead letters; a field that is None matches all. Times are those of the failure."""

    queue: str | None = None
    group: str | None = None
    partition: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    transaction_ids: Sequence[str] | None = None


class DeadLetters:
    """The dead letters of one shard."""

    def __init__(
        self, database: Database, catalog: Catalog, envelope: Envelope, redriver: Redriver, answers: Answers
    ) -> None:
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._redriver = redriver

    async def page(self, wanted: DeadLetterFilter, limit: int, offset: int) -> DeadLetterList:
        """A page of dead letters, newest failure first. Raises `TooLarge` where it has too many bytes."""
        return await self._answers.make(lambda new_size: self._page(wanted, limit, offset, new_size()))

    async def _page(self, wanted: DeadLetterFilter, limit: int, offset: int, size: AnswerSize) -> DeadLetterList:
        rows: list[Record] = []
        total = 0
        arguments = await self._arguments(wanted)
        if arguments is not None:
            (count,) = await self._database.fetch("count_dead_letters", *arguments)
            total = count["total"]
            if offset < total:
                rows = await self._database.fetch("dead_letters_page", *arguments, limit, offset, size.most)
        letters = [self._render(row, size) for row in rows]
        return DeadLetterList(letters, total, limit, offset, Pagination(limit, offset, total))

    async def retry(self, wanted: DeadLetterFilter, limit: int) -> Retried:
        """Store the messages again at the tails of their partitions, those that failed first before the others.

        A message is redriven exactly once for its dead letters, however many requests ask for it at a time. What fails
        again meanwhile is left for the next time.
        """
        queue = await self._queue(wanted)
        if queue is None:
            raise NotFound("Queue not found")
        arguments = await self._arguments(wanted)
        if arguments is None:
            return Retried(True, queue.name, 0, 0, 0)
        (count,) = await self._database.fetch("count_dead_letters", *arguments)
        retried = removed = 0
        while retried < limit:
            most = min(_REDRIVE_MESSAGES, limit - retried)
            rows = await self._database.fetch("next_dead_letters", *arguments, count["newest_id"], most)
            if not rows:
                break
            try:
                messages, letters = await self._redriver.letters(queue, _portion(rows), arguments[1])
            except Conflict as error:
                raise type(error)(f"{error} ({retried} messages had been retried before)") from error
            retried += len(messages)
            removed += letters
        (left,) = await self._database.fetch("count_dead_letters", *arguments)
        return Retried(True, queue.name, retried, removed, left["total"])

    async def report(self, wanted: DeadLetterFilter, limit: int) -> DeadLetterReport:
        """The most frequent errors of the newest dead letters that match a filter."""
        arguments = await self._arguments(wanted)
        rows = (
            []
            if arguments is None
            else await self._database.fetch("dead_letter_report", *arguments[:5], _REPORTED, limit)
        )
        reasons = [
            DeadLetterReason(
                row["queue_name"],
                row["group_name"],
                row["error"],
                row["found"],
                iso_millis(row["first_at"]),
                iso_millis(row["last_at"]),
                row["most_retries"],
                partition_uuid(row["partition_id"]),
                row["transaction_id"],
            )
            for row in rows
        ]
        return DeadLetterReport(rows[0]["total"] if rows else 0, reasons)

    async def purge(self, wanted: DeadLetterFilter) -> Purged:
        """Delete the dead letters that are there now; their messages stay in their partitions."""
        if await self._queue(wanted) is None:
            raise NotFound("Queue not found")
        deleted = 0
        arguments = await self._arguments(wanted)
        if arguments is not None:
            (count,) = await self._database.fetch("count_dead_letters", *arguments)
            while True:
                (gone,) = await self._database.fetch("purge_dead_letters", *arguments, count["newest_id"], _PURGE_ROWS)
                deleted += gone["deleted"]
                if gone["deleted"] == 0:
                    break
        return Purged(True, wanted.queue or "", deleted)

    async def _arguments(self, wanted: DeadLetterFilter) -> FilterArguments | None:
        """The filter as parameters of statements; None when it names something that does not exist: nothing matches."""
        if not all(can_be_stored(name) for name in (wanted.group, wanted.partition) if name):
            return None
        queue = await self._queue(wanted)
        if wanted.queue is not None and queue is None:
            return None
        group_id: int | None = None
        if wanted.group is not None:
            group_id = await self._catalog.existing_group(wanted.group)
            if group_id is None:
                return None
        ids = None if wanted.transaction_ids is None else [storable(id) for id in wanted.transaction_ids]
        return queue.id if queue else None, group_id, wanted.partition, wanted.since, wanted.until, ids

    async def _queue(self, wanted: DeadLetterFilter) -> Queue | None:
        if not wanted.queue or not can_be_stored(wanted.queue):
            return None
        return await self._catalog.queue(wanted.queue)

    def _render(self, row: Record, size: AnswerSize) -> DeadLetter:
        data, unreadable = None, None
        body = row["body"]
        try:
            payload = self._envelope.open(body) if body is not None else None
            size.add(len(payload) if payload is not None else None)
            data = msgspec.Raw(payload or b"")
        except EnvelopeError as error:
            unreadable = str(error)
        return DeadLetter(
            id=str(row["message_id"]),
            transaction_id=row["transaction_id"],
            partition_id=partition_uuid(row["partition_id"]),
            queue=row["queue_name"],
            partition=row["partition_name"],
            consumer_group=row["group_name"],
            error_message=row["error_message"],
            retry_count=row["retry_count"],
            data=data,
            trace_id=row["trace_id"],
            producer_sub=row["producer_sub"],
            created_at=iso_millis(row["original_created_at"]),
            failed_at=iso_millis(row["failed_at"]),
            unreadable=unreadable if unreadable is not None else msgspec.UNSET,
        )


def _portion(rows: Sequence[Record]) -> list[Place]:
    """The first dead letters that fit in one transaction: of one producer, and up to a size."""
    places: dict[Place, None] = {}
    nbytes = 0
    for row in rows:
        nbytes += row["nbytes"]
        if places and (row["producer_sub"] != rows[0]["producer_sub"] or nbytes > _REDRIVE_BYTES):
            break
        places[row["partition_id"], row["message_offset"]] = None
    return list(places)

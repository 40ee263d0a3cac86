"""Traces: events that consumers record about a message, found by message or by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from queen.broker.ack.leases import LeaseBook, find_offset
from queen.broker.answer_size import Answers, AnswerSize
from queen.errors import NotFound
from queen.log.catalog import QUEUE_MODE, Catalog
from queen.log.segments import StoredMessages, UnreadableSegment, find_message
from queen.storage.database import Database, Record, can_be_stored, storable
from queen.wire.api.messages.traces import (
    NamedTraceList,
    TraceByName,
    TraceList,
    TraceName,
    TraceNameList,
    TraceOfMessage,
)
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.fields import Pagination
from queen.wire.ids import parse_partition_uuid, partition_uuid
from queen.wire.times import iso_millis


@dataclass(frozen=True, slots=True)
class Trace:
    """One event of one message. `data` is JSON as it came."""

    partition_id: str
    transaction_id: str
    data: bytes
    group: str = QUEUE_MODE
    event_type: str = "info"
    names: Sequence[str] = ()


class Traces:
    """The traces of one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        leases: LeaseBook,
        envelope: Envelope,
        worker_id: int,
        answers: Answers,
    ) -> None:
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._leases = leases
        self._envelope = envelope
        self._worker_id = str(worker_id)

    async def add(self, trace: Trace) -> str:
        """Store a trace; returns its id. Raises `NotFound` when there is no such message."""
        partition_id = self._partition(trace.partition_id)
        partition = (await self._catalog.partitions_by_id([partition_id])).get(partition_id)
        queue = await self._catalog.queue_of(partition) if partition is not None else None
        if partition is None or queue is None:
            raise NotFound("Message not found")
        group_id = await self._catalog.existing_group(trace.group)
        offset = await find_offset(
            self._database, self._envelope, self._leases, partition_id, group_id, trace.transaction_id
        )
        if offset is None:
            raise NotFound("Message not found")
        (row,) = await self._database.fetch(
            "insert_trace",
            queue.id,
            partition_id,
            offset,
            storable(trace.transaction_id),
            trace.group,
            trace.event_type,
            self._envelope.seal(trace.data, encrypt=queue.encryption_enabled),
            self._worker_id,
            list(dict.fromkeys(trace.names)),
        )
        return str(row["public_id"])

    async def of_message(self, partition: str, transaction_id: str, limit: int, offset: int) -> TraceList:
        """The traces of a message, oldest first; none when there is no such message. Raises `TooLarge`."""
        return await self._answers.make(
            lambda new_size: self._of_message(partition, transaction_id, limit, offset, new_size())
        )

    async def _of_message(
        self, partition: str, transaction_id: str, limit: int, offset: int, size: AnswerSize
    ) -> TraceList:
        rows: list[Record] = []
        total = 0
        try:
            partition_id = self._partition(partition)
        except NotFound:
            return TraceList([], 0, Pagination(limit, offset, 0))
        message_offset = await self._traced_offset(partition_id, transaction_id)
        if message_offset is not None:
            (count,) = await self._database.fetch("count_traces_at", partition_id, message_offset)
            total = count["total"]
            if offset < total:
                rows = await self._database.fetch("traces_at", partition_id, message_offset, limit, offset, size.most)
        traces = [TraceOfMessage(**self._event(row, size)) for row in rows]
        return TraceList(traces, total, Pagination(limit, offset, total))

    async def by_name(self, name: str, limit: int, offset: int) -> NamedTraceList:
        """The traces of a name over all messages, oldest first, with what those messages carry. Raises `TooLarge`."""
        return await self._answers.make(lambda new_size: self._by_name(name, limit, offset, new_size()))

    async def _by_name(self, name: str, limit: int, offset: int, size: AnswerSize) -> NamedTraceList:
        if not can_be_stored(name):
            return NamedTraceList([], 0, Pagination(limit, offset, 0))
        (count,) = await self._database.fetch("count_traces_named", name)
        rows: list[Record] = []
        if offset < count["total"]:
            rows = await self._database.fetch("traces_named", name, limit, offset, size.most)
        events = [self._event(row, size) for row in rows]
        places = {(row["partition_id"], row["message_offset"]) for row in rows}
        messages = await StoredMessages(self._database, self._envelope).read(places, payloads=True)
        traces = []
        for row, event in zip(rows, events, strict=True):
            message = messages.get((row["partition_id"], row["message_offset"]))
            if message is not None:
                size.add(len(message.payload))
            traces.append(
                TraceByName(
                    **event,
                    transaction_id=row["transaction_id"],
                    partition_id=partition_uuid(row["partition_id"]),
                    queue_name=row["queue_name"],
                    partition_name=row["partition_name"],
                    message_payload=msgspec.Raw(message.payload) if message is not None else None,
                )
            )
        return NamedTraceList(traces, count["total"], Pagination(limit, offset, count["total"]))

    async def names(self, search: str, limit: int, offset: int) -> TraceNameList:
        """The names in use that contain a text, the most recently used first."""
        rows = await self._database.fetch("trace_names_page", limit, offset, search)
        names = [
            TraceName(row["name"], row["traces"], row["messages"], iso_millis(row["last_seen"]))
            for row in rows
            if row["name"] is not None
        ]
        total = rows[0]["total"]
        return TraceNameList(names, total, Pagination(limit, offset, total))

    async def _traced_offset(self, partition_id: int, transaction_id: str) -> int | None:
        """The offset of a message; traces outlive their messages, so one that is gone is looked up in the traces."""
        try:
            found = await find_message(self._database, self._envelope, partition_id, transaction_id)
        except UnreadableSegment:
            found = None
        if found is not None:
            return found.offset
        (row,) = await self._database.fetch("traced_offset", partition_id, storable(transaction_id))
        offset: int | None = row["message_offset"]
        return offset

    def _partition(self, text: str) -> int:
        partition = parse_partition_uuid(text)
        if partition is None:
            raise NotFound("Message not found")
        return partition

    def _event(self, row: Record, size: AnswerSize) -> dict[str, Any]:
        """The fields that every view of a trace has."""
        data, unreadable = None, None
        stored = row["data"]
        try:
            opened = self._envelope.open(stored) if stored is not None else None
            size.add(len(opened) if opened is not None else None)
            data = msgspec.Raw(opened or b"")
        except EnvelopeError as error:
            unreadable = str(error)
        return {
            "id": str(row["public_id"]),
            "event_type": row["event_type"],
            "data": data,
            "consumer_group": row["group_name"],
            "worker_id": row["worker_id"],
            "created_at": iso_millis(row["created_at"]),
            "trace_names": row["names"],
            "unreadable": unreadable if unreadable is not None else msgspec.UNSET,
        }

"""Looking at messages: pages of the list, and everything about one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from queen.broker.catalog import QUEUE_MODE, Catalog, Partition, Queue
from queen.broker.message_finder import MessageFinder
from queen.broker.message_list import page_of
from queen.broker.message_status import MessageStatus, Readers, mode, read_standings
from queen.broker.storable import can_be_stored
from queen.broker.stored_messages import Place, StoredMessage, StoredMessages
from queen.storage.database import Database
from queen.wire.envelope import Envelope
from queen.wire.times import iso_millis

_LISTED_BY_DEFAULT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages are listed; what is None does not matter, and without `since` only the last hour is."""

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    status: MessageStatus | None = None
    since: datetime | None = None
    before: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Page:
    places: list[Place]
    total: int
    mode: dict[str, object]


class MessageBrowser:
    """Shows the messages of one shard."""

    def __init__(self, database: Database, catalog: Catalog, envelope: Envelope, finder: MessageFinder) -> None:
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._finder = finder

    async def page(self, wanted: MessageFilter, limit: int, offset: int) -> dict[str, Any]:
        """A page of messages, newest first, without their payloads.

        `total` counts places: a deleted message keeps its own until retention removes it, unless all is on one page.
        """
        queues = await self._queues(wanted)
        page = await self._choose(wanted, queues, limit, offset)
        messages = await self._describe_all(page.places, queues)
        whole = offset == 0 and page.total <= limit
        return {
            "messages": messages,
            "total": len(messages) if whole else page.total,
            "limit": limit,
            "offset": offset,
            "mode": page.mode,
        }

    async def get(self, partition_id: str, transaction_id: str) -> dict[str, Any]:
        """Everything about one message, with its payload."""
        found = await self._finder.find(self._database, partition_id, transaction_id)
        message = self._finder.read(found)
        queue, offset = found.queue, found.offset
        readers = (await read_standings(self._database, [found.partition.id]))[found.partition.id]
        letter = next((letter for letter in found.letters if letter["message_offset"] == offset), None)
        encrypted = found.located.encrypted if found.located else self._envelope.is_encrypted(found.letters[0]["body"])
        return _identify(message, found.partition, queue) | {
            "status": readers.status(offset, dead=letter is not None),
            "payload": msgspec.Raw(message.payload),
            "isEncrypted": encrypted,
            "errorMessage": letter["error_message"] if letter else None,
            "retryCount": letter["retry_count"] if letter else None,
            "leaseExpiresAt": iso_millis(readers.leased_until(offset)),
            "queueConfig": {
                "leaseTime": queue.lease_time,
                "retryLimit": queue.retry_limit,
                "retryDelay": queue.retry_delay,
                "ttl": queue.ttl,
                "priority": queue.priority,
            },
            "mode": mode(queue_mode=readers.queue_mode is not None, groups=len(readers.groups))
            | {"consumedByGroups": readers.consumed_by(offset)},
            "consumerGroups": [
                {
                    "name": standing.group,
                    "consumed": standing.consumed(offset),
                    "leaseExpiresAt": None if standing.consumed(offset) else iso_millis(standing.leased_until),
                }
                for standing in readers.every
            ],
        }

    async def _queues(self, wanted: MessageFilter) -> dict[int, Queue]:
        if not all(can_be_stored(name) for name in (wanted.queue, wanted.partition) if name):
            return {}
        if wanted.queue is not None:
            queue = await self._catalog.queue(wanted.queue)
            queues = [queue] if queue is not None else []
        else:
            queues = await self._catalog.all_queues()
        return {
            queue.id: queue
            for queue in queues
            if wanted.namespace in (None, queue.namespace) and wanted.task in (None, queue.task)
        }

    async def _choose(self, wanted: MessageFilter, queues: dict[int, Queue], limit: int, offset: int) -> _Page:
        if not queues:
            return _Page([], 0, mode(queue_mode=False, groups=0))
        queue_mode = await self._catalog.group(QUEUE_MODE, create=False) or 0
        since = wanted.since or datetime.now(UTC) - _LISTED_BY_DEFAULT
        if wanted.status is MessageStatus.DEAD_LETTER:
            return await self._choose_dead(wanted, list(queues), since, queue_mode, limit, offset)
        rows = await self._database.fetch(
            "message_spans",
            list(queues),
            wanted.partition,
            since,
            wanted.before,
            wanted.status,
            queue_mode,
            limit + offset,
        )
        total = rows[0]["total"]
        places: list[Place] = []
        if offset < total:
            without_dead = wanted.status is not None
            places = await page_of(self._database, rows, without_dead=without_dead, limit=limit, offset=offset)
        return _Page(places, total, mode(queue_mode=rows[0]["queue_mode"], groups=rows[0]["groups"]))

    async def _choose_dead(
        self, wanted: MessageFilter, queue_ids: list[int], since: datetime, queue_mode: int, limit: int, offset: int
    ) -> _Page:
        (modes,) = await self._database.fetch("group_modes", queue_ids, wanted.partition, queue_mode, since)
        rows = await self._database.fetch(
            "dead_messages", queue_ids, wanted.partition, since, wanted.before, limit, offset
        )
        places = [(row["partition_id"], row["message_offset"]) for row in rows if row["partition_id"] is not None]
        return _Page(places, rows[0]["total"], mode(queue_mode=modes["queue_mode"], groups=modes["groups"]))

    async def _describe_all(self, places: list[Place], queues: dict[int, Queue]) -> list[dict[str, Any]]:
        if not places:
            return []
        partition_ids = {partition_id for partition_id, _ in places}
        stored = await StoredMessages(self._database, self._envelope).read(places, payloads=False)
        partitions = await self._catalog.partitions_by_id(partition_ids)
        readers = await read_standings(self._database, partition_ids)
        rows = await self._database.fetch("dead_among", [pid for pid, _ in places], [offset for _, offset in places])
        dead = {(row["partition_id"], row["message_offset"]) for row in rows}
        described = []
        for place in places:
            message, partition = stored.get(place), partitions.get(place[0])
            queue = queues.get(partition.queue_id) if partition is not None else None
            if message is not None and partition is not None and queue is not None:
                described.append(
                    _identify(message, partition, queue) | _situation(place, readers[place[0]], queue, place in dead)
                )
        return described


def _identify(message: StoredMessage, partition: Partition, queue: Queue) -> dict[str, Any]:
    about = {
        "id": message.id,
        "transactionId": message.transaction_id,
        "partitionId": partition.uuid,
        "queuePath": f"{queue.name}/{partition.name}",
        "queue": queue.name,
        "partition": partition.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "traceId": message.trace_id,
        "producerSub": message.producer,
        "createdAt": iso_millis(message.created_at),
    }
    return about | {"unreadable": message.unreadable} if message.unreadable is not None else about


def _situation(place: Place, readers: Readers, queue: Queue, dead: bool) -> dict[str, Any]:
    offset = place[1]
    return {
        "status": readers.status(offset, dead=dead),
        "queueStatus": readers.queue_status(offset, dead=dead),
        "busStatus": {"consumedBy": readers.consumed_by(offset), "totalGroups": len(readers.groups)},
        "queuePriority": queue.priority,
        "leaseExpiresAt": iso_millis(readers.leased_until(offset)),
    }

"""FIFO queues: queues whose partitions are the message groups.

A lease of a partition covers all messages that were received of it, and consuming one consumes those before it. So what
SQS wants to know of single messages (how often they were received, until when they are hidden, that they are deleted
before another) stands in `queen.sqs_deliveries`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from queen.broker.broker import Broker
from queen.broker.inspect.standings import Standings
from queen.broker.pop.requests import PopRequest, unchanged
from queen.broker.queues import option_values
from queen.broker.topics.batching import Links
from queen.http.routing.context import Shard
from queen.http.sqs.errors import SqsError, invalid_handle, invalid_parameter
from queen.http.sqs.messages import Envelope, FifoPayload, Handle, Outgoing, Received, Sent, encode, write_handle
from queen.http.sqs.queues import NAMESPACE, Counts, Shards, SqsQueue
from queen.http.sqs.standard import not_in_flight
from queen.log.catalog import QUEUE_MODE
from queen.storage.database import Record
from queen.wire.ack import AckItem
from queen.wire.api.messages.messaging import AckResult, PushResult
from queen.wire.api.resources.queues import QueueOptions
from queen.wire.ids import is_uuid, partition_number
from queen.wire.push import PushItem, PushRequest

if TYPE_CHECKING:
    from queen.broker.sharding.sharded_broker import ShardedBroker

_DEDUPLICATION_SECONDS: Final = 300
# A push is repeated with the transaction id of the first as long as the deduplication id is remembered, and then some.
_REMEMBERED_SECONDS: Final = 2 * _DEDUPLICATION_SECONDS
# SQS does not keep what was consumed; this is for those who look at the queue.
_CONSUMED_SECONDS: Final = 300


class _Message(msgspec.Struct, rename="camel"):
    id: str
    transaction_id: str
    data: msgspec.Raw
    created_at: datetime
    partition_id: str
    partition: str
    lease_id: str


class _Popped(msgspec.Struct):
    messages: list[_Message]


_popped: Final = msgspec.json.Decoder(_Popped)
_payload: Final = msgspec.json.Decoder(FifoPayload)
_pushed: Final = msgspec.json.Decoder(list[PushResult])
_acked: Final = msgspec.json.Decoder(list[AckResult])


class FifoQueues:
    """Messages are pushed, popped and acked; what is known of each stands on the first shard."""

    def __init__(self, broker: Broker | ShardedBroker, shards: Shards) -> None:
        self._broker = broker
        self._shards = shards
        self._links = Links(shards.first)

    async def configure(self, queue: SqsQueue) -> None:
        options = QueueOptions(
            lease_time=max(1, queue.visibility),
            delayed_processing=queue.number("DelaySeconds"),
            retention_enabled=True,
            retention_seconds=queue.number("MessageRetentionPeriod"),
            completed_retention_seconds=_CONSUMED_SECONDS,
            dedup_window_seconds=_DEDUPLICATION_SECONDS if _is_scoped_to_groups(queue) else _REMEMBERED_SECONDS,
        )
        await self._shards.on_queue(
            queue.name, lambda shard: shard.queues.configure(queue.name, NAMESPACE, "", option_values(options))
        )

    async def drop(self, queue: SqsQueue) -> None:
        await self._shards.on_queue(queue.name, lambda shard: shard.queues.delete(queue.name))

    async def purge(self, queue: SqsQueue) -> None:
        await self._shards.on_queue(queue.name, lambda shard: shard.queues.clear(queue.name))
        # What comes next need not wait until the leases of what is gone end.
        for row in await self._links.fetch("sqs_forget_deliveries", queue.id):
            await self._set_lease(partition_number(str(row["partition_id"])), row["lease_id"], 0.0)

    async def counts(self, queue: SqsQueue) -> Counts:
        async def stand(shard: Shard) -> list[Record]:
            return await Standings(shard.broker.database, 0.0).of(queue.name, "", "")

        rows = await self._shards.on_queue(queue.name, stand)
        (known,) = await self._links.fetch("sqs_in_flight", queue.id)
        pending = rows[0]["pending"] if rows else 0
        return Counts(visible=max(0, pending - known["hidden"] - known["deleted"]), hidden=known["hidden"])

    async def send(self, queue: SqsQueue, messages: Sequence[Outgoing]) -> list[Sent]:
        items = [
            PushItem(
                queue.name,
                message.envelope.group,
                msgspec.Raw(encode(FifoPayload(body=message.body, envelope=message.envelope))),
                message.key or message.envelope.deduplication,
            )
            for message in messages
        ]
        if not _is_scoped_to_groups(queue):
            await self._deduplicate(queue, [item for item, one in zip(items, messages, strict=True) if not one.key])
        nbytes = sum(len(item.payload) for item in items)
        results = _pushed.decode(await self._broker.pusher.push(PushRequest(items, nbytes), bytes))
        return [_sent(result, item, message) for result, item, message in zip(results, items, messages, strict=True)]

    async def _deduplicate(self, queue: SqsQueue, items: Sequence[PushItem]) -> None:
        """Give messages the transaction id, and the group, of the first one with their deduplication id.

        They are pushed in any case: the first may not have been stored. The partition sees to it that it is once.
        """
        if not items:
            return
        fresh = {item.transaction_id: item for item in reversed(items)}
        rows = await self._links.fetch(
            "sqs_deduplicate",
            queue.id,
            list(fresh),
            [str(uuid.uuid4()) for _ in fresh],
            [item.partition for item in fresh.values()],
        )
        known = {row["key"]: row for row in rows}
        for item in items:
            row = known[item.transaction_id]
            item.transaction_id, item.partition = row["transaction_id"], row["partition"]

    async def receive(self, queue: SqsQueue, limit: int, visibility: int, wait: float) -> list[Received]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        request = PopRequest((queue.name,), lease_seconds=max(1, visibility))
        while True:
            left = max(0.0, deadline - loop.time())
            messages = await self._pop(replace(request, batch=limit, wait=left > 0, timeout=left))
            if not messages:
                return []
            if len(messages) < limit:
                # As many as there are of one group come first; others fill up.
                more = limit - len(messages)
                messages += await self._pop(replace(request, batch=more, partitions=more))
            received = await self._note_received(queue, messages, visibility)
            if received:
                return received

    async def _pop(self, request: PopRequest) -> list[_Message]:
        body = await self._broker.popper.pop(request, unchanged)
        return _popped.decode(body).messages if body is not None else []

    async def _note_received(self, queue: SqsQueue, messages: Sequence[_Message], visibility: int) -> list[Received]:
        """What is to be delivered of messages that were popped: those that nobody has deleted before."""
        rows = await self._links.fetch(
            "sqs_received",
            queue.id,
            [message.id for message in messages],
            [message.partition_id for message in messages],
            [message.lease_id for message in messages],
            list(range(len(messages))),
            [message.transaction_id for message in messages],
            float(visibility),
        )
        known = {str(row["message_id"]): row for row in rows}
        leases = [(message.partition_id, message.lease_id) for message in messages]
        if any(row["deleted"] for row in rows):
            await self._consume(leases)
        if not visibility:
            await self._end_leases(leases)
        return [
            _received(queue, message, known[message.id]) for message in messages if not known[message.id]["deleted"]
        ]

    async def delete(self, queue: SqsQueue, handles: Sequence[Handle]) -> list[SqsError | None]:
        for handle in handles:
            _check(handle)
        ids = [handle.message for handle in handles]
        rows = await self._links.fetch("sqs_mark_deleted", ids, [handle.lease for handle in handles])
        marked = {str(row["message_id"]) for row in rows}
        await self._consume([(one.partition, one.lease) for one in handles if one.message in marked])
        if len(marked) == len(set(ids)):
            return [None] * len(handles)
        # Those that are not known are consumed already.
        known = {str(row["message_id"]) for row in await self._links.fetch("sqs_known_deliveries", ids)}
        return [_expired(one) if one.message in known and one.message not in marked else None for one in handles]

    async def change_visibility(
        self, queue: SqsQueue, handles: Sequence[Handle], seconds: Sequence[int]
    ) -> list[SqsError | None]:
        for handle in handles:
            _check(handle)
        rows = await self._links.fetch(
            "sqs_change_visibility",
            [handle.message for handle in handles],
            [handle.lease for handle in handles],
            [float(one) for one in seconds],
        )
        changed = {str(row["message_id"]) for row in rows}
        await self._end_leases([(one.partition, one.lease) for one in handles if one.message in changed])
        return [None if one.message in changed else not_in_flight() for one in handles]

    async def _consume(self, leases: Sequence[tuple[str, str]]) -> None:
        """Ack messages of leases (partition, lease) as far as no message before them is left."""
        if not leases:
            return
        rows = await self._links.fetch("sqs_consumable", *_columns(leases))
        if not rows:
            return
        items = [
            AckItem(row["transaction_id"], str(row["partition_id"]), str(row["lease_id"]), "completed") for row in rows
        ]
        results = _acked.decode(await self._broker.acker.ack(items, QUEUE_MODE, bytes, batch=True))
        # What is not acked, because its lease has just ended, is when it is popped again.
        done = [row for row, result in zip(rows, results, strict=True) if result.success]
        await self._links.fetch(
            "sqs_consumed",
            [row["partition_id"] for row in done],
            [row["lease_id"] for row in done],
            [row["place"] for row in done],
        )

    async def _end_leases(self, leases: Sequence[tuple[str, str]]) -> None:
        """Have leases (partition, lease) end when the last of their messages is visible."""
        if not leases:
            return
        for row in await self._links.fetch("sqs_lease_ends", *_columns(leases)):
            if row["seconds"] is not None:
                partition = partition_number(str(row["partition_id"]))
                await self._set_lease(partition, row["lease_id"], row["seconds"])

    async def _set_lease(self, partition: int, lease: uuid.UUID, seconds: float) -> None:
        async def set_lease(shard: Shard) -> None:
            broker = shard.broker
            rows = await broker.database.fetch("sqs_set_leases", [partition], [lease], [seconds])
            broker.popper.leases_ended(
                [(row["queue_id"], row["partition_id"], row["group_id"], row["available"]) for row in rows]
            )

        await self._shards.on_partition(partition, set_lease)


def _is_scoped_to_groups(queue: SqsQueue) -> bool:
    return queue.attributes.get("DeduplicationScope") == "messageGroup"


def _columns(leases: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [partition for partition, _ in leases], [lease for _, lease in leases]


def _sent(result: PushResult, item: PushItem, message: Outgoing) -> Sent:
    if result.status == "failed":
        raise SqsError("InternalError", f"The message was not stored: {result.error}")
    # One that is spooled while PostgreSQL is unavailable gets its id later.
    id = result.message_id if isinstance(result.message_id, str) else item.transaction_id
    return Sent(message.envelope.id or id, _sequence(id))


def _sequence(id: str) -> str:
    return str(uuid.UUID(id).int) if is_uuid(id) else ""


def _received(queue: SqsQueue, message: _Message, known: Record) -> Received:
    try:
        payload = _payload.decode(message.data)
    except msgspec.DecodeError:
        # Pushed by another client than one of SQS.
        payload = FifoPayload(body=bytes(message.data).decode(), envelope=Envelope())
    envelope = payload.envelope
    envelope.group = message.partition
    return Received(
        id=envelope.id or message.id,
        handle=write_handle(Handle(queue.name, message.id, message.lease_id, message.partition_id)),
        body=payload.body,
        envelope=envelope,
        receives=known["receives"],
        first_ms=int(known["first_at"].timestamp() * 1000),
        sent_ms=envelope.sent or int(message.created_at.timestamp() * 1000),
        sequence=_sequence(message.id),
    )


def _check(handle: Handle) -> None:
    if not (is_uuid(handle.message) and is_uuid(handle.lease) and partition_number(handle.partition)):
        raise invalid_handle(handle.message)


def _expired(handle: Handle) -> SqsError:
    return invalid_parameter(
        f"Value {write_handle(handle)} for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired."
    )

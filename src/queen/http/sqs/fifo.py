"""FIFO queues: queues whose partitions are the message groups.

A lease of a partition covers all messages that were received of it, and consuming one consumes those before it. So what
SQS wants to know of single messages (how often they were received, until when they are hidden, that they are deleted
before another) stands in `queen.sqs_deliveries`. A lease whose messages are deleted all at once is acked as it is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from queen.broker.broker import Broker
from queen.broker.inspect.queue_stats import QueueStats
from queen.broker.pop.requests import PopRequest, unchanged
from queen.broker.queues import option_values
from queen.http.routing.context import Shard
from queen.http.sqs.deliveries import Deliveries, Lease, columns_of
from queen.http.sqs.errors import SqsError, invalid_handle, invalid_parameter
from queen.http.sqs.messages import (
    Envelope,
    FifoPayload,
    Handle,
    Outgoing,
    Received,
    Sent,
    encode,
    read_handle,
    write_handle,
)
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
# SQS does not keep consumed messages; these stay for inspection.
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
_replayed: Final = msgspec.json.Decoder(list[Received])


class FifoQueues:
    """Messages are pushed, popped and acked; what is known of each stands on the first shard."""

    def __init__(self, broker: Broker | ShardedBroker, shards: Shards) -> None:
        self._broker = broker
        self._shards = shards
        self._database = shards.first
        self._deliveries = Deliveries(shards.first)

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
        # Later messages need not wait until the leases of deleted ones end.
        for row in await self._database.fetch("sqs_forget_deliveries", queue.id):
            await self._set_lease(partition_number(str(row["partition_id"])), row["lease_id"], 0.0)

    async def counts(self, queue: SqsQueue) -> Counts:
        async def stand(shard: Shard) -> list[Record]:
            return await QueueStats(shard.broker.database, 0.0).of(queue.name, "", "")

        rows = await self._shards.on_queue(queue.name, stand)
        (known,) = await self._database.fetch("sqs_in_flight", queue.id)
        pending = rows[0]["pending"] if rows else 0
        return Counts(visible=max(0, pending - known["hidden"] - known["deleted"]), hidden=known["hidden"])

    async def in_flight(self, queue: SqsQueue) -> int:
        (known,) = await self._database.fetch("sqs_in_flight", queue.id)
        return int(known["hidden"])

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
        # Those of one call are from one sender; what is moved keeps its own.
        push = PushRequest(items, nbytes, messages[0].envelope.sender or None)
        results = _pushed.decode(await self._broker.pusher.push(push, bytes))
        return [_sent(result, item, message) for result, item, message in zip(results, items, messages, strict=True)]

    async def _deduplicate(self, queue: SqsQueue, items: Sequence[PushItem]) -> None:
        """Give messages the transaction id, and the group, of the first one with their deduplication id.

        They are pushed in any case: the first may not have been stored. The partition sees to it that it is once.
        """
        if not items:
            return
        known = await self._deliveries.deduplicate(
            [queue.id] * len(items),
            [item.transaction_id for item in items],
            [str(uuid.uuid4()) for _ in items],
            [item.partition for item in items],
        )
        for item in items:
            row = known[queue.id, item.transaction_id]
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
                messages = _oldest_first(messages + await self._pop(replace(request, batch=more, partitions=more)))
            received = await self._note_received(queue, messages, visibility)
            if received:
                return received

    async def _pop(self, request: PopRequest) -> list[_Message]:
        body = await self._broker.popper.pop(request, unchanged)
        return _popped.decode(body).messages if body is not None else []

    async def _note_received(self, queue: SqsQueue, messages: Sequence[_Message], visibility: int) -> list[Received]:
        """What is to be delivered of messages that were popped: those that have not been deleted."""
        leases = [(message.partition_id, message.lease_id) for message in messages]
        sizes: Counter[Lease] = Counter()
        places = []
        for lease in leases:
            places.append(sizes[lease])
            sizes[lease] += 1
        known = await self._deliveries.received(
            [queue.id] * len(messages),
            [message.id for message in messages],
            [message.partition_id for message in messages],
            [message.lease_id for message in messages],
            places,
            [message.transaction_id for message in messages],
            [float(visibility)] * len(messages),
        )
        gone = {lease for message, lease in zip(messages, leases, strict=True) if known[message.id]["deleted"]}
        if gone:
            await self._consume(list(gone))
        if not visibility:
            await self._end_leases(leases)
        return [
            # A part of the lease is not delivered: what is deleted of the rest does not make it whole.
            _received(queue, message, known[message.id], place, 0 if lease in gone else sizes[lease])
            for message, lease, place in zip(messages, leases, places, strict=True)
            if not known[message.id]["deleted"]
        ]

    async def replay(self, queue: SqsQueue, attempt: str, visibility: int) -> list[Received] | None:
        """What a receive with this attempt id got, hidden again; None if there was none, or any of it has changed."""
        for row in await self._database.fetch("sqs_attempt", queue.id, attempt):
            received = _replayed.decode(row["received"])
            handles = [read_handle(message.handle, queue.name) for message in received]
            if not any(await self.change_visibility(queue, handles, [visibility] * len(handles))):
                return received
        return None

    async def remember(self, queue: SqsQueue, attempt: str, received: Sequence[Received]) -> None:
        """Have `replay` give the same for five minutes."""
        await self._database.fetch("sqs_remember_attempt", queue.id, attempt, encode(received).decode())

    async def delete(self, queue: SqsQueue, handles: Sequence[Handle]) -> list[SqsError | None]:
        by_lease: dict[Lease, dict[int, Handle]] = {}
        for handle in handles:
            _check(handle)
            by_lease.setdefault((handle.partition, handle.lease), {})[handle.place] = handle
        lasts = {lease: own[max(own)] for lease, own in by_lease.items()}
        whole = {
            lease: (last.transaction, last.place)
            for lease, last in lasts.items()
            if last.count == last.place + 1 == len(by_lease[lease])
        }
        acked = await self._ack(whole) if whole else set()
        rest = [one for one in handles if (one.partition, one.lease) not in acked]
        failed = await self._delete_singly(rest) if rest else {}
        return [failed.get(one.message) for one in handles]

    async def _delete_singly(self, handles: Sequence[Handle]) -> dict[str, SqsError]:
        """Delete some messages of leases that hold others; returns why a message is not deleted, by message."""
        ids = [handle.message for handle in handles]
        marked = await self._deliveries.mark_deleted(ids, [handle.lease for handle in handles])
        missing = [one for one in handles if (one.message, one.lease) not in marked]
        await self._consume(list({(one.partition, one.lease) for one in handles if one not in missing}))
        if not missing:
            return {}
        # Those that are not known are consumed already.
        rows = await self._database.fetch("sqs_known_deliveries", [one.message for one in missing])
        known = {str(row["message_id"]) for row in rows}
        return {one.message: _expired(one) for one in missing if one.message in known}

    async def change_visibility(
        self, queue: SqsQueue, handles: Sequence[Handle], seconds: Sequence[int]
    ) -> list[SqsError | None]:
        for handle in handles:
            _check(handle)
        changed = await self._deliveries.change_visibility(
            [handle.message for handle in handles],
            [handle.lease for handle in handles],
            [float(one) for one in seconds],
        )
        await self._end_leases([(one.partition, one.lease) for one in handles if (one.message, one.lease) in changed])
        return [None if (one.message, one.lease) in changed else not_in_flight() for one in handles]

    async def _consume(self, leases: Sequence[Lease]) -> None:
        """Ack messages of leases as far as no message before them is left."""
        rows = await self._deliveries.consumable(*columns_of(leases))
        found = {lease: (rows[lease]["transaction_id"], rows[lease]["place"]) for lease in leases if lease in rows}
        if found:
            # What is not acked, because its lease has just ended, is when it is popped again.
            await self._ack(found)

    async def _ack(self, upto: Mapping[Lease, tuple[str, int]]) -> set[Lease]:
        """Ack leases up to a message (transaction id, place), and forget what is consumed; gives those that were."""

        async def ack(lease: Lease, transaction: str) -> bool:
            partition, id = lease
            item = AckItem(transaction, partition, id, "completed")
            (result,) = _acked.decode(await self._broker.acker.ack([item], QUEUE_MODE, bytes, batch=True))
            return result.success

        # One request for each lease: so they are acked in one statement, without a look at each message.
        results = await asyncio.gather(*(ack(lease, transaction) for lease, (transaction, _) in upto.items()))
        done = [lease for lease, acked in zip(upto, results, strict=True) if acked]
        await self._deliveries.consumed(*columns_of(done), [upto[lease][1] for lease in done])
        return set(done)

    async def _end_leases(self, leases: Sequence[Lease]) -> None:
        """Have leases end when the last of their messages is visible."""
        distinct = list(dict.fromkeys(leases))
        rows = await self._deliveries.lease_ends(*columns_of(distinct))
        for lease in distinct:
            row = rows.get(lease)
            if row is not None and row["seconds"] is not None:
                await self._set_lease(partition_number(lease[0]), uuid.UUID(lease[1]), row["seconds"])

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


def _oldest_first(messages: Sequence[_Message]) -> list[_Message]:
    """Messages group by group, that which begins with the oldest first."""
    firsts: dict[str, str] = {}
    for message in messages:
        firsts.setdefault(message.partition_id, message.id)
    return sorted(messages, key=lambda message: firsts[message.partition_id])


def _sent(result: PushResult, item: PushItem, message: Outgoing) -> Sent:
    if result.status == "failed":
        raise SqsError("InternalError", f"The message was not stored: {result.error}")
    # One that is spooled while PostgreSQL is unavailable gets its id later.
    id = result.message_id if isinstance(result.message_id, str) else item.transaction_id
    return Sent(message.envelope.id or id, _sequence(id))


def _sequence(id: str) -> str:
    return str(uuid.UUID(id).int) if is_uuid(id) else ""


def _received(queue: SqsQueue, message: _Message, known: Record, place: int, count: int) -> Received:
    try:
        payload = _payload.decode(message.data)
    except msgspec.DecodeError:
        # Pushed by another client than one of SQS.
        payload = FifoPayload(body=bytes(message.data).decode(), envelope=Envelope())
    envelope = payload.envelope
    envelope.group = message.partition
    return Received(
        id=envelope.id or message.id,
        handle=write_handle(
            Handle(queue.name, message.id, message.lease_id, message.partition_id, message.transaction_id, place, count)
        ),
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

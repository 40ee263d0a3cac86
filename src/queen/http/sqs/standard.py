"""Standard queues: topics, whose items are leased one by one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from queen.broker.broker import Broker
from queen.http.sqs.errors import SqsError, invalid_handle
from queen.http.sqs.messages import (
    Envelope,
    Handle,
    Outgoing,
    Received,
    Sent,
    decode_envelope,
    encode,
    write_handle,
)
from queen.http.sqs.queues import NAMESPACE, Counts, Shards, SqsQueue
from queen.wire.topics.items import ReadyItem, Row, render_items
from queen.wire.topics.requests import EnqueueItem, ItemRef

if TYPE_CHECKING:
    from queen.broker.sharding.sharded_broker import ShardedBroker

# The redrive policy limits how often a message may be received.
_MOST_RETRIES: Final = 1_000_000
_NO_ENVELOPE: Final = Envelope()


class _Ready(msgspec.Struct):
    """An item out of a prefetch buffer, which holds it rendered."""

    id: int
    retries: int
    created_at: datetime
    updated_at: datetime
    lease_owner: str
    metadata: msgspec.Raw
    payload: bytes = b""
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    first_failed_at: datetime | None = None


_ready_items: Final = msgspec.json.Decoder(list[_Ready])


class StandardQueues:
    """Messages are items: the payload is the body, the metadata what else there is."""

    def __init__(self, broker: Broker | ShardedBroker, shards: Shards) -> None:
        self._broker = broker
        self._shards = shards

    async def configure(self, queue: SqsQueue) -> None:
        options = {
            "max_retries": _MOST_RETRIES,
            "lease_seconds": max(1, queue.visibility),
            "ttl_seconds": queue.number("MessageRetentionPeriod"),
        }
        await self._shards.on_topic(
            queue.topic, lambda shard: shard.broker.topics.admin.configure(queue.topic, options)
        )

    async def drop(self, queue: SqsQueue) -> None:
        await self._shards.on_topic(queue.topic, lambda shard: shard.broker.topics.delete(queue.topic))

    async def purge(self, queue: SqsQueue) -> None:
        await self._shards.on_topic(queue.topic, lambda shard: shard.broker.topics.purge(queue.topic))

    async def counts(self, queue: SqsQueue) -> Counts:
        rows = await self._shards.on_topic(
            queue.topic, lambda shard: shard.broker.topics.admin.counts(NAMESPACE, queue.name)
        )
        return Counts(rows[0].ready, rows[0].delayed, rows[0].leased) if rows else Counts()

    async def in_flight(self, queue: SqsQueue) -> int:
        rows = await self._shards.on_topic(
            queue.topic, lambda shard: shard.broker.database.fetch("sqs_leased", *queue.topic)
        )
        return int(rows[0]["hidden"]) if rows else 0

    async def send(self, queue: SqsQueue, messages: Sequence[Outgoing]) -> list[Sent]:
        delay = queue.number("DelaySeconds")
        items = [_item(queue, message, delay) for message in messages]
        ids = await self._broker.topics.writer.enqueue(items)
        return [Sent(message.envelope.id or _message_id(id)) for message, id in zip(messages, ids, strict=True)]

    async def receive(self, queue: SqsQueue, limit: int, visibility: int, wait: float) -> list[Received]:
        rows = await self._broker.topics.dequeuer.dequeue(queue.topic, limit, float(visibility), wait)
        if rows and isinstance(rows[0], ReadyItem):
            rows = [_row(item) for item in _ready_items.decode(render_items(rows, *queue.topic, False))]
        if not visibility and rows:
            await self._expire(queue)
        return [_received(queue, row) for row in rows]

    async def delete(self, queue: SqsQueue, handles: Sequence[Handle]) -> list[SqsError | None]:
        # One that was received again since is not deleted; that is no error in SQS.
        await self._broker.topics.settler.ack([_ref(handle) for handle in handles])
        return [None] * len(handles)

    async def change_visibility(
        self, queue: SqsQueue, handles: Sequence[Handle], seconds: Sequence[int]
    ) -> list[SqsError | None]:
        refs = [_ref(handle) for handle in handles]
        done = await self._broker.topics.settler.set_lease(refs, [float(one) for one in seconds])
        if not all(seconds):
            await self._expire(queue)
        return [None if one else not_in_flight() for one in done]

    async def _expire(self, queue: SqsQueue) -> None:
        """Have messages visible at once whose leases end at once."""
        await self._shards.on_topic(queue.topic, lambda shard: shard.broker.topics.expiry.search())


def not_in_flight() -> SqsError:
    return SqsError(
        "MessageNotInflight",
        "The message referred to isn't in flight: it is visible again, was received again, or deleted.",
    )


def _item(queue: SqsQueue, message: Outgoing, delay: int) -> EnqueueItem:
    own = delay if message.delay is None else message.delay
    envelope = message.envelope
    return EnqueueItem(
        namespace=NAMESPACE,
        topic=queue.name,
        payload=message.body.encode(),
        metadata=msgspec.Raw(encode(envelope) if envelope != _NO_ENVELOPE else b""),
        delay=float(own) if own else None,
        idempotency_key=message.key or None,
    )


def _received(queue: SqsQueue, row: Row) -> Received:
    envelope = decode_envelope(row["metadata"])
    item = row["id"]
    first = row["first_failed_at"] or row["updated_at"]
    return Received(
        id=envelope.id or _message_id(item),
        handle=write_handle(Handle(queue.name, str(item), row["lease_owner"])),
        body=bytes(row["payload"]).decode("utf-8", "replace"),
        envelope=envelope,
        receives=row["retries"] + 1,
        first_ms=_milliseconds(first),
        sent_ms=envelope.sent or _milliseconds(row["created_at"]),
    )


def _row(item: _Ready) -> Row:
    row = msgspec.structs.asdict(item)
    return row | {"payload": bytes(item.data) or item.payload, "metadata": bytes(item.metadata)}


def _message_id(item: int) -> str:
    """The id of an item in the form of a UUID, which clients of SQS expect."""
    return f"{item >> 32:08x}-{item >> 16 & 0xFFFF:04x}-{item & 0xFFFF:04x}-8000-000000000000"


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def _ref(handle: Handle) -> ItemRef:
    if not (handle.message.isdecimal() and len(handle.message) < 20 and handle.lease.isprintable()):
        raise invalid_handle(handle.message)
    return ItemRef(handle.message, NAMESPACE, handle.queue, handle.lease)

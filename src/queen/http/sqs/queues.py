"""The queues of SQS as they are stored, and where their messages live."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from queen.broker.broker import Broker
from queen.broker.events import Event, EventKind
from queen.broker.topics.topics import NAME_SEPARATOR
from queen.http.routing.context import Shard
from queen.http.sqs.attributes import FIFO_SUFFIX, RedrivePolicy, number, redrive_policy
from queen.http.sqs.errors import SqsError
from queen.http.sqs.messages import Handle, Outgoing, Received, Sent
from queen.log.topics import TopicKey
from queen.storage.database import Database, Record
from queen.wire.shards import Name

if TYPE_CHECKING:
    from queen.broker.sharding.shard_router import ShardRouter

R = TypeVar("R")

NAMESPACE: Final = "sqs"
"""Of the topics of standard queues, and of the queues of FIFO queues."""
# SQS promises that changes are seen everywhere within a minute.
_CACHED_SECONDS: Final = 1.0
_MOST_CACHED: Final = 100_000

_decode: Final = msgspec.json.Decoder(dict[str, str]).decode


class SqsQueue:
    """A queue, with its attributes as they were set."""

    def __init__(self, record: Record) -> None:
        self.id: int = record["id"]
        self.name: str = record["name"]
        self.attributes: Mapping[str, str] = _decode(record["attributes"])
        self.tags: Mapping[str, str] = _decode(record["tags"])
        self.created_at: datetime = record["created_at"]
        self.modified_at: datetime = record["modified_at"]
        self.read_at = time.monotonic()

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(FIFO_SUFFIX)

    @property
    def topic(self) -> TopicKey:
        return NAMESPACE, self.name

    @cached_property
    def policy(self) -> RedrivePolicy | None:
        return redrive_policy(self.attributes)

    @cached_property
    def largest_message(self) -> int:
        return self.number("MaximumMessageSize")

    @cached_property
    def visibility(self) -> int:
        return self.number("VisibilityTimeout")

    def number(self, attribute: str) -> int:
        return number(self.attributes, attribute)


class QueueCatalog:
    """Looks queues up in memory, then in PostgreSQL; changes them there.

    That a queue has changed is known from its topic or queue, which changes after it; at the latest after a second.
    """

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._database = brokers[0].database
        self._queues: dict[str, SqsQueue] = {}
        self._notifications = [broker.notifications for broker in brokers]
        for notifications in self._notifications:
            notifications.subscribe(
                dict.fromkeys((EventKind.QUEUE_CHANGED, EventKind.QUEUE_GONE, EventKind.TOPIC_CHANGED), self._changed)
            )

    def _changed(self, event: Event) -> None:
        self._queues.pop(event[5].rpartition(NAME_SEPARATOR)[2], None)

    async def find(self, name: str, *, fresh: bool = False) -> SqsQueue | None:
        """`fresh`: as PostgreSQL has it."""
        for notifications in self._notifications:
            notifications.drain()
        known = self._queues.get(name)
        if known is not None and not fresh and time.monotonic() - known.read_at < _CACHED_SECONDS:
            return known
        self._queues.pop(name, None)
        for record in await self._database.fetch("sqs_queue", name):
            return self._keep(record)
        return None

    async def create(self, name: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> SqsQueue | None:
        """None when the name is taken."""
        for record in await self._database.fetch("sqs_create_queue", name, _text(attributes), _text(tags)):
            return self._keep(record)
        return None

    async def set_attributes(self, name: str, attributes: Mapping[str, str]) -> None:
        """An empty value removes an attribute."""
        removed = [attribute for attribute, value in attributes.items() if not value]
        await self._database.fetch("sqs_set_attributes", name, _text(attributes), removed)
        self._queues.pop(name, None)

    async def set_tags(self, name: str, tags: Mapping[str, str], removed: Sequence[str] = ()) -> None:
        await self._database.fetch("sqs_set_tags", name, _text(tags), list(removed))
        self._queues.pop(name, None)

    async def begin_purge(self, name: str) -> bool:
        """False when the queue was purged within the last minute."""
        return bool(await self._database.fetch("sqs_begin_purge", name))

    async def delete(self, name: str) -> None:
        await self._database.fetch("sqs_delete_queue", name)
        self._queues.pop(name, None)

    async def names(self, prefix: str, after: str, limit: int) -> list[str]:
        return [row["name"] for row in await self._database.fetch("sqs_queue_names", prefix, after, limit)]

    async def sources(self, target: str, after: str, limit: int) -> list[str]:
        """Names of the queues whose dead-letter queue is `target`."""
        return [row["name"] for row in await self._database.fetch("sqs_queues_with_target", target, after, limit)]

    def _keep(self, record: Record) -> SqsQueue:
        queue = SqsQueue(record)
        if len(self._queues) >= _MOST_CACHED:
            self._queues.clear()
        self._queues[queue.name] = queue
        return queue


class Counts(msgspec.Struct):
    """About how many messages a queue has."""

    visible: int = 0
    delayed: int = 0
    hidden: int = 0


class MessageStore(Protocol):
    """Where the messages of a kind of queues live."""

    async def configure(self, queue: SqsQueue) -> None:
        """Create what holds the messages of a queue, or change it as the attributes say."""

    async def drop(self, queue: SqsQueue) -> None: ...

    async def purge(self, queue: SqsQueue) -> None: ...

    async def counts(self, queue: SqsQueue) -> Counts: ...

    async def in_flight(self, queue: SqsQueue) -> int: ...

    async def send(self, queue: SqsQueue, messages: Sequence[Outgoing]) -> list[Sent]: ...

    async def receive(self, queue: SqsQueue, limit: int, visibility: int, wait: float) -> list[Received]: ...

    async def delete(self, queue: SqsQueue, handles: Sequence[Handle]) -> list[SqsError | None]:
        """For each message, why it was not deleted."""

    async def change_visibility(
        self, queue: SqsQueue, handles: Sequence[Handle], seconds: Sequence[int]
    ) -> list[SqsError | None]:
        """For each message, why its visibility was not changed."""


class Shards:
    """The shards, and which of them has a topic, a queue or a partition."""

    def __init__(self, shards: Sequence[Shard], router: ShardRouter | None) -> None:
        """`router`: there are several."""
        self._shards = shards
        self._router = router

    @property
    def brokers(self) -> Sequence[Broker]:
        return [shard.broker for shard in self._shards]

    @property
    def first(self) -> Database:
        """The database that has what is not in topics and queues."""
        return self._shards[0].broker.database

    async def on_queue(self, name: str, ask: Callable[[Shard], Awaitable[R]]) -> R:
        return await self._on(Name.queue(name), ask)

    async def on_topic(self, key: TopicKey, ask: Callable[[Shard], Awaitable[R]]) -> R:
        return await self._on(Name.topic(*key), ask)

    async def on_partition(self, partition: int, ask: Callable[[Shard], Awaitable[R]]) -> R:
        if self._router is None:
            return await ask(self._shards[0])
        return await self._router.on_shard_of_partition(partition, lambda shard: ask(self._shards[shard]))

    async def _on(self, name: Name, ask: Callable[[Shard], Awaitable[R]]) -> R:
        if self._router is None:
            return await ask(self._shards[0])
        return await self._router.on_shard_of([name], lambda shard: ask(self._shards[shard]))


def _text(values: Mapping[str, str]) -> str:
    return msgspec.json.encode(values).decode()

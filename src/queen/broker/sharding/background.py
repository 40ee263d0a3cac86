"""Background tasks of a worker with several shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import asyncpg

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.transactions.inbox_append import QueuesHeld, transaction_id
from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, QueenError
from queen.log.topics import TopicKey
from queen.spool.record import Record
from queen.storage.database import Record as Row
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards
from queen.wire.shards import Name
from queen.wire.topics.requests import EnqueueItem

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class ShardSetup:
    """Gives every database its shard number; one that is unavailable at the start, as soon as it is available."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        self._background = BackgroundTask()

    async def start(self) -> None:
        """Raises `QueenError` when a database is another shard than DATABASE_URLS says."""
        unavailable: Sequence[int]
        try:
            unavailable = await set_up_shards(self._dsns)
        except DatabaseUnavailable as error:
            # The supervisor has set them up before it started any worker: one that starts again during an outage serves
            # without them, as with one shard.
            log.warning("starting without any shard, which is retried: %s", error)
            unavailable = range(len(self._dsns))
        if unavailable:
            self._background.start(self._set_up_later(unavailable))

    async def stop(self) -> None:
        await self._background.stop()

    async def _set_up_later(self, unavailable: Sequence[int]) -> None:
        while unavailable:
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                for number in unavailable:
                    await migrate(self._dsns[number], wait_seconds=0)
                unavailable = await set_up_shards(self._dsns)
            except (QueenError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("shards %s are still unavailable: %s", list(unavailable), error)
        log.info("all %d shards are available", len(self._dsns))


class SpoolForwarder:
    """Sends records in the spool of one shard to the shard that their queue or topic has moved to."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        for number, broker in enumerate(brokers):
            broker.replayer.records.send_on = partial(self._forward_push, number)
            broker.topics.forward_to(partial(self._forward_item, number))

    async def _forward_push(self, number: int, record: Record) -> bool:
        """Whether a push in the spool of a shard is on another shard now."""
        target = await self._new_shard(number, Name.queue(record.queue))
        if target is None:
            return False
        await target.replayer.records.take_over(record)
        return True

    async def _forward_item(self, number: int, key: TopicKey, record: Record) -> bool:
        """Whether an item in the write-ahead log of a shard is on another shard now."""
        target = await self._new_shard(number, Name.topic(*key))
        if target is None:
            return False
        await target.topics.take_over(record)
        return True

    async def _new_shard(self, number: int, name: Name) -> Broker | None:
        await self._directory.refresh([number])
        shard = await self._directory.find(name)
        return self._brokers[shard] if shard != number else None


class InboxForwarder:
    """Sends rows in the inbox of one shard to that of the shard that their queue or topic has moved to."""

    def __init__(self, directory: Directory, rules: NamespaceRules, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        for number, broker in enumerate(brokers):
            broker.inbox.forward = partial(self._forward, number)
            broker.inbox.appender.rules = _ShardItemRules(rules, number)

    async def _forward(self, number: int, row: Row) -> bool:
        """Whether a row is in the inbox of another shard now, where it is stored once however often it is sent."""
        await self._directory.refresh([number])
        name = Name.topic(row["queue"], row["partition"]) if row["topic"] else Name.queue(row["queue"])
        shard = await self._directory.find(name)
        if shard == number:
            return False
        ids = row["transaction_ids"]
        if ids is None and row["count"] == 1 and not row["topic"]:
            ids = [transaction_id(row)]
        columns = ("id", "pushed_at", "trace_id", "count", "topic", "queue", "partition")
        await self._brokers[shard].database.fetch(
            "inbox_forward", number, *[row[column] for column in columns], ids, row["body"]
        )
        return True


class _ShardItemRules:
    """The quotas and idempotency keys of items that are stored on one of several shards."""

    def __init__(self, rules: NamespaceRules, shard: int) -> None:
        self._rules = rules
        self._shard = shard

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        with _waiting_for_home(items):
            await self._rules.admit(items, [self._shard] * len(items))

    async def duplicates(self, items: Sequence[EnqueueItem]) -> Collection[int]:
        with _waiting_for_home(items):
            found = await self._rules.claim(items, [self._shard] * len(items))
        return {*found.owners, *found.twins}


@contextmanager
def _waiting_for_home(items: Sequence[EnqueueItem]) -> Iterator[None]:
    """Have items wait, and nothing else, while the shard that keeps the rules of their namespaces is unavailable."""
    try:
        yield
    except DatabaseUnavailable as error:
        raise QueuesHeld({item.namespace for item in items}, _RETRY_SECONDS, str(error)) from error

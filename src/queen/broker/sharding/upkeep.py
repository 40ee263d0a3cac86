"""Background jobs of installations with several shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial

import asyncpg

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.transactions.inbox_append import transaction_id
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.topics import TopicKey
from queen.spool.record import Record
from queen.storage.database import Record as Row
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards
from queen.wire.shards import Name
from queen.wire.topics import EnqueueItem

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class Joining:
    """Has every database know which shard it is."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        self._background = BackgroundTask()

    async def start(self) -> None:
        """Raises `QueenError` when the databases cannot be the shards they are named as."""
        away = await set_up_shards(self._dsns)
        if away:
            self._background.start(self._wait_for(away))

    async def stop(self) -> None:
        await self._background.stop()

    async def _wait_for(self, away: Sequence[int]) -> None:
        while away:
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                for number in away:
                    await migrate(self._dsns[number], wait_seconds=0)
                away = await set_up_shards(self._dsns)
            except (QueenError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("a shard that was away at the start still is: %s", error)
        log.info("every shard is there now")


class Forwarding:
    """Sends records of spools and rows of inboxes on."""

    def __init__(self, directory: Directory, rules: NamespaceRules, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        for number, broker in enumerate(brokers):
            broker.replayer.records.send_on = self._from(number)
            broker.topics.forward_to(partial(self._send_item_on, number))
            broker.inbox.forward = partial(self._send_row_on, number)
            broker.inbox.appender.rules = _ShardItemRules(rules, number)

    def _from(self, number: int) -> _SendOn:
        return _SendOn(self._directory, self._brokers, number)

    async def _send_item_on(self, number: int, key: TopicKey, record: Record) -> bool:
        """Whether an item that waited in the log of a shard's buffered namespaces is on another shard now."""
        await self._directory.look([number])
        shard = await self._directory.find(Name.topic(*key))
        if shard == number:
            return False
        await self._brokers[shard].topics.take_over(record)
        return True

    async def _send_row_on(self, number: int, row: Row) -> bool:
        """Whether a row of the inbox is in that of another shard now: each is stored there once."""
        await self._directory.look([number])
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
    """The rules for items that are stored on one of several shards."""

    def __init__(self, rules: NamespaceRules, shard: int) -> None:
        self._rules = rules
        self._shard = shard

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        await self._rules.admit(items, [self._shard] * len(items))

    async def duplicates(self, items: Sequence[EnqueueItem]) -> Collection[int]:
        found = await self._rules.claim(items, [self._shard] * len(items))
        return {*found.owners, *found.twins}


class _SendOn:
    """From the spool of one shard."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker], number: int) -> None:
        self._directory = directory
        self._brokers = brokers
        self._number = number

    async def __call__(self, record: Record) -> bool:
        """Whether another shard has it now."""
        await self._directory.look([self._number])
        shard = await self._directory.find(Name.queue(record.queue))
        if shard == self._number:
            return False
        await self._brokers[shard].replayer.records.take_over(record)
        return True

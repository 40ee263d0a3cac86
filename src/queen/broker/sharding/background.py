"""Background tasks of a worker with several shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import asyncpg

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.topics import TopicKey
from queen.spool.record import Record
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards
from queen.wire.shards import Name

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class ShardSetup:
    """Gives every database its shard number; one that is unavailable at the start, as soon as it is available."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        self._background = BackgroundTask()

    async def start(self) -> None:
        """Raises `QueenError` when a database is another shard than DATABASE_URLS says."""
        unavailable = await set_up_shards(self._dsns)
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

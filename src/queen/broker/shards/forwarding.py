"""What waits in the spool of one shard for a queue that has moved to another is stored there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from queen.broker.broker import Broker
from queen.broker.shards.directory import Directory
from queen.broker.topics.catalog import TopicKey
from queen.spool.record import Record
from queen.wire.shards import Name


class Forwarding:
    """Sends records of spools on."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        for number, broker in enumerate(brokers):
            broker.replayer.send_on = self._from(number)
            broker.topics.flusher.send_on(partial(self._send_item_on, number))

    def _from(self, number: int) -> _SendOn:
        return _SendOn(self._directory, self._brokers, number)

    async def _send_item_on(self, number: int, key: TopicKey, record: Record) -> bool:
        """Whether an item that waited in the log of a shard's buffered namespaces is on another shard now."""
        await self._directory.look([number])
        shard = await self._directory.find(Name.topic(*key))
        if shard == number:
            return False
        await self._brokers[shard].topics.flusher.take_over(record)
        return True


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
        await self._brokers[shard].replayer.take_over(record)
        return True

"""Queues and partitions known to the brokers, for access checks of limited tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from queen.broker.broker import Broker
from queen.storage.database import can_be_stored
from queen.wire.ids import is_uuid, parse_lease, parse_partition_uuid


class BrokerLookup:
    """Asks the catalogs, which remember, and then PostgreSQL."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers

    async def namespace_of(self, queue: str) -> str | None:
        """The namespace a queue is in; None when there is no such queue."""
        if not can_be_stored(queue):
            # The handler reports what is wrong with the name.
            return None
        for broker in self._brokers:
            found = await broker.catalog.queue(queue)
            if found is not None:
                return found.namespace
        return None

    async def queues_of_partition(self, partition_id: str) -> Iterable[str]:
        """The queue of a partition; none when there is no such partition."""
        partition = parse_partition_uuid(partition_id)
        return await self._queues_holding(partition) if partition is not None else ()

    async def queues_of_lease(self, lease_id: str) -> Iterable[str]:
        """The queue of the partition that a lease is of."""
        parsed = parse_lease(lease_id)
        return await self._queues_holding(parsed[0]) if parsed is not None else ()

    async def groups_of_lease(self, lease_id: str) -> Iterable[str]:
        """The consumer group that holds a lease."""
        parsed = parse_lease(lease_id)
        if parsed is None or not is_uuid(lease_id):
            return ()
        held, lease = parsed[0], uuid.UUID(lease_id)
        found = [await broker.database.fetch("groups_of_lease", held, lease) for broker in self._brokers]
        return [row["name"] for rows in found for row in rows]

    async def _queues_holding(self, partition: int) -> list[str]:
        # A number that is given once on all shards; which of them has it now is not asked.
        found = [await broker.catalog.partitions_by_id([partition]) for broker in self._brokers]
        return [one.queue_name for partitions in found for one in partitions.values()]

    async def queues_of_batch(self, run: str, batch: int) -> Iterable[str] | None:
        """The queues that messages were staged for; None when items of topics were."""
        queues: set[str] = set()
        for broker in self._brokers:
            queues.update(row["queue"] for row in await broker.database.fetch("queues_of_batch", run, batch))
        return None if "" in queues else queues

    async def queues_of_stream(self, query_id: str) -> Iterable[str]:
        """The queues that a streaming query reads and writes."""
        try:
            public_id = uuid.UUID(query_id)
        except ValueError:
            return ()
        return await self._stream_queues("queues_of_stream", public_id)

    async def queues_of_stream_named(self, name: str) -> Iterable[str]:
        """The same of a query by its name."""
        return await self._stream_queues("queues_of_stream_named", name)

    async def _stream_queues(self, statement: str, key: uuid.UUID | str) -> set[str]:
        queues: set[str] = set()
        for broker in self._brokers:
            for row in await broker.database.fetch(statement, key):
                queues.update(name for name in (row["source_queue"], row["sink_queue"]) if name)
        return queues

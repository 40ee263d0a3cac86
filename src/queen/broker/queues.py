"""Administration of queues: configuring, deleting and clearing them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from queen.broker.events import Event, EventKind, named, partition_changed
from queen.errors import NotFound
from queen.log.catalog import Catalog, Queue
from queen.metrics.meter import Meter
from queen.storage.database import Database, retry_transaction
from queen.wire.api.resources.queues import Configured, QueueOptions
from queen.wire.ids import partition_uuid
from queen.wire.options import OptionValue
from queen.wire.push import DEFAULT_PARTITION

# Messages expire only where a ttl was set, though clients are shown the default they know.
_SHOWN_TTL: Final = 3600


def option_values(options: QueueOptions | None) -> list[OptionValue]:
    """What is stored for each option, in the order of the parameters of `configure_queue`."""
    return list(msgspec.structs.astuple(options if options is not None else QueueOptions()))


def shown_options(queue: Queue) -> QueueOptions:
    """The options of a queue as clients are shown them."""
    shown = QueueOptions(**{field: getattr(queue, field) for field in QueueOptions.__struct_fields__})
    if shown.ttl is None:
        shown.ttl = _SHOWN_TTL
    return shown


Publish: TypeAlias = Callable[[Sequence[Event]], None]
"""Publishes events to this and every other worker."""

_STEP: Final = 5000
_PARTITIONS_AT_ONCE: Final = 1000
_SWEEP_SECONDS: Final = 2.0
_SWEEPS: Final = ("sweep_cursors", "sweep_dead_letters", "sweep_traces")


class Queues:
    """Changes queues as a whole, and notifies every worker."""

    def __init__(self, database: Database, catalog: Catalog, publish: Publish, meter: Meter) -> None:
        self._database = database
        self._catalog = catalog
        self._publish = publish
        self._meter = meter

    async def configure(self, name: str, namespace: str, task: str, options: Sequence[OptionValue]) -> Configured:
        """Create a queue, or replace its configuration; `options` as `option_values` gives them."""
        async with self._database.transaction() as transaction:
            (record,) = await transaction.fetch("configure_queue", name, namespace, task, *options)
            queue = Queue.from_record(record)
            made = await transaction.fetch("create_partitions", [queue.id], [DEFAULT_PARTITION])
            (partition,) = await transaction.fetch("partitions_by_names", [queue.id], [DEFAULT_PARTITION])
        self._meter.partitions_made(name, len(made))
        # A worker's own notification does not refresh its catalog: it has the queue already.
        self._catalog.refresh_queue(name)
        self._publish([named(EventKind.QUEUE_CHANGED, name, int(bool(made)))])
        partition_id = partition_uuid(partition["id"])
        return Configured(True, str(queue.public_id), partition_id, name, namespace, task, shown_options(queue))

    async def pause(self, name: str, paused: bool) -> bool:
        """Stop delivering messages of a queue, or go on; returns whether that is a change. Pushes are not affected."""
        return await self._pause(name, "pause_queue", name, paused)

    async def pause_group(self, name: str, group: str, paused: bool) -> bool:
        """The same for one group alone. Raises `NotFound` for a group that no pop has ever named."""
        if await self._catalog.existing_group(group) is None:
            raise NotFound("Consumer group not found")
        return await self._pause(name, "pause_group", name, group, paused)

    async def delete(self, name: str) -> bool:
        """Delete a queue with all that is in it, however much that is; False when there is none of that name.

        It is gone at once. Its cursors, dead letters and traces are removed for a while here; what is left of them, and
        the messages, is removed by the job of `dropped_partitions`. Subscriptions stay for a queue of that name.
        """
        dropped = await retry_transaction(lambda: self._drop(name))
        # Also if it does not exist: another worker may have it cached.
        self._publish([named(EventKind.QUEUE_GONE, name)])
        if dropped is None:
            return False
        self._meter.partitions_removed(name, len(dropped))
        await self._sweep(dropped)
        return True

    async def clear(self, name: str, partition_name: str | None = None) -> int:
        """Remove all messages stored so far from a queue, or from one of its partitions; returns how many that were.

        They are not delivered any more once this is committed. Options, cursors and dead letters stay.
        """
        queue = await self._queue(name)
        rows = await self._database.fetch("clear_partitions", queue.id, partition_name)
        if not rows and partition_name is not None:
            raise NotFound("Partition not found")
        ids: list[int] = sorted(row["id"] for row in rows if row["messages"])
        for start in range(0, len(ids), _PARTITIONS_AT_ONCE):
            some = ids[start : start + _PARTITIONS_AT_ONCE]
            await self._remove_cleared(some)
            self._publish([partition_changed(queue.id, id) for id in some])
        return sum(row["messages"] for row in rows)

    async def _drop(self, name: str) -> list[int] | None:
        """Remove a queue with its keys and timers; the ids of its partitions, None when there is no such queue."""
        async with self._database.transaction() as transaction:
            # Timers that fire and transactions with keys lock these first, then the partitions: they end before the
            # queue is held. What comes meanwhile is removed below; a timer that fires then finds the queue gone.
            await transaction.fetch("kv_remove_namespace", name)
            await transaction.fetch("timers_remove_queue", name)
            held = await transaction.fetch("hold_queue", name)
            dropped = await transaction.fetch("drop_queue_partitions", held[0]["id"]) if held else []
            if held:
                await transaction.fetch("drop_queue", held[0]["id"])
            await transaction.fetch("kv_remove_namespace", name)
            await transaction.fetch("timers_remove_idle", name)
        return [row["partition_id"] for row in dropped] if held else None

    async def _pause(self, name: str, statement: str, *args: object) -> bool:
        rows = await self._database.fetch(statement, *args)
        if not rows:
            raise NotFound("Queue not found")
        changed = bool(rows[0]["changed"])
        if changed:
            self._catalog.refresh_queue(name)
            self._publish([named(EventKind.QUEUE_CHANGED, name)])
        return changed

    async def _queue(self, name: str) -> Queue:
        """The queue as PostgreSQL has it, since the catalog may remember one that is gone."""
        for record in await self._database.fetch("queue_by_name", name):
            return Queue.from_record(record)
        raise NotFound("Queue not found")

    async def _sweep(self, partition_ids: Sequence[int]) -> None:
        """Remove in steps what hung on partitions that are gone, until it is done or takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SWEEP_SECONDS
        for start in range(0, len(partition_ids), _PARTITIONS_AT_ONCE):
            some = list(partition_ids[start : start + _PARTITIONS_AT_ONCE])
            for statement in _SWEEPS:
                while len(await self._database.fetch(statement, some, _STEP)) == _STEP:
                    if loop.time() > deadline:
                        return

    async def _remove_cleared(self, partition_ids: list[int]) -> None:
        """Remove what is out of reach in steps, so that no statement takes long."""
        place = (0, -1)
        while rows := await self._database.fetch("remove_cleared_segments", partition_ids, *place, _STEP):
            place = (rows[0]["partition_id"], rows[0]["base_offset"])
        await self._database.fetch("remove_cleared_traces", partition_ids)

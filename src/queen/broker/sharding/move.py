"""Moves one queue or topic to another shard.

It is copied while it is in use, then locked: the rest is transferred and kept on the target, invisible. The commit at
the source that removes it and records its new placement is the moment at which it has moved. From then on the mover, or
any server that reads the placement, completes the move on the target. A move that is interrupted before that commit
leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import asyncpg

from queen.broker.sharding.copies import (
    Change,
    ItemCopy,
    OnCopied,
    Row,
    SegmentCopy,
    group_ids,
    remove_segments,
    transfer,
)
from queen.broker.sharding.fleet import Fleet
from queen.errors import Conflict, Overloaded
from queen.log.topics import LOCKS
from queen.storage.database import UNAVAILABLE_ERRORS, AdvisoryLock, Connection, Record
from queen.storage.statements import sql
from queen.wire.shards import Kind, Name, home

_TOPIC_LOCK = 1_366_650_960


class Contents(Protocol):
    """A queue or topic that is moved. `source` is in a transaction from `lock` on."""

    async def total(self) -> int:
        """How much there is to copy before it is locked."""

    async def copy(self) -> None:
        """Copy what can be copied while it is used."""

    async def lock(self) -> None:
        """Keep all other sessions from it until the transaction ends."""

    async def transfer(self, move_id: uuid.UUID) -> None:
        """Transfer the rest to the target."""

    async def remove(self, move_id: uuid.UUID) -> None:
        """Remove it from the source."""

    @property
    def left_id(self) -> int | None:
        """The id by which the source refuses late writes to it; None where late writes find no row anyway."""


class QueueContents:
    """A queue with its partitions, messages, cursors, dead letters, traces, subscriptions, keys and streaming state."""

    def __init__(self, source: Connection, target: Connection, id: int, name: Name, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._id = id
        self._name = name.key
        self._segments = SegmentCopy(source, target, id, on_copied)
        self._partitions: list[Record] = []

    async def total(self) -> int:
        return await self._segments.total()

    async def copy(self) -> None:
        await self._segments.clear()
        await self._segments.copy()

    async def lock(self) -> None:
        await self._source.execute(sql("move_queue_lock_tables"))
        await self._source.execute(sql("move_queue_lock"), self._id)
        self._partitions = await self._source.fetch(sql("move_queue_lock_partitions"), self._id)

    async def transfer(self, move_id: uuid.UUID) -> None:
        source, target = self._source, self._target
        await self._segments.finish(self._partitions)
        groups = await self._group_ids()
        queries = await self._query_ids()

        def of_group(row: Row) -> None:
            row["group_id"] = groups[row["group_id"]]

        def of_query(row: Row) -> None:
            row["query_id"] = queries.get(row["query_id"], row["query_id"])

        tables: tuple[tuple[str, int | str, Change | None], ...] = (
            ("queues", self._id, None),
            ("partitions", self._id, None),
            ("cursors", self._id, of_group),
            ("subscriptions", self._name, of_group),
            ("dead_letters", self._id, of_group),
            ("traces", self._id, None),
            ("trace_names", self._id, None),
            ("stream_state", self._id, of_query),
            ("kv", self._name, None),
            ("timers", self._name, None),
        )
        for table, argument, change in tables:
            await transfer(source, target, move_id, table, argument, change=change)
        await target.execute(sql("kv_raise_versions"), await source.fetchval(sql("kv_last_version")))

    async def remove(self, move_id: uuid.UUID) -> None:
        # The segments are many: they are removed after the queue is in use on the target.
        partitions = [row["id"] for row in self._partitions]
        await self._source.execute(sql("move_remove_queue"), self._id, self._name, move_id, partitions)

    @property
    def left_id(self) -> int | None:
        return None

    async def _group_ids(self) -> dict[int, int]:
        rows = await self._source.fetch(sql("move_queue_groups"), self._id, self._name)
        return await group_ids(self._source, self._target, [row["group_id"] for row in rows])

    async def _query_ids(self) -> dict[int, int]:
        """Streaming queries live with their source, under the public id by which they are known."""
        ids: dict[int, int] = {}
        for id, *columns in await self._source.fetch(sql("move_stream_queries"), self._name):
            ids[id] = await self._target.fetchval(sql("move_save_stream_query"), *columns)
        return ids


class TopicContents:
    """A topic with its items, their keys and its dead letters."""

    def __init__(self, source: Connection, target: Connection, id: int, name: Name, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._id = id
        self._namespace = name.parts[0]
        self._items = ItemCopy(source, target, id, on_copied)

    async def total(self) -> int:
        return int(await self._source.fetchval(sql("move_topic_items"), self._id))

    async def copy(self) -> None:
        await self._items.copy()

    async def lock(self) -> None:
        await self._source.execute(sql("move_topic_lock"), _TOPIC_LOCK, self._id % LOCKS)
        await self._source.execute(sql("move_topic_lock_row"), self._id)
        await self._close_ready_queue()

    async def _close_ready_queue(self) -> None:
        """Turn handed-out blocks into leases of their items, so that the items alone say what is leased."""
        await self._source.execute(sql("topic_ready_close_any"), self._id)
        await self._source.execute(sql("topic_settle_handouts"), 0.0, [self._id], None)
        await self._source.execute(sql("topic_ready_free"), [self._id % LOCKS], self._id)

    async def transfer(self, move_id: uuid.UUID) -> None:
        source, target = self._source, self._target
        namespace_id = await target.fetchval(sql("move_create_namespace"), self._namespace)

        def of_namespace(row: Row) -> None:
            row["namespace_id"] = namespace_id

        tables: tuple[tuple[str, Change | None], ...] = (
            ("topics", of_namespace),
            ("topic_heads", None),
            ("topic_dead_letters", None),
            ("topic_keys", of_namespace),
        )
        for table, change in tables:
            await transfer(source, target, move_id, table, self._id, change=change)
        await self._items.transfer(move_id)

    async def remove(self, move_id: uuid.UUID) -> None:
        await self._source.execute(sql("move_remove_topic"), self._id)

    @property
    def left_id(self) -> int | None:
        return self._id


async def remove_leftovers(source: Connection, move_id: uuid.UUID) -> None:
    """Remove the segments of a queue that has moved to another shard."""
    partitions = await source.fetchval(sql("move_left_partitions"), move_id)
    if partitions:
        # The queue may have moved back since.
        here = await source.fetch(sql("move_partitions_here"), partitions)
        await remove_segments(source, sorted(set(partitions) - {row["id"] for row in here}))
    await source.execute(sql("move_remove"), move_id)


Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the phase, the messages done and the messages in all."""

_LOCK_ATTEMPTS: Final = 60
_LOCK_TIMEOUT: Final = "500ms"
_ITEM_TIMEOUT: Final = "10s"


class Mover:
    """Moves queues and topics between shards."""

    def __init__(self, fleet: Fleet, progress: Progress = lambda phase, done, total: None) -> None:
        self._fleet = fleet
        self._progress = progress

    async def move(self, name: Name, to: int) -> bool:
        """Bring a queue or topic to a shard; False when it was there already. Raises `NotFound` and `Conflict`."""
        target = self._fleet[to]
        await self._fleet.complete_arrivals()
        holder, id = await self._fleet.holder(name)
        if holder == to:
            await self._clean_up(name, to)
            return False
        source = self._fleet[holder]
        await self._lock(source, holder)
        try:
            await self._remove_attempts(name, source, target)
            await self._refuse_in_maintenance(source, holder)
            move_id = uuid.uuid4()
            await _begin(source, move_id, name, holder, to)
            contents = self._contents(source, target, id, name)
            self._done, self._total = 0, await contents.total()
            await contents.copy()
            await self._switch_over(contents, name, move_id, holder, to)
            self._progress("completing", self._total, self._total)
            await target.fetchval(sql("complete_move"), move_id)
            await self._clean_up(name, to)
        finally:
            await self._unlock(source)
        return True

    def _contents(self, source: Connection, target: Connection, id: int, name: Name) -> Contents:
        if name.kind is Kind.QUEUE:
            return QueueContents(source, target, id, name, self._copied)
        return TopicContents(source, target, id, name, self._copied)

    def _copied(self, count: int) -> None:
        self._done += count
        self._total = max(self._total, self._done)
        self._progress("copying", self._done, self._total)

    async def _switch_over(self, contents: Contents, name: Name, move_id: uuid.UUID, holder: int, to: int) -> None:
        source, target = self._fleet[holder], self._fleet[to]
        for attempt in range(_LOCK_ATTEMPTS):
            leaving = source.transaction()
            await leaving.start()
            try:
                await source.execute(sql("move_lock_timeout"), _LOCK_TIMEOUT)
                await contents.lock()
                await source.execute(sql("move_lock_timeout"), _ITEM_TIMEOUT)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                await leaving.rollback()
                self._progress("waiting for locks", self._done, self._total)
                # Sessions that wait behind this one go first.
                await asyncio.sleep(random.uniform(0.05, 0.2) * min(attempt + 1, 10))
                continue
            break
        else:
            raise Overloaded(f"{name} is locked by other transactions ({_LOCK_ATTEMPTS} attempts); nothing was moved")
        try:
            self._progress("switching over", self._done, self._total)
            async with target.transaction():
                await _record_placement(target, name, holder, move_id, arriving=True)
                await _begin(target, move_id, name, holder, to)
                await contents.transfer(move_id)
            await contents.remove(move_id)
            await _record_placement(source, name, to, move_id, left_id=contents.left_id)
            await source.execute(sql("move_next_version"))
        except BaseException:
            await leaving.rollback()
            raise
        await leaving.commit()

    async def _remove_attempts(self, name: Name, source: Connection, target: Connection) -> None:
        """Remove what unfinished attempts have left."""
        async with target.transaction():
            rows = await target.fetch(sql("moves_of"), *name)
            for row in rows:
                await target.execute(sql("move_remove_rows"), row["id"])
            await target.execute(sql("move_remove_unfinished"), *name)
            await target.execute(sql("move_cancel_arrival"), *name)
        for row in await target.fetch(sql("moves_of"), *name):
            await remove_leftovers(target, row["id"])
        await source.execute(sql("move_remove_unfinished"), *name)

    async def _clean_up(self, name: Name, to: int) -> None:
        """After a move: record the placement on the shard that the hash names, and remove what was left behind."""
        chosen = home(name, await self._fleet.layout())
        if chosen != to and chosen in self._fleet.connections:
            async with self._fleet[chosen].transaction():
                await _record_placement(self._fleet[chosen], name, to)
                await self._fleet[chosen].execute(sql("move_next_version"))
        for number, connection in self._fleet.connections.items():
            if number == to:
                continue
            for row in await connection.fetch(sql("moves_of"), *name):
                self._progress("removing old segments", 1, 1)
                await remove_leftovers(connection, row["id"])

    async def _refuse_in_maintenance(self, source: Connection, holder: int) -> None:
        if await source.fetchval(sql("push_maintenance_is_on")):
            raise Conflict(f"shard {holder} is in maintenance mode (pushes are in the spool): switch it off first")

    async def _lock(self, source: Connection, holder: int) -> None:
        if not await source.fetchval(sql("move_lock"), AdvisoryLock.MOVE):
            raise Conflict(f"another move from shard {holder} is running; only one move at a time")

    async def _unlock(self, source: Connection) -> None:
        """Give the lock back; a connection that was lost, and may not know it yet, has lost the lock, too."""
        try:
            if not source.is_closed():
                await source.execute(sql("move_unlock"), AdvisoryLock.MOVE)
        except UNAVAILABLE_ERRORS:
            source.terminate()


async def _begin(connection: Connection, move_id: uuid.UUID, name: Name, holder: int, to: int) -> None:
    await connection.execute(sql("move_begin"), move_id, name.kind.value, name.key, holder, to)


async def _record_placement(
    connection: Connection,
    name: Name,
    shard: int,
    move_id: uuid.UUID | None = None,
    *,
    arriving: bool = False,
    left_id: int | None = None,
) -> None:
    await connection.execute(sql("move_placement"), name.kind.value, name.key, shard, move_id, arriving, left_id)

"""Moves one queue or topic.

It is copied while it is used, then held for a moment: what is left is brought over and kept on the other shard, unseen.
The commit that removes it here, and leaves a note of where it went, is the moment at which it has moved. From then on
anybody may have the other shard show it: the mover, or any server that meets the note. Before that moment, whoever dies
leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import asyncpg

from queen.broker.sharding.copies import ItemCopy, OnCopied, Row, SegmentCopy, carry, remove_segments, same_ids
from queen.broker.sharding.fleet import Fleet
from queen.broker.topics.catalog import LOCKS
from queen.errors import Conflict, Overloaded
from queen.storage.database import AdvisoryLock, Connection, Record
from queen.storage.statements import load_statements
from queen.wire.shards import Kind, Name, home

# In the order in which everybody else takes them: cursors before partitions.
_HELD_TABLES = "queen.cursors, queen.stream_state, queen.dead_letters, queen.traces, queen.subscriptions"
_TOPIC_LOCK = 1_366_650_960
_OF_QUEUE = "partition_id IN (SELECT id FROM queen.partitions WHERE queue_id = $1)"


class Contents(Protocol):
    """Something that moves. `source` is in a transaction from `hold` on."""

    async def total(self) -> int:
        """How much there is to copy before anything is held."""

    async def copy(self) -> None:
        """Copy what can be copied while it is used."""

    async def hold(self) -> None:
        """Let nobody use it until the transaction ends."""

    async def carry(self, move_id: uuid.UUID) -> None:
        """Bring the rest to the other shard."""

    async def remove(self, move_id: uuid.UUID) -> None:
        """Remove it here."""

    @property
    def left_id(self) -> int | None:
        """By which those who come too late are told that it has left; None where they find nothing to do anyway."""


class QueueContents:
    """A queue with its partitions, messages, cursors, dead letters, traces, subscriptions and streaming state."""

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

    async def hold(self) -> None:
        await self._source.execute(f"LOCK TABLE {_HELD_TABLES} IN EXCLUSIVE MODE")
        await self._source.execute("SELECT FROM queen.queues WHERE id = $1 FOR UPDATE", self._id)
        self._partitions = await self._source.fetch(
            "SELECT id, next_offset FROM queen.partitions WHERE queue_id = $1 ORDER BY id FOR UPDATE", self._id
        )

    async def carry(self, move_id: uuid.UUID) -> None:
        source, target = self._source, self._target
        await self._segments.finish(self._partitions)
        groups = await self._group_ids()
        queries = await self._query_ids()

        def of_group(row: Row) -> None:
            row["group_id"] = groups[row["group_id"]]

        def of_query(row: Row) -> None:
            row["query_id"] = queries.get(row["query_id"], row["query_id"])

        for table, query, argument, change in (
            ("queues", "SELECT to_jsonb(t) FROM queen.queues t WHERE id = $1", self._id, None),
            ("partitions", "SELECT to_jsonb(t) FROM queen.partitions t WHERE queue_id = $1", self._id, None),
            ("cursors", f"SELECT to_jsonb(t) FROM queen.cursors t WHERE {_OF_QUEUE}", self._id, of_group),
            (
                "subscriptions",
                "SELECT to_jsonb(t) FROM queen.subscriptions t WHERE queue_name = $1",
                self._name,
                of_group,
            ),
            ("dead_letters", "SELECT to_jsonb(t) FROM queen.dead_letters t WHERE queue_id = $1", self._id, of_group),
            ("traces", "SELECT to_jsonb(t) FROM queen.traces t WHERE queue_id = $1", self._id, None),
            (
                "trace_names",
                "SELECT to_jsonb(n) FROM queen.trace_names n JOIN queen.traces t ON t.id = n.trace_id"
                " WHERE t.queue_id = $1",
                self._id,
                None,
            ),
            ("stream_state", f"SELECT to_jsonb(t) FROM queen.stream_state t WHERE {_OF_QUEUE}", self._id, of_query),
        ):
            await carry(source, target, move_id, table, query, argument, change=change)

    async def remove(self, move_id: uuid.UUID) -> None:
        for statement, argument in (
            (f"DELETE FROM queen.cursors WHERE {_OF_QUEUE}", self._id),
            (f"DELETE FROM queen.stream_state WHERE {_OF_QUEUE}", self._id),
            ("DELETE FROM queen.dead_letters WHERE queue_id = $1", self._id),
            ("DELETE FROM queen.traces WHERE queue_id = $1", self._id),
            ("DELETE FROM queen.subscriptions WHERE queue_name = $1", self._name),
            ("DELETE FROM queen.stream_queries WHERE source_queue = $1", self._name),
            ("DELETE FROM queen.queues WHERE id = $1", self._id),
        ):
            await self._source.execute(statement, argument)
        # The segments are many: they go when everybody uses the others.
        await self._source.execute(
            "UPDATE queen.moves SET partitions = $2 WHERE id = $1", move_id, [row["id"] for row in self._partitions]
        )

    @property
    def left_id(self) -> int | None:
        return None

    async def _group_ids(self) -> dict[int, int]:
        rows = await self._source.fetch(
            f"SELECT DISTINCT group_id FROM queen.cursors WHERE {_OF_QUEUE}"
            " UNION SELECT group_id FROM queen.dead_letters WHERE queue_id = $1"
            " UNION SELECT group_id FROM queen.subscriptions WHERE queue_name = $2",
            self._id,
            self._name,
        )
        return await same_ids(self._source, self._target, "groups", [row["group_id"] for row in rows])

    async def _query_ids(self) -> dict[int, int]:
        """Streaming queries live with their source, under the id by which they are known."""
        rows = await self._source.fetch(
            "SELECT * FROM queen.stream_queries WHERE source_queue = $1 ORDER BY name", self._name
        )
        ids: dict[int, int] = {}
        for row in rows:
            ids[row["id"]] = await self._target.fetchval(
                "INSERT INTO queen.stream_queries (public_id, name, source_queue, sink_queue, config_hash, created_at)"
                " VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (name) DO UPDATE SET public_id = excluded.public_id,"
                " source_queue = excluded.source_queue, sink_queue = excluded.sink_queue,"
                " config_hash = excluded.config_hash RETURNING id",
                *(row[key] for key in ("public_id", "name", "source_queue", "sink_queue", "config_hash", "created_at")),
            )
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
        return int(await self._source.fetchval("SELECT count(*) FROM queen.topic_items WHERE topic_id = $1", self._id))

    async def copy(self) -> None:
        await self._items.copy()

    async def hold(self) -> None:
        await self._source.execute(
            "SELECT pg_advisory_xact_lock($1::integer, $2::integer)", _TOPIC_LOCK, self._id % LOCKS
        )
        await self._source.execute("SELECT FROM queen.topics WHERE id = $1 FOR UPDATE", self._id)
        await self._close_ready_queue()

    async def _close_ready_queue(self) -> None:
        """What was handed out is leased item by item, what was not is ready: nothing of it is left behind."""
        statements = load_statements()
        await self._source.execute(statements["topic_ready_close_any"], self._id)
        await self._source.execute(statements["topic_settle_handouts"], 0.0, [self._id], None)
        await self._source.execute(statements["topic_ready_free"], [self._id % LOCKS], self._id)

    async def carry(self, move_id: uuid.UUID) -> None:
        source, target = self._source, self._target
        await target.execute(
            "INSERT INTO queen.topic_namespaces (name) VALUES ($1) ON CONFLICT DO NOTHING", self._namespace
        )
        namespace_id = await target.fetchval("SELECT id FROM queen.topic_namespaces WHERE name = $1", self._namespace)

        def of_namespace(row: Row) -> None:
            row["namespace_id"] = namespace_id

        tables: tuple[tuple[str, str, Any], ...] = (
            ("topics", "SELECT to_jsonb(t) FROM queen.topics t WHERE id = $1", of_namespace),
            ("topic_heads", "SELECT to_jsonb(t) FROM queen.topic_heads t WHERE topic_id = $1", None),
            (
                "topic_dead_letters",
                "SELECT to_jsonb(t) FROM queen.topic_dead_letters t WHERE topic_id = $1 FOR UPDATE",
                None,
            ),
            (
                "topic_keys",
                "SELECT to_jsonb(k) FROM queen.topic_items i JOIN queen.topics t ON t.id = i.topic_id"
                " JOIN queen.topic_keys k ON k.namespace_id = t.namespace_id AND k.key = i.idempotency_key"
                " AND k.item_id = i.id WHERE i.topic_id = $1",
                of_namespace,
            ),
        )
        for table, query, change in tables:
            await carry(source, target, move_id, table, query, self._id, change=change)
        await self._items.carry(move_id)

    async def remove(self, move_id: uuid.UUID) -> None:
        for table in ("topic_heads", "topic_dead_letters", "topic_ready"):
            await self._source.execute(f"DELETE FROM queen.{table} WHERE topic_id = $1", self._id)
        await self._source.execute("DELETE FROM queen.topics WHERE id = $1", self._id)

    @property
    def left_id(self) -> int | None:
        return self._id


async def remove_leftovers(source: Connection, move_id: uuid.UUID) -> None:
    """Remove the segments of a queue that has gone."""
    partitions = await source.fetchval("SELECT partitions FROM queen.moves WHERE id = $1", move_id)
    if partitions:
        # They may have come back since.
        here = await source.fetch("SELECT id FROM queen.partitions WHERE id = ANY ($1::bigint[])", partitions)
        await remove_segments(source, sorted(set(partitions) - {row["id"] for row in here}))
    await source.execute("DELETE FROM queen.moves WHERE id = $1", move_id)


Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is."""

_HOLD_ATTEMPTS: Final = 60
_HOLD_TIMEOUT: Final = "500ms"
_ITEM_TIMEOUT: Final = "10s"
_NOTE: Final = (
    "INSERT INTO queen.placements AS p (kind, name, shard, move_id, arriving, left_id) VALUES ($1, $2, $3, $4, $5, $6)"
    " ON CONFLICT (kind, name) DO UPDATE SET shard = excluded.shard, move_id = excluded.move_id,"
    " arriving = excluded.arriving, left_id = coalesce(excluded.left_id, p.left_id)"
)


class Mover:
    """Moves things between shards."""

    def __init__(self, fleet: Fleet, progress: Progress = lambda phase, done, total: None) -> None:
        self._fleet = fleet
        self._progress = progress

    async def move(self, name: Name, to: int) -> bool:
        """Bring a queue or topic to a shard; False when it was there already. Raises `NotFound` and `Conflict`."""
        target = self._fleet[to]
        await self._fleet.complete_arrivals()
        holder, id = await self._fleet.holder(name)
        if holder == to:
            await self._tidy_up(name, to)
            return False
        source = self._fleet[holder]
        await self._lock(source, holder)
        try:
            await self._forget_attempts(name, source, target)
            await self._refuse_in_maintenance(source, holder)
            move_id = uuid.uuid4()
            await _begin(source, move_id, name, holder, to)
            contents = self._contents(source, target, id, name)
            self._done, self._total = 0, await contents.total()
            await contents.copy()
            await self._hand_over(contents, name, move_id, holder, to)
            self._progress("completing", self._total, self._total)
            await target.fetchval("SELECT queen.complete_move($1)", move_id)
            await self._tidy_up(name, to)
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

    async def _hand_over(self, contents: Contents, name: Name, move_id: uuid.UUID, holder: int, to: int) -> None:
        source, target = self._fleet[holder], self._fleet[to]
        for attempt in range(_HOLD_ATTEMPTS):
            leaving = source.transaction()
            await leaving.start()
            try:
                await source.execute(f"SET LOCAL lock_timeout = '{_HOLD_TIMEOUT}'")
                await contents.hold()
                await source.execute(f"SET LOCAL lock_timeout = '{_ITEM_TIMEOUT}'")
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                await leaving.rollback()
                self._progress("waiting to hold it", self._done, self._total)
                # Who waits behind us goes first.
                await asyncio.sleep(random.uniform(0.05, 0.2) * min(attempt + 1, 10))
                continue
            break
        else:
            raise Overloaded(f"{name} is used by transactions that do not end; nothing was moved, try again later")
        try:
            self._progress("handing over", self._done, self._total)
            async with target.transaction():
                await target.execute(_NOTE, name.kind.value, name.key, holder, move_id, True, None)
                await _begin(target, move_id, name, holder, to)
                await contents.carry(move_id)
            await contents.remove(move_id)
            await source.execute(_NOTE, name.kind.value, name.key, to, move_id, False, contents.left_id)
            await source.execute("UPDATE queen.shard SET version = version + 1")
        except BaseException:
            await leaving.rollback()
            raise
        await leaving.commit()

    async def _forget_attempts(self, name: Name, source: Connection, target: Connection) -> None:
        """Remove what attempts have left that did not come to their end."""
        async with target.transaction():
            rows = await target.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name)
            for row in rows:
                await target.execute("DELETE FROM queen.move_rows WHERE move_id = $1", row["id"])
            await target.execute("DELETE FROM queen.moves WHERE kind = $1 AND name = $2 AND partitions IS NULL", *name)
            await target.execute(
                "UPDATE queen.placements SET arriving = false, left_id = NULL,"
                " move_id = CASE WHEN arriving THEN NULL ELSE move_id END WHERE kind = $1 AND name = $2",
                *name,
            )
        for row in await target.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name):
            await remove_leftovers(target, row["id"])
        await source.execute("DELETE FROM queen.moves WHERE kind = $1 AND name = $2 AND partitions IS NULL", *name)

    async def _tidy_up(self, name: Name, to: int) -> None:
        """It is there: have the shard that its hash says know it, and remove what it left behind."""
        chosen = home(name, await self._fleet.layout())
        if chosen != to and chosen in self._fleet.connections:
            async with self._fleet[chosen].transaction():
                await self._fleet[chosen].execute(_NOTE, name.kind.value, name.key, to, None, False, None)
                await self._fleet[chosen].execute("UPDATE queen.shard SET version = version + 1")
        for number, connection in self._fleet.connections.items():
            if number == to:
                continue
            for row in await connection.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name):
                self._progress("removing what is left behind", 1, 1)
                await remove_leftovers(connection, row["id"])

    async def _refuse_in_maintenance(self, source: Connection, holder: int) -> None:
        if await source.fetchval(
            "SELECT EXISTS (SELECT FROM queen.system_state WHERE key = 'maintenance_mode'"
            " AND (value ->> 'enabled')::boolean)"
        ):
            raise Conflict(f"shard {holder} is in maintenance: pushes wait in spools, so switch it off before a move")

    async def _lock(self, source: Connection, holder: int) -> None:
        if not await source.fetchval("SELECT pg_try_advisory_lock($1)", AdvisoryLock.MOVE):
            raise Conflict(f"something is being moved from shard {holder} already: one move at a time")

    async def _unlock(self, source: Connection) -> None:
        if not source.is_closed():
            await source.execute("SELECT pg_advisory_unlock($1)", AdvisoryLock.MOVE)


async def _begin(connection: Connection, move_id: uuid.UUID, name: Name, holder: int, to: int) -> None:
    await connection.execute(
        "INSERT INTO queen.moves (id, kind, name, from_shard, to_shard) VALUES ($1, $2, $3, $4, $5)",
        move_id,
        name.kind.value,
        name.key,
        holder,
        to,
    )

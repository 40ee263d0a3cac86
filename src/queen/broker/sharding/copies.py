"""Rows on their way from one shard to another: read where they are, kept where they go until they are stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from queen.storage.database import Connection, Record

Row: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Row], None]

_CHUNK_ROWS = 1000
_CHUNK_BYTES = 8 << 20


async def carry(
    source: Connection,
    target: Connection,
    move_id: uuid.UUID,
    table: str,
    query: str,
    *arguments: Any,
    change: Change | None = None,
) -> int:
    """Keep the rows of a table that a query (of the row as JSON, in a transaction) finds; `change` alters each."""
    rows: list[Any] = []
    size = count = 0
    async for record in source.cursor(query, *arguments, prefetch=200):
        text: str = record[0]
        count += 1
        size += len(text)
        if change is None:
            rows.append(msgspec.Raw(text.encode()))
        else:
            row = msgspec.json.decode(text)
            change(row)
            rows.append(row)
        if len(rows) >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            await keep(target, move_id, table, rows)
            rows, size = [], 0
    if rows:
        await keep(target, move_id, table, rows)
    return count


async def keep(target: Connection, move_id: uuid.UUID, table: str, rows: Sequence[Any]) -> None:
    """Keep rows of a table until the move is complete."""
    await target.execute(
        "INSERT INTO queen.move_rows (move_id, table_name, rows) VALUES ($1, $2, $3)",
        move_id,
        table,
        msgspec.json.encode(rows).decode(),
    )


async def same_ids(source: Connection, target: Connection, table: str, ids: Sequence[int]) -> dict[int, int]:
    """Ids of things that both shards know by name, made on the other where they are missing."""
    rows = await source.fetch(f"SELECT id, name FROM queen.{table} WHERE id = ANY ($1::integer[]) ORDER BY name", ids)
    names = [row["name"] for row in rows]
    await target.execute(
        f"INSERT INTO queen.{table} (name) SELECT unnest($1::text[]) ON CONFLICT (name) DO NOTHING", names
    )
    there = await target.fetch(f"SELECT id, name FROM queen.{table} WHERE name = ANY ($1::text[])", names)
    by_name = {row["name"]: row["id"] for row in there}
    return {row["id"]: by_name[row["name"]] for row in rows}


OnCopied = Callable[[int], None]

_PAGE: Final = 500
_PARTITIONS: Final = 1000
_COLUMNS: Final = ("partition_id", "base_offset", "count", "created_at", "ids", "body")
_CALM: Final = 2000
_MOST_PASSES: Final = 20


class SegmentCopy:
    """One queue's segments. Copied ones lie in their place, where nobody looks before their partitions are there."""

    def __init__(self, source: Connection, target: Connection, queue_id: int, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._queue_id = queue_id
        self._on_copied = on_copied
        self._upto: dict[int, int] = {}

    async def total(self) -> int:
        """How many messages there are to copy."""
        return int(
            await self._source.fetchval(
                "SELECT coalesce(sum(next_offset - floor_offset), 0)::bigint FROM queen.partitions WHERE queue_id = $1",
                self._queue_id,
            )
        )

    async def clear(self) -> None:
        """Remove what an earlier attempt has left on the other shard, and forget what was rewritten before this one."""
        partitions = [row["id"] for row in await self._partitions()]
        await remove_segments(self._target, partitions)
        await self._target.execute(
            "DELETE FROM queen.dropped_partitions WHERE partition_id = ANY ($1::bigint[])", partitions
        )
        await self._source.execute(
            "DELETE FROM queen.rewritten_segments WHERE partition_id = ANY ($1::bigint[])", partitions
        )

    async def copy(self) -> None:
        """Copy what there is, and what was added meanwhile, until little is."""
        for _ in range(_MOST_PASSES):
            if await self._copy_new(await self._partitions()) < _CALM:
                return

    async def finish(self, partitions: Sequence[Record]) -> None:
        """With all partitions locked: copy what is missing, and bring what was changed up to date."""
        await self._copy_new(partitions)
        ids = [row["id"] for row in partitions]
        changed = await self._source.fetch(
            "SELECT s.partition_id, s.base_offset, s.body FROM queen.rewritten_segments r"
            " JOIN queen.segments s USING (partition_id, base_offset) WHERE r.partition_id = ANY ($1::bigint[])",
            ids,
        )
        await self._target.executemany(
            "UPDATE queen.segments SET body = $3 WHERE partition_id = $1 AND base_offset = $2",
            [tuple(row) for row in changed],
        )
        firsts = await self._source.fetch(
            "SELECT i.id, coalesce((SELECT min(base_offset) FROM queen.segments WHERE partition_id = i.id),"
            " 9223372036854775807) AS first FROM unnest($1::bigint[]) AS i (id)",
            ids,
        )
        # What retention has removed meanwhile.
        await self._target.execute(
            "DELETE FROM queen.segments s USING unnest($1::bigint[], $2::bigint[]) AS i (id, first)"
            " WHERE s.partition_id = i.id AND s.base_offset < i.first",
            [row["id"] for row in firsts],
            [row["first"] for row in firsts],
        )

    async def _partitions(self) -> list[Record]:
        return await self._source.fetch(
            "SELECT id, next_offset FROM queen.partitions WHERE queue_id = $1 ORDER BY id", self._queue_id
        )

    async def _copy_new(self, partitions: Sequence[Record]) -> int:
        """Copy what lies behind what was copied; returns how many messages that were."""
        grown = [row for row in partitions if row["next_offset"] > self._upto.get(row["id"], 0)]
        copied = 0
        for start in range(0, len(grown), _PARTITIONS):
            some = grown[start : start + _PARTITIONS]
            copied += await self._copy_of([row["id"] for row in some])
        return copied

    async def _copy_of(self, ids: Sequence[int]) -> int:
        copied = 0
        froms = [self._upto.get(id, 0) for id in ids]
        while True:
            rows = await self._source.fetch(
                f"SELECT s.{', s.'.join(_COLUMNS)} FROM unnest($1::bigint[], $2::bigint[]) AS i (id, first)"
                " CROSS JOIN LATERAL (SELECT * FROM queen.segments WHERE partition_id = i.id AND base_offset >= i.first"
                " ORDER BY base_offset LIMIT $3) s ORDER BY s.partition_id, s.base_offset LIMIT $3",
                ids,
                froms,
                _PAGE,
            )
            if not rows:
                return copied
            await self._target.copy_records_to_table(
                "segments", schema_name="queen", columns=_COLUMNS, records=[tuple(row) for row in rows]
            )
            for row in rows:
                self._upto[row["partition_id"]] = row["base_offset"] + row["count"]
            froms = [self._upto.get(id, 0) for id in ids]
            messages = sum(row["count"] for row in rows)
            copied += messages
            self._on_copied(messages)


async def remove_segments(connection: Connection, partitions: Sequence[int]) -> None:
    """Remove all segments of partitions, some at a time."""
    for start in range(0, len(partitions), _PARTITIONS):
        some = partitions[start : start + _PARTITIONS]
        while True:
            status = await connection.execute(
                "DELETE FROM queen.segments s USING (SELECT partition_id, base_offset FROM queen.segments"
                " WHERE partition_id = ANY ($1::bigint[]) LIMIT 1000) d"
                " WHERE s.partition_id = d.partition_id AND s.base_offset = d.base_offset",
                some,
            )
            if status == "DELETE 0":
                break


_ITEMS_PAGE: Final = 1000
_ITEMS_CALM: Final = 500
_ITEMS_MOST_PASSES: Final = 10
# A version of a row is the transaction that wrote it. Leases and what expires soon are looked after where they are, so
# these wait until the topic is held.
_CHANGED: Final = (
    "SELECT i.*, i.xmin::text::bigint AS version FROM queen.topic_items i"
    " LEFT JOIN pg_temp.copied_items c ON c.id = i.id WHERE i.topic_id = $1 AND i.leased_until IS NULL"
    " AND (i.expires_at IS NULL OR i.expires_at > clock_timestamp() + interval '1 hour')"
    " AND c.version IS DISTINCT FROM i.xmin::text::bigint"
)
# Whoever leases or acks an item at this moment is waited for, and nobody does so afterwards.
_TAKE: Final = (
    "WITH gone AS (DELETE FROM queen.topic_items i WHERE topic_id = $1 RETURNING i AS item, i.id,"
    " i.xmin::text::bigint AS version) SELECT g.id, CASE WHEN c.id IS NULL THEN to_jsonb(g.item) END AS item"
    " FROM gone g LEFT JOIN pg_temp.copied_items c ON c.id = g.id AND c.version = g.version"
)


class ItemCopy:
    """One topic's items. Copied ones lie in their place, where nobody finds them before their topic is there."""

    def __init__(self, source: Connection, target: Connection, topic_id: int, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._topic_id = topic_id
        self._on_copied = on_copied
        self._copied: set[int] = set()
        self._versions: list[tuple[int, int]] = []

    async def copy(self) -> None:
        """Copy what is ready or waits, and what was added meanwhile, until little is."""
        await self._source.execute("DROP TABLE IF EXISTS pg_temp.copied_items")
        await self._source.execute("CREATE TEMP TABLE copied_items (id bigint PRIMARY KEY, version bigint NOT NULL)")
        await self._clear()
        for _ in range(_ITEMS_MOST_PASSES):
            if await self._pass() < _ITEMS_CALM:
                return

    async def carry(self, move_id: uuid.UUID) -> None:
        """With the topic held: remove all items here, keep those that were changed, and drop copies of what is gone."""
        unchanged: set[int] = set()
        changed: list[msgspec.Raw] = []
        for row in await self._source.fetch(_TAKE, self._topic_id):
            if row["item"] is None:
                unchanged.add(row["id"])
            else:
                changed.append(msgspec.Raw(row["item"].encode()))
        await self._target.execute(
            "DELETE FROM queen.topic_items WHERE id = ANY ($1::bigint[])", sorted(self._copied - unchanged)
        )
        for start in range(0, len(changed), _ITEMS_PAGE):
            await keep(self._target, move_id, "topic_items", changed[start : start + _ITEMS_PAGE])
        self._on_copied(len(changed))

    async def _clear(self) -> None:
        """Remove what an earlier attempt has left on the other shard."""
        removed = ""
        while removed != "DELETE 0":
            removed = await self._target.execute(
                "DELETE FROM queen.topic_items WHERE id IN"
                " (SELECT id FROM queen.topic_items WHERE topic_id = $1 LIMIT 5000)",
                self._topic_id,
            )

    async def _pass(self) -> int:
        count = 0
        async with self._source.transaction():
            page: list[Any] = []
            async for row in self._source.cursor(_CHANGED, self._topic_id, prefetch=_ITEMS_PAGE):
                page.append(row)
                if len(page) == _ITEMS_PAGE:
                    count += await self._store(page)
                    page = []
            count += await self._store(page)
            versions, self._versions = self._versions, []
            await self._source.executemany(
                "INSERT INTO pg_temp.copied_items VALUES ($1, $2)"
                " ON CONFLICT (id) DO UPDATE SET version = excluded.version",
                versions,
            )
        return count

    async def _store(self, rows: Sequence[Any]) -> int:
        if not rows:
            return 0
        columns = list(rows[0].keys())
        columns.remove("version")
        again = [row["id"] for row in rows if row["id"] in self._copied]
        async with self._target.transaction():
            await self._target.execute("DELETE FROM queen.topic_items WHERE id = ANY ($1::bigint[])", again)
            await self._target.copy_records_to_table(
                "topic_items",
                schema_name="queen",
                columns=columns,
                records=[tuple(row[name] for name in columns) for row in rows],
            )
        self._copied.update(row["id"] for row in rows)
        self._versions += [(row["id"], row["version"]) for row in rows]
        self._on_copied(len(rows))
        return len(rows)

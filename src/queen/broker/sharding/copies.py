"""Copies rows from one shard to another.

Segments and items go to their tables, all other rows to `queen.move_rows` until the move is complete.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from queen.chunks import chunks
from queen.storage.database import Connection, Record
from queen.storage.statements import sql

Row: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Row], None]

_CHUNK_ROWS = 1000
_CHUNK_BYTES = 8 << 20


async def transfer(
    source: Connection,
    target: Connection,
    move_id: uuid.UUID,
    table: str,
    *arguments: Any,
    change: Change | None = None,
) -> int:
    """Save the rows that the statement `move_read_<table>` finds, in a transaction; `change` alters each."""
    rows: list[Any] = []
    size = count = 0
    async for record in source.cursor(sql(f"move_read_{table}"), *arguments, prefetch=200):
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
            await save_rows(target, move_id, table, rows)
            rows, size = [], 0
    if rows:
        await save_rows(target, move_id, table, rows)
    return count


async def save_rows(target: Connection, move_id: uuid.UUID, table: str, rows: Sequence[Any]) -> None:
    """Keep rows of a table until the move is complete."""
    await target.execute(sql("move_save_rows"), move_id, table, msgspec.json.encode(rows).decode())


async def group_ids(source: Connection, target: Connection, ids: Sequence[int]) -> dict[int, int]:
    """The id on the target of each group, which is created there if it is missing."""
    rows = await source.fetch(sql("move_group_names"), ids)
    names = [row["name"] for row in rows]
    await target.execute(sql("move_create_groups"), names)
    by_name = {row["name"]: row["id"] for row in await target.fetch(sql("move_group_ids"), names)}
    return {row["id"]: by_name[row["name"]] for row in rows}


OnCopied = Callable[[int], None]

_PAGE: Final = 500
_PARTITIONS: Final = 1000
_COLUMNS: Final = ("partition_id", "base_offset", "count", "created_at", "ids", "body")
_LITTLE: Final = 2000
_MOST_PASSES: Final = 20


class SegmentCopy:
    """Copies one queue's segments into their table; they are not read before their partitions are there."""

    def __init__(self, source: Connection, target: Connection, queue_id: int, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._queue_id = queue_id
        self._on_copied = on_copied
        self._upto: dict[int, int] = {}

    async def total(self) -> int:
        """How many messages there are to copy."""
        return int(await self._source.fetchval(sql("move_queue_messages"), self._queue_id))

    async def clear(self) -> None:
        """Remove what an earlier attempt left on the target, and forget rewrites from before this one."""
        partitions = [row["id"] for row in await self._partitions()]
        await remove_segments(self._target, partitions)
        await self._target.execute(sql("move_keep_partitions"), partitions)
        await self._source.execute(sql("move_forget_rewritten"), partitions)

    async def copy(self) -> None:
        """Copy all segments, and those added meanwhile, until a pass finds little."""
        for _ in range(_MOST_PASSES):
            if await self._copy_new(await self._partitions()) < _LITTLE:
                return

    async def finish(self, partitions: Sequence[Record]) -> None:
        """With all partitions locked: copy what is missing, and apply rewrites and removals since."""
        await self._copy_new(partitions)
        ids = [row["id"] for row in partitions]
        changed = await self._source.fetch(sql("move_rewritten_segments"), ids)
        await self._target.executemany(sql("move_rewrite_segment"), [tuple(row) for row in changed])
        firsts = await self._source.fetch(sql("move_first_offsets"), ids)
        await self._target.execute(
            sql("move_remove_segments_before"), [row["id"] for row in firsts], [row["first"] for row in firsts]
        )

    async def _partitions(self) -> list[Record]:
        return await self._source.fetch(sql("move_queue_partitions"), self._queue_id)

    async def _copy_new(self, partitions: Sequence[Record]) -> int:
        """Copy the segments after the last copied ones; returns how many messages they hold."""
        grown = [row for row in partitions if row["next_offset"] > self._upto.get(row["id"], 0)]
        copied = 0
        for some in chunks(grown, _PARTITIONS):
            copied += await self._copy_of([row["id"] for row in some])
        return copied

    async def _copy_of(self, ids: Sequence[int]) -> int:
        copied = 0
        froms = [self._upto.get(id, 0) for id in ids]
        while True:
            rows = await self._source.fetch(sql("move_segments"), ids, froms, _PAGE)
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
    for some in chunks(partitions, _PARTITIONS):
        while True:
            status = await connection.execute(sql("move_remove_segments"), some)
            if status == "DELETE 0":
                break


_ITEMS_PAGE: Final = 1000
_ITEMS_LITTLE: Final = 500
_ITEMS_MOST_PASSES: Final = 10


class ItemCopy:
    """Copies one topic's items into their table; they are not read before their topic is there."""

    def __init__(self, source: Connection, target: Connection, topic_id: int, on_copied: OnCopied) -> None:
        self._source = source
        self._target = target
        self._topic_id = topic_id
        self._on_copied = on_copied
        self._copied: set[int] = set()
        self._versions: list[tuple[int, int]] = []

    async def copy(self) -> None:
        """Copy ready and delayed items, and those added meanwhile, until a pass finds little."""
        await self._source.execute(sql("move_drop_copied_items"))
        await self._source.execute(sql("move_create_copied_items"))
        await self._clear()
        for _ in range(_ITEMS_MOST_PASSES):
            if await self._pass() < _ITEMS_LITTLE:
                return

    async def transfer(self, move_id: uuid.UUID) -> None:
        """With the topic locked: remove all items at the source, save the changed ones, drop stale copies."""
        unchanged: set[int] = set()
        changed: list[msgspec.Raw] = []
        for row in await self._source.fetch(sql("move_take_items"), self._topic_id):
            if row["item"] is None:
                unchanged.add(row["id"])
            else:
                changed.append(msgspec.Raw(row["item"].encode()))
        await self._target.execute(sql("move_remove_items"), sorted(self._copied - unchanged))
        for some in chunks(changed, _ITEMS_PAGE):
            await save_rows(self._target, move_id, "topic_items", some)
        self._on_copied(len(changed))

    async def _clear(self) -> None:
        """Remove what an earlier attempt left on the target."""
        removed = ""
        while removed != "DELETE 0":
            removed = await self._target.execute(sql("move_clear_items"), self._topic_id)

    async def _pass(self) -> int:
        count = 0
        async with self._source.transaction():
            page: list[Any] = []
            async for row in self._source.cursor(sql("move_changed_items"), self._topic_id, prefetch=_ITEMS_PAGE):
                page.append(row)
                if len(page) == _ITEMS_PAGE:
                    count += await self._store(page)
                    page = []
            count += await self._store(page)
            versions, self._versions = self._versions, []
            await self._source.executemany(sql("move_save_copied_item"), versions)
        return count

    async def _store(self, rows: Sequence[Any]) -> int:
        if not rows:
            return 0
        columns = list(rows[0].keys())
        columns.remove("version")
        again = [row["id"] for row in rows if row["id"] in self._copied]
        async with self._target.transaction():
            await self._target.execute(sql("move_remove_items"), again)
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

"""Rows on their way from one shard to another: read where they are, kept where they go until they are stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from queen.storage.database import Connection

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

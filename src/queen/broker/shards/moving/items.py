"""Copies the items of a topic to another shard while they are used; what changed meanwhile is brought over again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from queen.broker.shards.moving.rows import keep
from queen.broker.shards.moving.segments import OnCopied
from queen.storage.database import Connection

_PAGE: Final = 1000
_CALM: Final = 500
_MOST_PASSES: Final = 10
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
        for _ in range(_MOST_PASSES):
            if await self._pass() < _CALM:
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
        for start in range(0, len(changed), _PAGE):
            await keep(self._target, move_id, "topic_items", changed[start : start + _PAGE])
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
            async for row in self._source.cursor(_CHANGED, self._topic_id, prefetch=_PAGE):
                page.append(row)
                if len(page) == _PAGE:
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

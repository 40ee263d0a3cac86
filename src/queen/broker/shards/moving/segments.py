"""Copies the segments of a queue to another shard while it is used; what changed meanwhile is copied again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from queen.storage.database import Connection, Record

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

"""Seeking: what moving a consumer group would do, moving it, and moving it back.

Where a group was before a seek is kept for a day, so that the seek can be undone. A seek over many partitions can be
done in parts, each a transaction of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from queen.broker.change_log import log_group_change
from queen.broker.events import Event
from queen.broker.inspect.groups import Groups
from queen.broker.maintenance.jobs import SEEKS_KEPT_SECONDS
from queen.errors import BadRequest, Conflict, NotFound
from queen.log.catalog import Catalog
from queen.log.segments import TimeSearch, offsets_after
from queen.storage.database import Database, Fetcher, Record, retry_transaction
from queen.wire.api.resources.groups import KeptSeek, PartitionMove, SeekPreview
from queen.wire.ids import partition_uuid
from queen.wire.times import iso_millis

_MOST_KEPT: Final = 20
"""Seeks of a group on a queue whose positions are kept."""
_SAMPLED: Final = 2000
"""Partitions that an estimate samples."""
_COUNT_KEPT_SECONDS: Final = 5.0
"""How long an exact count is cached after an estimate was answered."""

BEGINNING: Final = 0
END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Earlier:
    """Where the group was before a seek."""

    seek: int


Place: TypeAlias = datetime | int
"""Where a seek goes: after the last message stored at or before a time, or to an offset, or the nearest there is."""


@dataclass(frozen=True, slots=True)
class PartitionSeek:
    """What a seek of one partition did: whether the group was known there, the time of its last message, and where the
    group is now."""

    updated: bool
    moved_to: datetime | None
    offset: int | None
    seek: int | None


@dataclass(frozen=True, slots=True)
class Moved:
    """What a seek, or a part of it, did: on how many partitions, under which number, and where the next part begins."""

    partitions: int
    seek: int | None
    cursor: str | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What the partitions hold on which the group was moved, and to which offset of each."""

    spans: Sequence[Record]
    targets: Sequence[int]
    seek: int | None


class Seeks:
    """Moves consumer groups, and has every worker know of it."""

    def __init__(
        self, database: Database, catalog: Catalog, groups: Groups, publish: Callable[[Sequence[Event]], None]
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._groups = groups
        self._publish = publish
        self._counting: dict[tuple[str, str, str | None, Place, int], asyncio.Task[SeekPreview]] = {}

    async def preview(
        self, group: str, queue: str, partition: str | None, place: Place, most: int, within: float | None = None
    ) -> SeekPreview:
        """What a seek would do. Nothing is changed, so it may do otherwise if the group goes on meanwhile.

        If counting takes longer than `within` seconds, an estimate; the count goes on for the next request.
        """
        if within is None:
            return await self._count(group, queue, partition, place, most)
        key = (group, queue, partition, place, most)
        task = self._counting.get(key)
        if task is None:
            task = self._counting[key] = asyncio.create_task(self._count(*key))
            task.add_done_callback(lambda _: self._forget(key))
        done, _ = await asyncio.wait([task], timeout=within)
        return task.result() if done else await self._estimate(group, queue, place)

    def _forget(self, key: tuple[str, str, str | None, Place, int]) -> None:
        task = self._counting[key]
        if task.cancelled() or task.exception() is not None:
            del self._counting[key]
        else:
            asyncio.get_running_loop().call_later(_COUNT_KEPT_SECONDS, self._counting.pop, key, None)

    async def _count(self, group: str, queue: str, partition: str | None, place: Place, most: int) -> SeekPreview:
        queue_id = await self._queue(queue)
        if partition is not None:
            await self._groups.partition(queue, partition)
        group_id = await self._groups.group(group)
        if group_id is None:
            return SeekPreview(group, queue, 0, 0, 0, 0, 0, True, [])
        starts = await self._groups.starts([group_id])
        offset, moment = (place, None) if isinstance(place, int) else (None, place)
        sums, *moves = await self._database.fetch(
            "preview_seek", group_id, queue_id, partition, queue, *starts[1:], offset, moment, most
        )
        return SeekPreview(
            group,
            queue,
            sums["redelivered"],
            sums["skipped"],
            sums["leases"],
            sums["changed"],
            sums["known"],
            True,
            [
                PartitionMove(
                    row["name"],
                    partition_uuid(row["id"]),
                    row["position"],
                    row["target"],
                    row["redelivered"],
                    row["skipped"],
                    row["leased"],
                )
                for row in moves
            ],
        )

    async def _estimate(self, group: str, queue: str, place: Place) -> SeekPreview:
        """The same from a sample of the partitions."""
        queue_id, group_id = await self._queue(queue), await self._groups.group(group)
        (count,) = await self._database.fetch("count_queue_partitions", queue_id, "")
        percent = min(100.0, 100.0 * _SAMPLED / max(1, count["found"]))
        sample = [row["id"] for row in await self._database.fetch("sample_partitions", queue_id, percent)]
        rows = await self._database.fetch("group_places", group_id, sample, queue)
        known = [row for row in rows if row["position"] is not None or row["since"] is not None]
        unmet = [row for row in known if row["position"] is None]
        starts = iter(await _after(self._database, unmet, [row["since"] for row in unmet]))
        positions = [next(starts) if row["position"] is None else row["position"] for row in known]
        targets = await _targets(self._database, known, place)
        moves = [target - at for at, target in zip(positions, targets, strict=True)]
        share = len(sample) / max(1, count["found"])

        def scaled(found: int) -> int:
            return round(found / share) if share else 0

        return SeekPreview(
            group,
            queue,
            scaled(sum(-move for move in moves if move < 0)),
            scaled(sum(move for move in moves if move > 0)),
            scaled(sum(row["leased"] for row in known)),
            scaled(sum(move != 0 for move in moves)),
            scaled(len(known)),
            False,
            [],
        )

    async def seek(self, group: str, queue: str, place: Place, limit: int | None = None, cursor: str = "") -> Moved:
        """Have a group go on at a place in every partition of a queue, or in so many from where the last part ended.

        Its leases end, its failed attempts stay counted.
        """
        return await self._part(group, queue, place, limit, cursor)

    async def seek_partition(self, group: str, queue: str, partition: str, place: Place) -> PartitionSeek:
        """The same for one partition."""
        await self._groups.partition(queue, partition)
        step = await retry_transaction(lambda: self._step(group, queue, partition, place, None, None, 0))
        if not step.spans:
            return PartitionSeek(False, None, None, None)
        return PartitionSeek(True, step.spans[0]["last_at"], step.targets[0], step.seek)

    async def undo(self, group: str, queue: str, seek: int, limit: int | None = None, cursor: str = "") -> Moved:
        """Put a group back where it was before a seek, on the partitions that it has moved; that is a seek as well.

        Raises `NotFound` if the positions are not kept any more, `Conflict` if the seek was undone before.
        """
        return await self._part(group, queue, Earlier(seek), limit, cursor)

    async def kept(self, group: str, queue: str) -> list[KeptSeek]:
        """The seeks of a group on a queue that can be undone, or were, the newest first."""
        queue_id, group_id = await self._queue(queue), await self._groups.group(group)
        if group_id is None:
            return []
        rows = await self._database.fetch("seek_list", group_id, queue_id, SEEKS_KEPT_SECONDS)
        return [
            KeptSeek(
                row["id"],
                iso_millis(row["sought_at"]) or "",
                row["target"],
                row["partition_name"],
                row["partitions"],
                row["undone_by"],
            )
            for row in rows
        ]

    async def _part(self, group: str, queue: str, place: Place | Earlier, limit: int | None, cursor: str) -> Moved:
        seek, after = _read_cursor(cursor)
        step = await retry_transaction(lambda: self._step(group, queue, None, place, limit, seek, after))
        more = limit is not None and len(step.spans) == limit
        next_part = f"{step.seek}:{step.spans[-1]['id']}" if more else None
        return Moved(len(step.spans), step.seek, next_part)

    async def _step(
        self,
        group: str,
        queue: str,
        partition: str | None,
        place: Place | Earlier,
        limit: int | None,
        seek: int | None,
        after: int,
    ) -> _Step:
        group_id = await self._groups.group(group)
        records = await self._database.fetch("queue_by_name", queue)
        if group_id is None or not records:
            if isinstance(place, Earlier):
                raise NotFound("Seek not found")
            return _Step([], [], None)
        queue_id = records[0]["id"]
        earlier = place.seek if isinstance(place, Earlier) else None
        if earlier is None and not after:
            await self._meet(group_id, queue_id, partition)
        async with self._database.transaction() as transaction:
            held = await transaction.fetch("hold_group_cursors", group_id, queue_id, partition, after, limit, earlier)
            # Read only now: what was consumed while the locks were waited for must not be delivered again.
            spans = await transaction.fetch("partition_spans", [row["partition_id"] for row in held])
            before = {row["partition_id"]: row for row in held}
            targets = (
                await _targets(transaction, spans, place)
                if not isinstance(place, Earlier)
                else [_within(span, before[span["id"]]["kept"]) for span in spans]
            )
            if seek is not None:
                if not await transaction.fetch("seek_by_id", group_id, queue_id, seek):
                    raise BadRequest("cursor is not one of a seek of this group on this queue")
            else:
                seek = (
                    await self._begin(transaction, group_id, queue_id, partition, place) if spans or earlier else None
                )
            moved = [
                (span["id"], before[span["id"]]["committed"])
                for span, target in zip(spans, targets, strict=True)
                if before[span["id"]]["committed"] != target
            ]
            if moved:
                await transaction.fetch("keep_positions", seek, [one[0] for one in moved], [one[1] for one in moved])
            await transaction.fetch("move_cursors", group_id, [span["id"] for span in spans], targets)
            changes = [await log_group_change(transaction, group)] if spans else []
        self._publish(changes)
        return _Step(spans, targets, seek)

    async def _begin(
        self, transaction: Fetcher, group_id: int, queue_id: int, partition: str | None, place: Place | Earlier
    ) -> int:
        """Note a seek; one that undoes another claims that."""
        (row,) = await transaction.fetch("begin_seek", group_id, queue_id, partition, _written(place))
        seek: int = row["id"]
        if isinstance(place, Earlier):
            if not await transaction.fetch("seek_by_id", group_id, queue_id, place.seek):
                raise NotFound(
                    f"Seek {place.seek} not found; positions are kept for {SEEKS_KEPT_SECONDS / 3600:.0f} hours"
                )
            if not await transaction.fetch("mark_undone", place.seek, seek):
                raise Conflict(f"Seek {place.seek} was undone before")
        await transaction.fetch("trim_seeks", group_id, queue_id, _MOST_KEPT)
        return seek

    async def _meet(self, group_id: int, queue_id: int, partition: str | None) -> None:
        """Make the cursors that a subscription promises; before the transaction, whose locks are taken in order."""
        unmet = await self._database.fetch("unmet_partitions", group_id, queue_id, partition)
        if unmet:
            await self._database.fetch("ensure_cursors", [row["id"] for row in unmet], [group_id] * len(unmet))

    async def _queue(self, name: str) -> int:
        records = await self._database.fetch("queue_by_name", name)
        if not records:
            raise NotFound("Queue not found")
        queue_id: int = records[0]["id"]
        return queue_id


async def _targets(fetcher: Fetcher, spans: Sequence[Record], place: Place) -> Sequence[int]:
    """Where a cursor stands at a place, for each partition."""
    if isinstance(place, int):
        return [_within(span, place) for span in spans]
    return await _after(fetcher, spans, [place] * len(spans))


async def _after(fetcher: Fetcher, spans: Sequence[Record], moments: Sequence[datetime]) -> list[int]:
    searches = zip(spans, moments, strict=True)
    return await offsets_after(
        fetcher,
        [TimeSearch(span["id"], span["floor_offset"], span["next_offset"], moment) for span, moment in searches],
    )


def _within(span: Record, offset: int) -> int:
    """The nearest offset that a partition has."""
    nearest: int = min(max(offset, span["floor_offset"]), span["next_offset"])
    return nearest


def _written(place: Place | Earlier) -> str:
    if isinstance(place, Earlier):
        return f"undo {place.seek}"
    if isinstance(place, datetime):
        return iso_millis(place) or ""
    return {BEGINNING: "beginning", END: "end"}.get(place, f"offset {place}")


def _read_cursor(cursor: str) -> tuple[int | None, int]:
    """The seek that is continued, and the partition after which."""
    if not cursor:
        return None, 0
    seek, _, after = cursor.partition(":")
    if not (seek.isascii() and seek.isdigit() and after.isascii() and after.isdigit() and len(cursor) <= 38):
        raise BadRequest("cursor must be that of the previous answer to this seek")
    return int(seek), int(after)

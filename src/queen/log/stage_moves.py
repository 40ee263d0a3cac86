"""Moving staged segments into their partitions, with little left to do under the partitions' locks.

Pushes to a partition wait for the transaction that holds its lock. So the segments of a large batch are copied before:
inside the same transaction, under keys that no reader uses. Under the locks they get their partitions and
offsets, which leaves the bodies where they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from queen.chunks import chunks
from queen.errors import Conflict
from queen.log.catalog import Partition, Queue
from queen.log.dedup import Dedup
from queen.log.dedup_filter import Hashes
from queen.storage.database import Fetcher, Record, TransactionConflict
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource

_COPIED_AHEAD_BYTES: Final = 4 << 20
"""Less is stored within milliseconds."""
_ROWS_AT_ONCE: Final = 1000


class StageLost(Conflict):
    """What was staged is not all there (any more): the batch has to be written again."""


class Overtaken(TransactionConflict):
    """Others pushed ids of a batch while it was prepared; the next attempt checks them under the locks."""


@dataclass(slots=True, eq=False)
class StagedRows:
    """What is staged for one partition, in order."""

    partition: Partition
    queue: Queue
    rows: list[Record] = field(default_factory=list)
    hashes: Hashes | None = None
    """Of ids that have to be new, in ascending order, if there are any."""

    @property
    def count(self) -> int:
        return sum(row["count"] for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether the segments can be stored as they are, should their ids be new."""
        return not self.queue.max_size and all(
            row["partition_id"] == self.partition.id and is_encrypted(row) == self.queue.encryption_enabled
            for row in self.rows
        )

    @property
    def named(self) -> bool:
        """Whether ids were given by the writer."""
        return any(row["named"] for row in self.rows)


class NewIds:
    """Checks ahead of the locks that ids are new, and under them that they still are."""

    def __init__(self, dedup: Dedup, fetcher: Fetcher, key: tuple[str, int]) -> None:
        self._dedup = dedup
        self._fetcher = fetcher
        self._key = key

    async def check(self, staged: Sequence[StagedRows], windows: Sequence[float]) -> list[StagedRows]:
        """Leave out the messages whose id is stored already or occurs twice."""
        await self._catch_up(staged, windows)
        new = []
        for one, window in zip(staged, windows, strict=True):
            rows = await self._fetcher.fetch(
                "stage_hashes", *self._key, [row["attempt"] for row in one.rows], [row["seq"] for row in one.rows]
            )
            check_found(one.rows, rows)
            hashes: Hashes = np.unique(np.frombuffer(b"".join([row["hashes"] for row in rows]), dtype="<u8"))
            if len(hashes) == one.count and not await self._dedup.holds_any(
                self._fetcher, one.partition, hashes, window
            ):
                one.hashes = hashes
                new.append(one)
        return new

    async def _catch_up(self, staged: Sequence[StagedRows], windows: Sequence[float]) -> None:
        partitions = [one.partition for one in staged]
        by_queue: dict[int, float] = {}
        for one, window in zip(staged, windows, strict=True):
            by_queue[one.queue.id] = max(window, by_queue.get(one.queue.id, 0.0))
        await self._dedup.load_windows(self._fetcher, partitions, by_queue)
        ends = await self._fetcher.fetch("stage_ends", [partition.id for partition in partitions])
        await self._dedup.catch_up(self._fetcher, partitions, {row["id"]: row["next_offset"] for row in ends})

    async def check_again(self, staged: Sequence[StagedRows], ends: dict[int, int]) -> None:
        """Under the locks. Raises `Overtaken` when an id was pushed since."""
        behind = [one for one in staged if one.hashes is not None and one.partition.known_to != ends[one.partition.id]]
        if not behind:
            return
        if any(one.partition.known_to is None for one in behind):
            raise Overtaken("the remembered ids of a partition were dropped while it was published to")
        rows = await self._fetcher.fetch(
            "segment_ids_from", [one.partition.id for one in behind], [one.partition.known_to for one in behind]
        )
        pushed: dict[int, list[bytes]] = {}
        for row in rows:
            pushed.setdefault(row["partition_id"], []).append(row["ids"][16:])
        for one in behind:
            theirs = np.frombuffer(b"".join(pushed.get(one.partition.id, ())), dtype="<u8")
            assert one.hashes is not None
            places = np.searchsorted(one.hashes, theirs)
            inside = places < len(one.hashes)
            if (one.hashes[places[inside]] == theirs[inside]).any():
                raise Overtaken("ids of the batch were pushed while it was prepared")


class SegmentMove:
    """Moves the segments of one batch."""

    def __init__(self, key: tuple[str, int], staged: Sequence[StagedRows], ids: IdSource) -> None:
        self._key = key
        self._staged = staged
        self._ids = ids
        rows = [row for one in staged for row in one.rows]
        self.ahead = bool(rows) and sum(row["nbytes"] for row in rows) >= _COPIED_AHEAD_BYTES
        # No other transaction can wait for these keys: only this one has drawn them.
        first = -1 - secrets.randbits(40) * (1 << 22)
        self._keys = range(first, first - len(rows), -1)

    async def copy(self, fetcher: Fetcher) -> None:
        """Before the locks: copy a large batch."""
        if not self.ahead:
            return
        moves: list[tuple[Any, ...]] = []
        for one in self._staged:
            for row in one.rows:
                block = self._ids.block(row["count"]).pack()
                moves.append((row["attempt"], row["seq"], -one.partition.id, self._keys[len(moves)], block))
        for some in chunks(moves, _ROWS_AT_ONCE):
            columns = [list(column) for column in zip(*some, strict=True)]
            check_found(some, await fetcher.fetch("stage_copy", *self._key, *columns))

    async def place(self, fetcher: Fetcher, ends: dict[int, int]) -> None:
        """Under the locks: give out offsets from where the partitions end."""
        if not self._staged:
            return
        advanced = await fetcher.fetch(
            "stage_advance", [one.partition.id for one in self._staged], [one.count for one in self._staged]
        )
        times = {row["id"]: row["last_at"] for row in advanced}
        places = []
        for one in self._staged:
            id = one.partition.id
            base = ends[id]
            for row in one.rows:
                places.append((row, id, base, times[id]))
                base += row["count"]
        if self.ahead:
            placed = [(-id, key, id, base, at) for key, (_, id, base, at) in zip(self._keys, places, strict=True)]
            columns = [list(column) for column in zip(*placed, strict=True)]
            check_found(placed, await fetcher.fetch("stage_place", *columns))
            return
        for some in chunks(places, _ROWS_AT_ONCE):
            moves = [
                (row["attempt"], row["seq"], id, base, at, self._ids.block(row["count"]).pack())
                for row, id, base, at in some
            ]
            columns = [list(column) for column in zip(*moves, strict=True)]
            check_found(moves, await fetcher.fetch("stage_move", *self._key, *columns))


def check_found(wanted: Sequence[object], found: Sequence[object]) -> None:
    if len(found) != len(wanted):
        raise StageLost("staged messages were removed while they were published; nothing was, write the batch again")


def is_encrypted(row: Record) -> bool:
    return Envelope.is_encrypted(bytes((row["kind"],)))

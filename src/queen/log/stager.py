"""Staging: messages are packed into segments as they come, and put where `Stages` finds them."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from queen.errors import Overloaded
from queen.log.catalog import Partition, Queue
from queen.log.slices import Chunk, PushSlice, Target
from queen.log.stages import TOPIC_ITEMS, Attempt, Stages, StageSender
from queen.wire.push import PushItem

SEGMENT_MESSAGES: Final = 1024
_SEGMENT_BYTES: Final = 512 << 10
"""Enough for 1024 messages of usual size: the ids of that many are stored beside the row, so that placing a segment
under its partition's lock does not write them again."""
_MOST_GATHERED: Final = 32 << 20
_MOST_PACKED: Final = 8 << 20
_MOST_ATTEMPTS: Final = 5

_Row: TypeAlias = tuple[int, int, str, str, int, bool, bytes, bytes]
"""Number, partition id, queue, partition, messages, whether ids were given, hashes, body."""


@dataclass(slots=True)
class _Gathered:
    """Messages for one partition that are not packed yet."""

    items: list[PushItem] = field(default_factory=list)
    nbytes: int = 0
    named: bool = False


class Stager:
    """Stages what one attempt of one task writes; messages keep their order within their partition."""

    def __init__(
        self,
        stages: Stages,
        run: str,
        batch: int,
        attempt: uuid.UUID,
        first: int = 0,
        subject: str | None = None,
    ) -> None:
        """`first` is the number of its first row, for an attempt that comes in several pieces."""
        self._subject = subject
        self._stages = stages
        self._key = (run, batch, attempt)
        self._next = first
        self._staged = 0
        self._gathered: dict[Target, _Gathered] = {}
        self._gathered_bytes = 0
        self._rows: list[_Row] = []
        self._row_bytes = 0

    async def add(self, items: Sequence[PushItem]) -> None:
        """Stage messages, sooner or later; those without a transaction id get one."""
        await self._stages.catalog.ensure_partitions({(item.queue, item.partition) for item in items})
        fresh = self._stages.ids.block(len(items))
        prefix, low = fresh.prefix.decode(), fresh.low
        for index, item in enumerate(items):
            target = item.queue, item.partition
            gathered = self._gathered.get(target)
            if gathered is None:
                gathered = self._gathered[target] = _Gathered()
            if item.transaction_id:
                gathered.named = True
            else:
                item.transaction_id = f"{prefix}{low + index:012x}"
            gathered.items.append(item)
            nbytes = memoryview(item.payload).nbytes + 100
            gathered.nbytes += nbytes
            self._gathered_bytes += nbytes
            if len(gathered.items) == SEGMENT_MESSAGES or gathered.nbytes >= _SEGMENT_BYTES:
                await self._pack(target, self._gathered.pop(target))
        if self._gathered_bytes >= _MOST_GATHERED:
            await self._pack_all()
        if self._row_bytes >= _MOST_PACKED:
            await self._store()

    async def add_topic_items(self, array: bytes, count: int) -> None:
        """Stage items of topics: a JSON array of items that are validated already."""
        self._add_row(TOPIC_ITEMS, ("", ""), count, False, b"", self._stages.envelope.seal(array))
        if self._row_bytes >= _MOST_PACKED:
            await self._store()

    async def finish(self) -> Attempt:
        """Stage what is left; returns what the attempt came to."""
        await self._pack_all()
        await self._store()
        return Attempt(self._key[2], self._staged)

    async def _pack_all(self) -> None:
        for target, gathered in self._gathered.items():
            await self._pack(target, gathered)
        self._gathered = {}

    async def _pack(self, target: Target, gathered: _Gathered) -> None:
        queue, partition = await self._place(target)
        self._gathered_bytes -= gathered.nbytes
        part = PushSlice(StageSender(self._subject), target, gathered.items, None)
        for chunk in self._chunks(part, queue, partition):
            hashes = array("Q", chunk.hashes).tobytes()
            self._add_row(partition.id, target, chunk.count, gathered.named, hashes, chunk.sealed)

    async def _place(self, target: Target) -> tuple[Queue, Partition]:
        catalog = self._stages.catalog
        for _ in range(_MOST_ATTEMPTS):
            queue = catalog.cached_queue(target[0])
            partition = catalog.cached_partition_in(queue, target[1]) if queue is not None else None
            if queue is not None and partition is not None:
                return queue, partition
            await catalog.ensure_partitions([target])
        raise Overloaded(f"queue {target[0]!r} was changed again and again while it was written to; try later")

    def _chunks(self, part: PushSlice, queue: Queue, partition: Partition) -> list[Chunk]:
        preparer = self._stages.preparer
        preparer.prepare(part, partition, queue)
        if part.chunks is not None:
            return part.chunks
        subjects = [self._subject] * len(part.items)
        return preparer.pack(
            part.items, part.lengths, part.hashes, part.transactions, subjects, queue.encryption_enabled
        )

    def _add_row(self, partition_id: int, target: Target, count: int, named: bool, hashes: bytes, body: bytes) -> None:
        self._rows.append((self._next, partition_id, *target, count, named, hashes, body))
        self._next += 1
        self._row_bytes += len(body)
        self._staged += count

    async def _store(self) -> None:
        if self._rows:
            await self._stages.stage(*self._key, self._rows)
        self._rows, self._row_bytes = [], 0

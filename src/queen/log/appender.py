"""Appending to partitions: in one statement when no other worker does, else under the partitions' locks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeAlias

from queen.log.append_batch import AppendBatch, BatchAssembler
from queen.log.catalog import Partition
from queen.log.dedup import Dedup
from queen.log.segments import SegmentCache
from queen.log.slices import PushSlice
from queen.storage.database import Fetcher, Link

Spans: TypeAlias = Sequence[tuple[Partition, int, int]]
"""What each partition got: from which offset on, and how many messages."""

_SHARED_SECONDS = 1.0


class Appender:
    """Stores batches, all or nothing."""

    def __init__(
        self,
        assembler: BatchAssembler,
        dedup: Dedup,
        cache: SegmentCache,
        *,
        announce: Callable[[Spans, list[int]], Callable[[], None]],
        on_stored: Callable[[Spans], None],
        on_recognised: Callable[[Sequence[tuple[Partition, int]]], None] = lambda counts: None,
    ) -> None:
        """`announce` gets what will be stored, with the hashes of all ids in order, and returns what notifies the other
        workers once it is; `on_stored` is called for this one. `on_recognised`: how many messages of each partition an
        attempt of unknown outcome had stored."""
        self._assembler = assembler
        self._dedup = dedup
        self._cache = cache
        self._announce = announce
        self._on_stored = on_stored
        self._on_recognised = on_recognised
        self._shared_until: dict[int, float] = {}

    def check_ahead(self, slice_: PushSlice) -> None:
        """Check the ids of a slice that has just been prepared, if it has only a few."""
        self._dedup.filter.check_ahead(slice_.hashes)

    def pack_ahead(self, batches: Sequence[AppendBatch]) -> None:
        """Do for batches that will be appended soon what does not depend on what others append before."""
        self._assembler.pack_ahead(batches)

    async def append(
        self, link: Link, batches: Sequence[AppendBatch], meanwhile: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Store the batches in one transaction. None: a partition does not exist (any more), nothing was stored.

        Returns what is left to do, to be called before anything else is awaited: the other workers know already what
        was stored, and the next worker need not wait for it. `meanwhile` is called, if there is time, while
        PostgreSQL is at work on the batches as they are; and again should they have changed since.
        """
        await self.load_windows(link, batches)
        if not self._are_shared(batches):
            await self._assembler.assemble(link, batches)
            announcement = _Announcement(batches, self._announce)

            def prepare_meanwhile() -> None:
                announcement.prepare()
                meanwhile()

            times = await _store_while(link, batches, prepare_meanwhile)
            if times is not None:
                return self._announce_stored(announcement, times)
        async with link.transaction():
            times = await self.append_locked(link, batches)
        # Only after the commit: ids of an append that may be rolled back must not reach the filter.
        if times is None:
            return None
        meanwhile()
        return self._announce_stored(_Announcement(batches, self._announce), times)

    async def append_in(self, fetcher: Fetcher, batches: Sequence[AppendBatch]) -> list[datetime] | None:
        """Inside a transaction: append at once where no other worker does, else as `append_locked`; then `settle`."""
        await self.load_windows(fetcher, batches)
        if not self._are_shared(batches):
            await self._assembler.assemble(fetcher, batches)
            times = await _store(fetcher, batches)
            if times is not None:
                return times
        return await self.append_locked(fetcher, batches)

    async def load_windows(self, fetcher: Fetcher, batches: Sequence[AppendBatch]) -> None:
        """Load the ids of partitions that this worker has not pushed to before."""
        now = time.time()
        for batch in batches:
            since = batch.partition.known_since
            if since and since > now - self._assembler.window(batch):
                # The window has grown, or these messages were accepted before its ids were loaded.
                batch.partition.known_to = None
        unknown = [batch.partition for batch in batches if batch.partition.known_to is None]
        if unknown:
            windows: dict[int, float] = {}
            for batch in batches:
                windows[batch.queue.id] = max(windows.get(batch.queue.id, 0.0), self._assembler.window(batch))
            await self._dedup.load_windows(fetcher, unknown, windows)

    async def append_locked(self, fetcher: Fetcher, batches: Sequence[AppendBatch]) -> list[datetime] | None:
        """Inside a transaction: lock, read the ids that others added, then append. None: a partition does not exist."""
        ids = [batch.partition.id for batch in batches]
        partitions = [batch.partition for batch in batches]
        for queue_id in sorted({batch.queue.id for batch in batches if batch.queue.max_size}):
            await fetcher.fetch("lock_queue", queue_id)
        ends = {row["id"]: row["next_offset"] for row in await fetcher.fetch("lock_partitions", ids)}
        if len(ends) < len(ids):
            return None
        self._note_sharing(partitions, ends)
        # What this worker knew may have been declared void while it waited for the locks.
        await self.load_windows(fetcher, batches)
        await self._dedup.catch_up(fetcher, partitions, ends)
        await self._allot_room(fetcher, batches)
        await self._assembler.assemble(fetcher, batches)
        return await _store(fetcher, batches)

    def settle(self, batches: Sequence[AppendBatch], times: Sequence[datetime]) -> None:
        """What was appended inside a transaction is committed: make it known."""
        self._announce_stored(_Announcement(batches, self._announce), times)()

    def _announce_stored(self, announcement: _Announcement, times: Sequence[datetime]) -> Callable[[], None]:
        """Notify the other workers; returns the function that updates this one."""
        announcement.prepare()
        announcement.send()
        return partial(self._learn, announcement, times)

    def _learn(self, announcement: _Announcement, times: Sequence[datetime]) -> None:
        """Learn the ids, cache the segments, and wake waiting pops."""
        if announcement.recognised:
            self._on_recognised(announcement.recognised)
        if not announcement.stored:
            return
        self._dedup.learn(announcement.hashes, announcement.spans)
        for batch, created_at in zip(announcement.stored, times, strict=True):
            self._cache.put(batch.partition.id, batch.segments(created_at))
        self._on_stored(announcement.spans)

    def _are_shared(self, batches: Sequence[AppendBatch]) -> bool:
        """Whether other workers append to them, or count what they hold: then they are locked first."""
        now = time.monotonic()
        return any(batch.queue.max_size or self._shared_until.get(batch.partition.id, 0) > now for batch in batches)

    def _note_sharing(self, partitions: Sequence[Partition], ends: dict[int, int]) -> None:
        """Go straight to locking for a while where another worker appends too."""
        now = time.monotonic()
        for partition in partitions:
            if partition.known_to != ends[partition.id]:
                self._shared_until[partition.id] = now + _SHARED_SECONDS
        if len(self._shared_until) > 10_000:
            self._shared_until = {id: until for id, until in self._shared_until.items() if until > now}

    async def _allot_room(self, fetcher: Fetcher, batches: Sequence[AppendBatch]) -> None:
        """How many more messages each queue with a size limit takes, first come first served."""
        rooms: dict[int, int] = {}
        for batch in batches:
            queue = batch.queue
            if not queue.max_size:
                continue
            if queue.id not in rooms:
                (row,) = await fetcher.fetch("queue_pending", queue.id)
                rooms[queue.id] = max(0, queue.max_size - row["pending"])
            batch.room = rooms[queue.id]
            rooms[queue.id] -= min(batch.room, batch.size)


class _Announcement:
    """What the other workers are notified of when batches are stored."""

    __slots__ = ("_announce", "_batches", "hashes", "recognised", "send", "spans", "stored")

    def __init__(
        self, batches: Sequence[AppendBatch], announce: Callable[[Spans, list[int]], Callable[[], None]]
    ) -> None:
        self._batches: Sequence[AppendBatch] | None = batches
        self._announce = announce

    def prepare(self) -> None:
        """Once the batches are as they are going to be stored."""
        if self._batches is None:
            return
        self.stored = [batch for batch in self._batches if batch.chunks]
        self.recognised = [(batch.partition, batch.stored_before) for batch in self._batches if batch.stored_before]
        self.hashes = [value for batch in self.stored for chunk in batch.chunks for value in chunk.hashes]
        self.spans = [(batch.partition, batch.base, batch.count) for batch in self.stored]
        self.send = self._announce(self.spans, self.hashes)
        self._batches = None


async def _store_while(
    fetcher: Fetcher, batches: Sequence[AppendBatch], meanwhile: Callable[[], None]
) -> list[datetime] | None:
    """The same as `_store`; the statement is on its way when the loop comes to `meanwhile`."""
    soon = asyncio.get_running_loop().call_soon(meanwhile)
    try:
        return await _store(fetcher, batches)
    finally:
        soon.cancel()


async def _store(fetcher: Fetcher, batches: Sequence[AppendBatch]) -> list[datetime] | None:
    """Run the statement; when each batch that has messages was stored. None: a partition has moved, nothing was."""
    full = [batch for batch in batches if batch.chunks]
    if not full:
        return []
    if len(full) == 1 and len(full[0].chunks) == 1:
        return await _store_one(fetcher, full[0])
    return await _store_many(fetcher, full)


async def _store_one(fetcher: Fetcher, batch: AppendBatch) -> list[datetime] | None:
    chunk = batch.chunks[0]
    rows = await fetcher.fetch("push_one", batch.partition.id, batch.base, chunk.count, chunk.ids, chunk.sealed)
    return [rows[0]["created_at"]] if rows else None


async def _store_many(fetcher: Fetcher, batches: Sequence[AppendBatch]) -> list[datetime] | None:
    slots, bases, counts, ids, bodies = [], [], [], [], []
    for slot, batch in enumerate(batches, 1):
        base = batch.base
        for chunk in batch.chunks:
            slots.append(slot)
            bases.append(base)
            counts.append(chunk.count)
            ids.append(chunk.ids)
            bodies.append(chunk.sealed)
            base += chunk.count
    (row,) = await fetcher.fetch(
        "push",
        [batch.partition.id for batch in batches],
        [batch.base for batch in batches],
        [batch.count for batch in batches],
        slots,
        bases,
        counts,
        ids,
        bodies,
    )
    times: list[datetime] = row["at"]
    return times if row["open"] else None

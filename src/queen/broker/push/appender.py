"""Appending lots to their partitions: at once when nobody else does, else under the partitions' locks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeAlias

from queen.broker.catalog import Partition
from queen.broker.push.append_batch import AppendBatch, BatchAssembler
from queen.broker.push.dedup import Dedup
from queen.broker.push.slices import PushSlice
from queen.broker.segments import SegmentCache
from queen.storage.database import Fetcher, Link

Spans: TypeAlias = Sequence[tuple[Partition, int, int]]
"""What each partition got: from which offset on, and how many messages."""

_SHARED_SECONDS = 1.0


class Appender:
    """Stores lots, all or nothing."""

    def __init__(
        self,
        assembler: BatchAssembler,
        dedup: Dedup,
        cache: SegmentCache,
        *,
        announce: Callable[[Spans, list[int]], Callable[[], None]],
        on_stored: Callable[[Spans], None],
    ) -> None:
        """`announce` gets what will be stored, with the hashes of all ids in order, and gives what tells the other
        workers when it is; `on_stored` is told for this one."""
        self._assembler = assembler
        self._dedup = dedup
        self._cache = cache
        self._announce = announce
        self._on_stored = on_stored
        self._shared_until: dict[int, float] = {}

    def foresee(self, part: PushSlice) -> None:
        """A part has just been made ready: see whether its ids were stored before, if it has only a few."""
        self._dedup.filter.foresee(part.hashes)

    def pack_ahead(self, lots: Sequence[AppendBatch]) -> None:
        """Do for lots that will be appended soon what does not depend on what others append before."""
        self._assembler.pack_ahead(lots)

    async def append(
        self, link: Link, lots: Sequence[AppendBatch], meanwhile: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Store the lots in one transaction. None: a partition does not exist (any more), nothing was stored.

        Returns what is left to do, to be called before anything else is awaited: the other workers know already what
        was stored, and whose turn it is next need not wait for it. `meanwhile` is called, if there is time, while
        PostgreSQL is at work on the lots as they are; and again should they have changed since.
        """
        await self.meet(link, lots)
        now = time.monotonic()
        if not any(lot.queue.max_size or self._shared_until.get(lot.partition.id, 0) > now for lot in lots):
            await self._assembler.assemble(link, lots)
            news = _News(lots, self._announce)

            def use_the_time() -> None:
                news.prepare()
                meanwhile()

            times = await _store_while(link, lots, use_the_time)
            if times is not None:
                return self._tell(news, times)
        async with link.transaction():
            times = await self.append_locked(link, lots)
        # Only now is it committed: nothing may be learnt from an append that could still be rolled back.
        if times is None:
            return None
        meanwhile()
        return self._tell(_News(lots, self._announce), times)

    async def meet(self, fetcher: Fetcher, lots: Sequence[AppendBatch]) -> None:
        """Learn the ids of partitions that this worker has not pushed to before."""
        for lot in lots:
            if lot.waited and lot.partition.known_since > time.time() - self._assembler.window(lot):
                # It was met after these messages were accepted: what they may duplicate goes further back.
                lot.partition.known_to = None
        strangers = [lot.partition for lot in lots if lot.partition.known_to is None]
        if strangers:
            windows: dict[int, float] = {}
            for lot in lots:
                windows[lot.queue.id] = max(windows.get(lot.queue.id, 0.0), self._assembler.window(lot))
            await self._dedup.meet(fetcher, strangers, windows)

    async def append_locked(self, fetcher: Fetcher, lots: Sequence[AppendBatch]) -> list[datetime] | None:
        """Inside a transaction: lock, learn what others added, then append. None: a partition does not exist."""
        ids = [lot.partition.id for lot in lots]
        partitions = [lot.partition for lot in lots]
        for queue_id in sorted({lot.queue.id for lot in lots if lot.queue.max_size}):
            await fetcher.fetch("lock_queue", queue_id)
        ends = {row["id"]: row["next_offset"] for row in await fetcher.fetch("lock_partitions", ids)}
        if len(ends) < len(ids):
            return None
        self._note_sharing(partitions, ends)
        # What this worker knew may have been declared void while it waited for the locks.
        await self.meet(fetcher, lots)
        await self._dedup.catch_up(fetcher, partitions, ends)
        await self._allot_room(fetcher, lots)
        await self._assembler.assemble(fetcher, lots)
        return await _store(fetcher, lots)

    def settle(self, lots: Sequence[AppendBatch], times: Sequence[datetime]) -> None:
        """What was appended inside a transaction is committed: let everybody know."""
        self._tell(_News(lots, self._announce), times)()

    def _tell(self, news: _News, times: Sequence[datetime]) -> Callable[[], None]:
        """Tell the others what was stored; returns what takes note of it here."""
        news.prepare()
        news.tell()
        return partial(self._note, news, times)

    def _note(self, news: _News, times: Sequence[datetime]) -> None:
        """What was stored is known now, likely to be popped soon, and somebody may be waiting for it."""
        if not news.stored:
            return
        self._dedup.learn(news.hashes, news.spans)
        for lot, created_at in zip(news.stored, times, strict=True):
            self._cache.put(lot.partition.id, lot.segments(created_at))
        self._on_stored(news.spans)

    def _note_sharing(self, partitions: Sequence[Partition], ends: dict[int, int]) -> None:
        """Go straight to locking for a while where somebody else appends too."""
        now = time.monotonic()
        for partition in partitions:
            if partition.known_to != ends[partition.id]:
                self._shared_until[partition.id] = now + _SHARED_SECONDS
        if len(self._shared_until) > 10_000:
            self._shared_until = {id: until for id, until in self._shared_until.items() if until > now}

    async def _allot_room(self, fetcher: Fetcher, lots: Sequence[AppendBatch]) -> None:
        """How many more messages each queue with a size limit takes, first come first served."""
        rooms: dict[int, int] = {}
        for lot in lots:
            queue = lot.queue
            if not queue.max_size:
                continue
            if queue.id not in rooms:
                (row,) = await fetcher.fetch("queue_pending", queue.id)
                rooms[queue.id] = max(0, queue.max_size - row["pending"])
            lot.room = rooms[queue.id]
            rooms[queue.id] -= min(lot.room, lot.size)


class _News:
    """What is told when lots are stored."""

    __slots__ = ("_announce", "_lots", "hashes", "spans", "stored", "tell")

    def __init__(self, lots: Sequence[AppendBatch], announce: Callable[[Spans, list[int]], Callable[[], None]]) -> None:
        self._lots: Sequence[AppendBatch] | None = lots
        self._announce = announce

    def prepare(self) -> None:
        """Once the lots are as they are going to be stored."""
        if self._lots is None:
            return
        self.stored = [lot for lot in self._lots if lot.chunks]
        self.hashes = [value for lot in self.stored for chunk in lot.chunks for value in chunk.hashes]
        self.spans = [(lot.partition, lot.base, lot.count) for lot in self.stored]
        self.tell = self._announce(self.spans, self.hashes)
        self._lots = None


async def _store_while(
    fetcher: Fetcher, lots: Sequence[AppendBatch], meanwhile: Callable[[], None]
) -> list[datetime] | None:
    """The same as `_store`; the statement is on its way when the loop comes to `meanwhile`."""
    soon = asyncio.get_running_loop().call_soon(meanwhile)
    try:
        return await _store(fetcher, lots)
    finally:
        soon.cancel()


async def _store(fetcher: Fetcher, lots: Sequence[AppendBatch]) -> list[datetime] | None:
    """Run the statement; when each lot that has messages was stored. None: a partition has moved, nothing was."""
    full = [lot for lot in lots if lot.chunks]
    if not full:
        return []
    if len(full) == 1 and len(full[0].chunks) == 1:
        return await _store_one(fetcher, full[0])
    return await _store_many(fetcher, full)


async def _store_one(fetcher: Fetcher, lot: AppendBatch) -> list[datetime] | None:
    chunk = lot.chunks[0]
    rows = await fetcher.fetch("push_one", lot.partition.id, lot.base, chunk.count, chunk.ids, chunk.sealed)
    return [rows[0]["created_at"]] if rows else None


async def _store_many(fetcher: Fetcher, lots: Sequence[AppendBatch]) -> list[datetime] | None:
    slots, bases, counts, ids, bodies = [], [], [], [], []
    for slot, lot in enumerate(lots, 1):
        base = lot.base
        for chunk in lot.chunks:
            slots.append(slot)
            bases.append(base)
            counts.append(chunk.count)
            ids.append(chunk.ids)
            bodies.append(chunk.sealed)
            base += chunk.count
    (row,) = await fetcher.fetch(
        "push",
        [lot.partition.id for lot in lots],
        [lot.base for lot in lots],
        [lot.count for lot in lots],
        slots,
        bases,
        counts,
        ids,
        bodies,
    )
    times: list[datetime] = row["at"]
    return times if row["open"] else None

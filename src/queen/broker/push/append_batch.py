"""Lots: what a batch of pushes has for one partition, checked for duplicates and put into segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto

from queen.broker.catalog import Partition, Queue
from queen.broker.push.dedup import Dedup, Earlier
from queen.broker.push.slices import Chunk, PushSlice, SlicePreparer
from queen.storage.database import Fetcher
from queen.wire.push import PushItem
from queen.wire.segment import Segment

_UNKNOWN_SECONDS = 60.0
"""Longer than a push is tried again when PostgreSQL goes away."""


class ItemOutcome(Enum):
    """What becomes of an item."""

    STORED = auto()
    STORED_BEFORE = auto()
    """By an attempt of this same request whose outcome was unknown."""
    DUPLICATE = auto()
    REFUSED = auto()
    """The queue is full."""


@dataclass(slots=True)
class AppendBatch:
    """Everything a batch has for one partition. `fates` is None when every item is stored."""

    partition: Partition
    queue: Queue
    parts: list[PushSlice] = field(default_factory=list)
    size: int = 0
    """Items that were sent."""
    base: int = 0
    room: int | None = None
    waited: float = 0.0
    """Seconds that the oldest message of its batch has been in the spool."""
    chunks: list[Chunk] = field(default_factory=list)
    count: int = 0
    """Messages that are to be stored."""
    fates: list[ItemOutcome] | None = None
    winners: dict[str, str] = field(default_factory=dict)
    """Ids of the messages that items which are not stored duplicate, by transaction id."""

    def add(self, part: PushSlice) -> None:
        self.parts.append(part)
        self.size += part.count

    def fill(self, chunks: list[Chunk], fates: list[ItemOutcome] | None) -> None:
        """Settle what is stored, and what becomes of each item."""
        self.chunks = chunks
        self.count = sum([chunk.count for chunk in chunks])
        self.fates = fates

    def items(self) -> Iterator[PushItem]:
        for part in self.parts:
            yield from part.items

    def segments(self, created_at: datetime) -> list[Segment]:
        """The segments as readers will see them."""
        made, base = [], self.base
        for chunk in self.chunks:
            made.append(Segment(base, created_at, chunk.block, chunk.plain))
            base += chunk.count
        return made


class BatchAssembler:
    """Decides which items of lots are new, and puts those into segments."""

    def __init__(self, dedup: Dedup, preparer: SlicePreparer, *, dedup_window: float) -> None:
        self._dedup = dedup
        self._preparer = preparer
        self._dedup_window = float(dedup_window)

    def window(self, lot: AppendBatch) -> float:
        """Seconds inside which a transaction id is accepted once, counted from when the messages were accepted."""
        own = lot.queue.dedup_window_seconds
        window = self._dedup_window if own is None else float(own)
        return window + lot.waited if window > 0 else window

    async def assemble(self, fetcher: Fetcher, lots: Sequence[AppendBatch]) -> None:
        """Fill `chunks` and `fates` of each lot, for the partitions as this worker knows them."""
        for lot in lots:
            # Fixed before anything is awaited: what is learnt meanwhile was not checked, so it must stop the store.
            lot.base = lot.partition.known_to or 0
        hashes = [value for lot in lots for part in lot.parts for value in part.hashes]
        maybe = self._dedup.filter.suspects(hashes)
        if not maybe and self._are_plainly_new(lots, hashes):
            for lot in lots:
                self._take_all(lot)
            return
        for lot, suspects in zip(lots, self._suspects(lots, hashes, maybe), strict=True):
            earlier: dict[str, Earlier] = {}
            if suspects:
                earlier = await self._dedup.find(fetcher, lot.partition, suspects, self.window(lot))
            tried = {block for part in lot.parts for block in part.sender.blocks}
            reach = lot.waited + _UNKNOWN_SECONDS
            if tried and self.window(lot) < reach:
                # The window does not tell what an attempt of unknown outcome stored, but it must not be stored twice.
                ids = {item.transaction_id for item in lot.items()}
                earlier |= await self._dedup.find_in(fetcher, lot.partition, tried, ids, reach)
            repeated = suspects is not None and self._repeats(lot)
            if earlier or repeated or (lot.room is not None and lot.room < lot.size):
                self._take_new(lot, earlier, deduplicate=suspects is not None)
            else:
                self._take_all(lot)

    def _are_plainly_new(self, lots: Sequence[AppendBatch], hashes: list[int]) -> bool:
        """The common case, told for all lots at once. The filter has seen none of the hashes."""
        if len(set(hashes)) < len(hashes) or any(lot.room is not None for lot in lots):
            return False
        if any(part.sender.blocks for lot in lots for part in lot.parts):
            return False
        windows = [self.window(lot) for lot in {lot.queue.id: lot for lot in lots}.values()]
        return min(windows) > 0 and self._dedup.vouches_for_all(max(windows))

    def _suspects(
        self, lots: Sequence[AppendBatch], hashes: list[int], maybe: list[int]
    ) -> list[dict[int, str] | None]:
        """For each lot the ids, by hash, that may be stored already; None where duplicates are allowed."""
        result: list[dict[int, str] | None] = []
        start = 0
        for lot in lots:
            end = start + lot.size
            window = self.window(lot)
            if window <= 0:
                result.append(None)
            elif not self._dedup.vouches_for(lot.partition, window):
                result.append(dict(zip(hashes[start:end], (item.transaction_id for item in lot.items()), strict=True)))
            elif not maybe:
                result.append({})
            else:
                items = list(lot.items())
                result.append({hashes[i]: items[i - start].transaction_id for i in maybe if start <= i < end})
            start = end
        return result

    def _repeats(self, lot: AppendBatch) -> bool:
        """Whether an id occurs more than once in the lot."""
        if len(lot.parts) == 1:
            hashes = lot.parts[0].hashes
            return len(set(hashes)) < len(hashes)
        distinct: set[int] = set()
        for part in lot.parts:
            distinct.update(part.hashes)
        return len(distinct) < lot.size

    def pack_ahead(self, lots: Sequence[AppendBatch]) -> None:
        """Make the segments of lots that are most likely to be stored as they are, while there is time."""
        for lot in lots:
            self._pack_all(lot)

    def _take_all(self, lot: AppendBatch) -> None:
        """Every item is new."""
        chunks = self._pack_all(lot)
        # Not where somebody may know their ids already: from the spool, or from an attempt of unknown outcome.
        if len(chunks) > 1 and not any(part.block is not None or part.sender.blocks for part in lot.parts):
            self._preparer.put_ids_in_order(chunks)
        lot.fill(chunks, None)

    def _pack_all(self, lot: AppendBatch) -> list[Chunk]:
        """The segments of all items: large parts are segments already, small ones in a row become one."""
        chunks: list[Chunk] = []
        small: list[PushSlice] = []
        for part in lot.parts:
            if part.chunks is None:
                small.append(part)
                continue
            if small:
                chunks += self._join(small, lot.queue)
                small = []
            chunks += part.chunks
        if small:
            chunks += self._join(small, lot.queue)
        return chunks

    def _join(self, parts: list[PushSlice], queue: Queue) -> list[Chunk]:
        one, encrypt = parts[0], queue.encryption_enabled
        if one.joint is not None and one.joint[0] == len(parts):
            return one.joint[1]
        if len(parts) == 1:
            subjects = [one.sender.subject] * len(one.items)
            chunks = self._preparer.pack(one.items, one.lengths, one.hashes, one.transactions, subjects, encrypt)
        else:
            chunks = self._join_several(parts, encrypt)
        one.joint = (len(parts), chunks)
        return chunks

    def _join_several(self, parts: list[PushSlice], encrypt: bool) -> list[Chunk]:
        return self._preparer.pack(
            [item for part in parts for item in part.items],
            [length for part in parts for length in part.lengths],
            [value for part in parts for value in part.hashes],
            [transaction for part in parts for transaction in part.transactions],
            [part.sender.subject for part in parts for _ in part.items],
            encrypt,
        )

    def _take_new(self, lot: AppendBatch, earlier: dict[str, Earlier], *, deduplicate: bool) -> None:
        """The careful way: some items are duplicates, of stored messages or of each other, or do not fit."""
        ours = {block for part in lot.parts for block in part.sender.blocks}
        fates: list[ItemOutcome] = []
        lot.winners = {}
        seen: set[str] = set()
        stored = 0
        new = _New(self._preparer, lot.queue)
        for part in lot.parts:
            new.begin(part)
            columns = zip(part.items, part.lengths, part.hashes, part.transactions, strict=True)
            for index, (item, length, value, transaction) in enumerate(columns):
                before = earlier.get(item.transaction_id)
                if deduplicate and item.transaction_id in seen:
                    fate = ItemOutcome.DUPLICATE
                elif before is not None:
                    lot.winners[item.transaction_id] = before.message_id
                    seen.add(item.transaction_id)
                    fate = ItemOutcome.STORED_BEFORE if before.block in ours else ItemOutcome.DUPLICATE
                elif lot.room is not None and stored >= lot.room:
                    fate = ItemOutcome.REFUSED
                else:
                    seen.add(item.transaction_id)
                    fate = ItemOutcome.STORED
                    stored += 1
                    new.add(index, item, length, value, transaction)
                fates.append(fate)
        lot.fill(new.finish(), fates)


class _New:
    """The items of a lot that are stored, while they are being chosen.

    Ids that were given before stay with their items: a gap among those begins another segment.
    """

    def __init__(self, preparer: SlicePreparer, queue: Queue) -> None:
        self._preparer = preparer
        self._encrypt = queue.encryption_enabled
        self._chunks: list[Chunk] = []
        self._part: PushSlice | None = None
        self._first = 0
        self._clear()

    def begin(self, part: PushSlice) -> None:
        if part.block is not None or (self._part is not None and self._part.block is not None):
            self._pack()
        self._part = part

    def add(self, index: int, item: PushItem, length: int, value: int, transaction: bytes) -> None:
        part = self._part
        assert part is not None
        if part.block is not None and self._first + len(self._items) != index:
            self._pack()
            self._first = index
        self._items.append(item)
        self._lengths.append(length)
        self._hashes.append(value)
        self._transactions.append(transaction)
        self._subjects.append(part.sender.subject if part.subjects is None else part.subjects[index])

    def finish(self) -> list[Chunk]:
        self._pack()
        return self._chunks

    def _pack(self) -> None:
        """Make segments of what was added since the last time."""
        if self._items:
            block = None if self._part is None or self._part.block is None else self._part.block.behind(self._first)
            self._chunks += self._preparer.pack(
                self._items, self._lengths, self._hashes, self._transactions, self._subjects, self._encrypt, block
            )
        self._clear()

    def _clear(self) -> None:
        self._first = 0
        self._items: list[PushItem] = []
        self._lengths: list[int] = []
        self._hashes: list[int] = []
        self._transactions: list[bytes] = []
        self._subjects: list[str | None] = []

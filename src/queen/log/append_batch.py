"""Append batches: what pushes have for one partition, checked for duplicates and packed into segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto

from queen.log.catalog import Partition, Queue
from queen.log.dedup import Dedup, Earlier
from queen.log.slices import Chunk, PushSlice, SlicePreparer
from queen.storage.database import Fetcher
from queen.wire.push import PushItem
from queen.wire.segment import Segment

_UNKNOWN_SECONDS = 60.0
"""Longer than a push is retried while PostgreSQL is unavailable."""


class ItemOutcome(Enum):
    """The outcome of an item."""

    STORED = auto()
    STORED_BEFORE = auto()
    """By an attempt of this same request whose outcome was unknown."""
    DUPLICATE = auto()
    REFUSED = auto()
    """The queue is full."""


@dataclass(slots=True)
class AppendBatch:
    """Everything that is appended to one partition together. `outcomes` is None when every item is stored."""

    partition: Partition
    queue: Queue
    slices: list[PushSlice] = field(default_factory=list)
    size: int = 0
    """Items that were sent."""
    base: int = 0
    room: int | None = None
    waited: float = 0.0
    """Seconds that the oldest message of its batch has been in the spool."""
    chunks: list[Chunk] = field(default_factory=list)
    count: int = 0
    """Messages that are to be stored."""
    outcomes: list[ItemOutcome] | None = None
    originals: dict[str, str] = field(default_factory=dict)
    """Ids of the messages that items which are not stored duplicate, by transaction id."""

    def add(self, slice_: PushSlice) -> None:
        self.slices.append(slice_)
        self.size += slice_.count

    def fill(self, chunks: list[Chunk], outcomes: list[ItemOutcome] | None) -> None:
        """Set what is stored, and the outcome of each item."""
        self.chunks = chunks
        self.count = sum([chunk.count for chunk in chunks])
        self.outcomes = outcomes

    @property
    def stored_before(self) -> int:
        """Messages that an attempt of unknown outcome had stored: nothing was notified of them."""
        return self.outcomes.count(ItemOutcome.STORED_BEFORE) if self.outcomes is not None else 0

    @property
    def refusal(self) -> str:
        """Why items did not fit."""
        limit = self.queue.max_size
        return (
            f"Queue '{self.queue.name}' would exceed max capacity ({limit})."
            f" Current: {limit - (self.room or 0)}, Batch: {self.size}"
        )

    def items(self) -> Iterator[PushItem]:
        for slice_ in self.slices:
            yield from slice_.items

    def segments(self, created_at: datetime) -> list[Segment]:
        """The segments as readers will see them."""
        made, base = [], self.base
        for chunk in self.chunks:
            made.append(Segment(base, created_at, chunk.block, chunk.plain))
            base += chunk.count
        return made


class BatchAssembler:
    """Decides which items of batches are new, and puts those into segments."""

    def __init__(self, dedup: Dedup, preparer: SlicePreparer, *, dedup_window: float) -> None:
        self._dedup = dedup
        self._preparer = preparer
        self._dedup_window = float(dedup_window)

    def window(self, batch: AppendBatch) -> float:
        """Seconds inside which a transaction id is accepted once, counted from when the messages were accepted."""
        own = batch.queue.dedup_window_seconds
        window = self._dedup_window if own is None else float(own)
        return window + batch.waited if window > 0 else window

    async def assemble(self, fetcher: Fetcher, batches: Sequence[AppendBatch]) -> None:
        """Fill `chunks` and `outcomes` of each batch, for the partitions as this worker knows them."""
        for batch in batches:
            # Fixed before the first await: ids added meanwhile were not checked, so they must stop the append.
            batch.base = batch.partition.known_to or 0
        hashes = [value for batch in batches for slice_ in batch.slices for value in slice_.hashes]
        maybe = self._dedup.filter.may_contain(hashes)
        if not maybe and self._are_plainly_new(batches, hashes):
            for batch in batches:
                self._take_all(batch)
            return
        for batch, suspects in zip(batches, self._suspects(batches, hashes, maybe), strict=True):
            earlier: dict[str, Earlier] = {}
            if suspects:
                earlier = await self._dedup.find(fetcher, batch.partition, suspects, self.window(batch))
            tried = {block for slice_ in batch.slices for block in slice_.sender.blocks}
            reach = batch.waited + _UNKNOWN_SECONDS
            if tried and self.window(batch) < reach:
                # An attempt of unknown outcome may have stored it outside of the window; it must not be stored twice.
                ids = {item.transaction_id for item in batch.items()}
                earlier |= await self._dedup.find_in(fetcher, batch.partition, tried, ids, reach)
            repeated = suspects is not None and self._repeats(batch)
            if earlier or repeated or (batch.room is not None and batch.room < batch.size):
                self._take_new(batch, earlier, deduplicate=suspects is not None)
            else:
                self._take_all(batch)

    def _are_plainly_new(self, batches: Sequence[AppendBatch], hashes: list[int]) -> bool:
        """The common case, checked for all batches at once: the filter has none of the hashes."""
        if len(set(hashes)) < len(hashes) or any(batch.room is not None for batch in batches):
            return False
        if any(slice_.sender.blocks for batch in batches for slice_ in batch.slices):
            return False
        windows = [self.window(batch) for batch in {batch.queue.id: batch for batch in batches}.values()]
        return min(windows) > 0 and self._dedup.covers_windows(max(windows))

    def _suspects(
        self, batches: Sequence[AppendBatch], hashes: list[int], maybe: list[int]
    ) -> list[dict[int, str] | None]:
        """For each batch the ids, by hash, that may be stored already; None where duplicates are allowed."""
        result: list[dict[int, str] | None] = []
        start = 0
        for batch in batches:
            end = start + batch.size
            window = self.window(batch)
            if window <= 0:
                result.append(None)
            elif not self._dedup.covers_window(batch.partition, window):
                result.append(
                    dict(zip(hashes[start:end], (item.transaction_id for item in batch.items()), strict=True))
                )
            elif not maybe:
                result.append({})
            else:
                items = list(batch.items())
                result.append({hashes[i]: items[i - start].transaction_id for i in maybe if start <= i < end})
            start = end
        return result

    def _repeats(self, batch: AppendBatch) -> bool:
        """Whether an id occurs more than once in the batch."""
        if len(batch.slices) == 1:
            hashes = batch.slices[0].hashes
            return len(set(hashes)) < len(hashes)
        distinct: set[int] = set()
        for slice_ in batch.slices:
            distinct.update(slice_.hashes)
        return len(distinct) < batch.size

    def pack_ahead(self, batches: Sequence[AppendBatch]) -> None:
        """Make the segments of batches that are most likely to be stored as they are, while there is time."""
        for batch in batches:
            self._pack_all(batch)

    def _take_all(self, batch: AppendBatch) -> None:
        """Every item is new."""
        chunks = self._pack_all(batch)
        # Not where clients may know their ids already: from the spool, or from an attempt of unknown outcome.
        if len(chunks) > 1 and not any(slice_.block is not None or slice_.sender.blocks for slice_ in batch.slices):
            self._preparer.put_ids_in_order(chunks)
        batch.fill(chunks, None)

    def _pack_all(self, batch: AppendBatch) -> list[Chunk]:
        """The segments of all items: large slices are segments already, small ones in a row become one."""
        chunks: list[Chunk] = []
        small: list[PushSlice] = []
        for slice_ in batch.slices:
            if slice_.chunks is None:
                small.append(slice_)
                continue
            if small:
                chunks += self._join(small, batch.queue)
                small = []
            chunks += slice_.chunks
        if small:
            chunks += self._join(small, batch.queue)
        return chunks

    def _join(self, slices: list[PushSlice], queue: Queue) -> list[Chunk]:
        one, encrypt = slices[0], queue.encryption_enabled
        if one.joint is not None and one.joint[0] == len(slices):
            return one.joint[1]
        if len(slices) == 1:
            subjects = [one.sender.subject] * len(one.items)
            chunks = self._preparer.pack(one.items, one.lengths, one.hashes, one.transactions, subjects, encrypt)
        else:
            chunks = self._join_several(slices, encrypt)
        one.joint = (len(slices), chunks)
        return chunks

    def _join_several(self, slices: list[PushSlice], encrypt: bool) -> list[Chunk]:
        return self._preparer.pack(
            [item for slice_ in slices for item in slice_.items],
            [length for slice_ in slices for length in slice_.lengths],
            [value for slice_ in slices for value in slice_.hashes],
            [transaction for slice_ in slices for transaction in slice_.transactions],
            [slice_.sender.subject for slice_ in slices for _ in slice_.items],
            encrypt,
        )

    def _take_new(self, batch: AppendBatch, earlier: dict[str, Earlier], *, deduplicate: bool) -> None:
        """The slow path: some items are duplicates, of stored messages or of each other, or do not fit."""
        ours = {block for slice_ in batch.slices for block in slice_.sender.blocks}
        outcomes: list[ItemOutcome] = []
        batch.originals = {}
        seen: set[str] = set()
        stored = 0
        new = _NewItems(self._preparer, batch.queue)
        for slice_ in batch.slices:
            new.begin(slice_)
            columns = zip(slice_.items, slice_.lengths, slice_.hashes, slice_.transactions, strict=True)
            for index, (item, length, value, transaction) in enumerate(columns):
                before = earlier.get(item.transaction_id)
                if deduplicate and item.transaction_id in seen:
                    outcome = ItemOutcome.DUPLICATE
                elif before is not None:
                    batch.originals[item.transaction_id] = before.message_id
                    seen.add(item.transaction_id)
                    outcome = ItemOutcome.STORED_BEFORE if before.block in ours else ItemOutcome.DUPLICATE
                elif batch.room is not None and stored >= batch.room:
                    outcome = ItemOutcome.REFUSED
                else:
                    seen.add(item.transaction_id)
                    outcome = ItemOutcome.STORED
                    stored += 1
                    new.add(index, item, length, value, transaction)
                outcomes.append(outcome)
        batch.fill(new.finish(), outcomes)


class _NewItems:
    """The items of a batch that are stored, while they are being chosen.

    Ids that were given before stay with their items: a gap among those begins another segment.
    """

    def __init__(self, preparer: SlicePreparer, queue: Queue) -> None:
        self._preparer = preparer
        self._encrypt = queue.encryption_enabled
        self._chunks: list[Chunk] = []
        self._slice: PushSlice | None = None
        self._first = 0
        self._clear()

    def begin(self, slice_: PushSlice) -> None:
        if slice_.block is not None or (self._slice is not None and self._slice.block is not None):
            self._pack()
        self._slice = slice_

    def add(self, index: int, item: PushItem, length: int, value: int, transaction: bytes) -> None:
        slice_ = self._slice
        assert slice_ is not None
        if slice_.block is not None and self._first + len(self._items) != index:
            self._pack()
            self._first = index
        self._items.append(item)
        self._lengths.append(length)
        self._hashes.append(value)
        self._transactions.append(transaction)
        self._subjects.append(slice_.sender.subject if slice_.subjects is None else slice_.subjects[index])

    def finish(self) -> list[Chunk]:
        self._pack()
        return self._chunks

    def _pack(self) -> None:
        """Make segments of what was added since the last time."""
        if self._items:
            block = None if self._slice is None or self._slice.block is None else self._slice.block.behind(self._first)
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

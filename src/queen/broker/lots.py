"""Lots: what a batch of pushes has for one partition, checked for duplicates and packed into segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from queen.broker.catalog import Partition, Queue
from queen.broker.dedup import Dedup, Earlier, Fetcher, pack_ids
from queen.broker.seen import Hashes
from queen.errors import Conflict
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock, IdSource
from queen.wire.push import PushItem
from queen.wire.segment import Segment, pack_segment

_LARGEST_SEGMENT_BYTES = 256 << 10
_LARGEST_SEGMENT_COUNT = 1024

_encode = msgspec.json.encode


class Sender(Protocol):
    """Who pushed: the subject of its token, and the segments an attempt of unknown outcome may have stored."""

    @property
    def subject(self) -> str | None: ...

    @property
    def blocks(self) -> set[bytes]: ...


class EncryptionKeyMissing(Conflict):
    """A message for an encrypted queue is refused rather than stored in clear."""


class _Verdict(Enum):
    """What becomes of an item."""

    NEW = auto()
    OURS = auto()
    DUPLICATE = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Chunk:
    """One segment to be."""

    block: IdBlock
    hashes: Hashes
    ids: bytes
    plain: bytes
    sealed: bytes
    count: int


@dataclass(slots=True)
class Lot:
    """Everything a batch has for one partition. `results` is the answer to each item, in order."""

    partition: Partition
    queue: Queue
    pieces: list[tuple[Sender, list[PushItem]]] = field(default_factory=list)
    base: int = 0
    room: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    duplicates: int = 0

    @property
    def count(self) -> int:
        """Messages that are to be stored."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def items(self) -> list[PushItem]:
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        return [item for _, items in self.pieces for item in items]

    def segments(self, created_at: datetime) -> list[Segment]:
        """The segments as readers will see them."""
        made, base = [], self.base
        for chunk in self.chunks:
            made.append(Segment(base, created_at, chunk.block, chunk.plain))
            base += chunk.count
        return made


class Packer:
    """Decides which messages are new, and packs those."""

    def __init__(self, dedup: Dedup, envelope: Envelope, ids: IdSource, *, dedup_window: float) -> None:
        self._dedup = dedup
        self._envelope = envelope
        self._ids = ids
        self._dedup_window = float(dedup_window)

    def window(self, queue: Queue) -> float:
        """Seconds inside which a transaction id is accepted once."""
        own = queue.dedup_window_seconds
        return self._dedup_window if own is None else float(own)

    async def pack(self, fetcher: Fetcher, lots: Sequence[Lot]) -> None:
        """Fill `chunks` and `results` of each lot, for the partition as this worker knows it."""
        for lot in lots:
            lot.chunks.clear()
            lot.results.clear()
            lot.duplicates = 0
            lot.base = lot.partition.known_to or 0
            if lot.queue.encryption_enabled and not self._envelope.can_encrypt:
                raise EncryptionKeyMissing(
                    f"queue {lot.queue.name!r} is encrypted and the server has no QUEEN_ENCRYPTION_KEY: nothing was stored"
                )
            items = lot.items
            hash_one, seed = xxhash.xxh3_64_intdigest, lot.partition.id
            hashes = [hash_one(item.transaction_id.encode(), seed) for item in items]
            earlier = await self._earlier(fetcher, lot, items, hashes)
            if earlier is None and (lot.room is None or lot.room >= len(items)):
                self._pack_all(lot, items, np.array(hashes, dtype=np.uint64))
            else:
                self._pack_new(lot, items, hashes, earlier or {})

    async def _earlier(
        self, fetcher: Fetcher, lot: Lot, items: list[PushItem], hashes: list[int]
    ) -> dict[str, Earlier] | None:
        """Stored messages with the same transaction id; None when every id is certainly new."""
        window = self.window(lot.queue)
        if window <= 0:
            return None
        repeated = len(set(hashes)) < len(hashes)
        if self._dedup.vouches_for(lot.partition, window):
            suspects = self._dedup.filter.maybe(np.array(hashes, dtype=np.uint64))
            if not suspects.any():
                return {} if repeated else None
            wanted = {hashes[i]: items[i].transaction_id for i in np.flatnonzero(suspects)}
        else:
            wanted = {value: item.transaction_id for value, item in zip(hashes, items, strict=True)}
        found = await self._dedup.find(fetcher, lot.partition, wanted, window)
        return found if found or repeated else None

    def _pack_all(self, lot: Lot, items: list[PushItem], hashes: Hashes) -> None:
        """Pack items, all of them new, into segments of bounded size, and write the answer to each."""
        start = 0
        while start < len(items):
            end = _segment_end(items, start)
            self._pack_chunk(lot, items[start:end], hashes[start:end])
            start = end

    def _pack_chunk(self, lot: Lot, items: list[PushItem], hashes: Hashes) -> None:
        block = self._ids.block()
        transactions = [_encode(item.transaction_id) for item in items]
        traced = any(item.trace_id for item in items)
        plain = pack_segment(
            transactions,
            [item.payload for item in items],
            [item.trace_id or None for item in items] if traced else None,
            _producers(lot, items),
        )
        sealed = self._envelope.seal(plain, encrypt=lot.queue.encryption_enabled)
        lot.chunks.append(Chunk(block, hashes, pack_ids(block, hashes), plain, sealed, len(items)))
        prefix, low = block.prefix, block.low
        tail = b'","partition_id":"%b","trace_id":' % lot.partition.uuid.encode()
        end = b',"queueName":%b}' % _encode(lot.queue.name)
        if traced:
            lot.results += [
                b',"transaction_id":%b,"status":"queued","message_id":"%b%012x%b%b%b'
                % (transactions[i], prefix, low + i, tail, _encode(items[i].trace_id or None), end)
                for i in range(len(items))
            ]
            return
        tail += b"null" + end
        lot.results += [
            b',"transaction_id":%b,"status":"queued","message_id":"%b%012x%b' % (transaction, prefix, low + i, tail)
            for i, transaction in enumerate(transactions)
        ]

    def _pack_new(self, lot: Lot, items: list[PushItem], hashes: list[int], earlier: dict[str, Earlier]) -> None:
        """The careful way: some items are duplicates, of stored messages or of each other, or do not fit."""
        ours = {block for sender, _ in lot.pieces for block in sender.blocks}
        deduplicate = self.window(lot.queue) > 0
        winners: dict[str, bytes] = {}
        kept: list[int] = []
        verdicts: list[_Verdict] = []
        for index, item in enumerate(items):
            stored = earlier.get(item.transaction_id)
            if deduplicate and item.transaction_id in winners:
                verdicts.append(_Verdict.DUPLICATE)
            elif stored is not None:
                winners[item.transaction_id] = stored.message_id.encode()
                # What an attempt of unknown outcome stored is not a duplicate of itself.
                verdicts.append(_Verdict.OURS if stored.block in ours else _Verdict.DUPLICATE)
            elif lot.room is not None and len(kept) >= lot.room:
                verdicts.append(_Verdict.REFUSED)
            else:
                winners[item.transaction_id] = b""
                kept.append(index)
                verdicts.append(_Verdict.NEW)
        self._pack_all(lot, [items[i] for i in kept], np.array([hashes[i] for i in kept], dtype=np.uint64))
        self._merge_results(lot, items, verdicts, winners)

    def _merge_results(
        self, lot: Lot, items: list[PushItem], verdicts: list[_Verdict], winners: dict[str, bytes]
    ) -> None:
        """Put the answers for new messages and for the others back in the order of the items."""
        fresh, merged = iter(lot.results), []
        name = _encode(lot.queue.name)
        for item, verdict in zip(items, verdicts, strict=True):
            if verdict is _Verdict.NEW:
                result = next(fresh)
                winners[item.transaction_id] = message_id_in(result)
            elif verdict is _Verdict.OURS:
                result = _queued(item, winners[item.transaction_id], lot.partition.uuid, name)
            elif verdict is _Verdict.DUPLICATE:
                lot.duplicates += 1
                result = _duplicate(item, winners[item.transaction_id], name)
            else:
                result = _refused(lot, item, name, len(items))
            merged.append(result)
        lot.results[:] = merged


def message_id_in(result: bytes) -> bytes:
    """The message id in the answer to an item that was stored."""
    at = result.index(b'"message_id":"') + 14
    return result[at : at + 36]


def _segment_end(items: list[PushItem], start: int) -> int:
    """Where the segment that begins at `start` ends: at its limit of messages or of bytes."""
    most = min(len(items), start + _LARGEST_SEGMENT_COUNT)
    room = _LARGEST_SEGMENT_BYTES
    for index in range(start, most):
        room -= memoryview(items[index].payload).nbytes
        if room < 0 and index > start:
            return index
    return most


def _producers(lot: Lot, items: list[PushItem]) -> list[str | None] | None:
    if all(sender.subject is None for sender, _ in lot.pieces):
        return None
    subjects = {id(item): sender.subject for sender, sent in lot.pieces for item in sent}
    return [subjects[id(item)] for item in items]


def _queued(item: PushItem, message_id: bytes, partition_uuid: str, queue_name: bytes) -> bytes:
    return (
        b',"transaction_id":%b,"status":"queued","message_id":"%b","partition_id":"%b","trace_id":%b,"queueName":%b}'
        % (
            _encode(item.transaction_id),
            message_id,
            partition_uuid.encode(),
            _encode(item.trace_id or None),
            queue_name,
        )
    )


def _duplicate(item: PushItem, message_id: bytes, queue_name: bytes) -> bytes:
    return b',"transaction_id":%b,"status":"duplicate","message_id":"%b","queueName":%b}' % (
        _encode(item.transaction_id),
        message_id,
        queue_name,
    )


def _refused(lot: Lot, item: PushItem, queue_name: bytes, batch: int) -> bytes:
    limit = lot.queue.max_size
    error = (
        f"Queue '{lot.queue.name}' would exceed max capacity ({limit})."
        f" Current: {limit - (lot.room or 0)}, Batch: {batch}"
    )
    return b',"transaction_id":%b,"status":"failed","error":%b,"queueName":%b}' % (
        _encode(item.transaction_id),
        _encode(error),
        queue_name,
    )

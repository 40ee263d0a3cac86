"""Push slices: the items of one request that go to one partition, prepared while they wait to be stored."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

import msgspec
import xxhash

from queen.concurrency import EagerFuture
from queen.errors import Conflict
from queen.log.catalog import Partition, Queue
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock, IdSource
from queen.wire.push import Hold, PushItem
from queen.wire.segment import Segment, pack_segment

Target: TypeAlias = tuple[str, str]

_LARGEST_SEGMENT_BYTES = 256 << 10
_LARGEST_SEGMENT_COUNT = 1024
_OWN_SEGMENT_COUNT = 50
_OWN_SEGMENT_BYTES = 32 << 10

_ANY_TIME = datetime.fromtimestamp(0, UTC)

_encode = msgspec.json.encode
_hash = xxhash.xxh3_64_intdigest


class Sender(Protocol):
    """A sender: the subject of its token, and the segments that an attempt of unknown outcome may have stored."""

    subject: str | None
    blocks: frozenset[bytes]


class EncryptionKeyMissing(Conflict):
    """A message for an encrypted queue is refused rather than stored in clear."""


@dataclass(slots=True)
class Chunk:
    """A segment that is not stored yet."""

    block: IdBlock
    count: int
    hashes: Sequence[int]
    ids: bytes
    plain: bytes
    sealed: bytes


@dataclass(slots=True, eq=False)
class PushSlice:
    """The items of one request for one partition, and where in the request they stand (None: all of it).

    `given` are the items until the slice is packed: then they are freed, and unpacked again where they are needed.
    `lengths` of payloads, `hashes` and `transactions` (ids as JSON) are made when the partition is known; `chunks` too
    when the slice is large enough to be segments of its own. `joint` is how many slices, from this on, were joined into
    segments by an attempt to store them, and these: the next attempt uses the same, so that messages keep their ids.
    What comes from the spool has its ids (`block`) and `subjects` already.
    """

    sender: Sender
    target: Target
    given: list[PushItem] | None
    positions: list[int] | None
    partition: Partition | None = None
    lengths: Sequence[int] = ()
    hashes: Sequence[int] = ()
    transactions: Sequence[bytes] = ()
    chunks: list[Chunk] | None = None
    joint: tuple[int, list[Chunk]] | None = None
    block: IdBlock | None = None
    subjects: list[str | None] | None = None
    traced: bool = True
    """Whether an item may have a trace id."""

    @property
    def count(self) -> int:
        return len(self.hashes) if self.given is None else len(self.given)

    @property
    def items(self) -> list[PushItem]:
        if self.given is None:
            self.given = [item for chunk in self.chunks or () for item in items_of(chunk, self.target)]
        return self.given

    def drop_items(self) -> None:
        """The segments hold everything: the items, and the request that they are pieces of, need not wait with them."""
        self.traced = any(item.trace_id for item in self.items)
        self.given = None


@dataclass(slots=True, eq=False)
class Push:
    """One request: its items by the partition they go to, and the future of what `render` makes of its answer."""

    count: int
    nbytes: int
    subject: str | None
    render: Callable[[bytes], Any]
    answer: EagerFuture[Any]
    began: float
    slices: list[PushSlice] = field(default_factory=list)
    blocks: frozenset[bytes] = frozenset()
    hold: Hold | None = None
    first: int = 0
    """Where in its request it begins, if it is a part of one."""


def items_of(packed: Chunk | Segment, target: Target) -> list[PushItem]:
    """The items that a segment was made of."""
    segment = Segment(0, _ANY_TIME, packed.block, packed.plain) if isinstance(packed, Chunk) else packed
    return [
        PushItem(*target, msgspec.Raw(segment.payload(index)), transaction_id, segment.trace_id(index) or "")
        for index, transaction_id in enumerate(segment.transaction_ids())
    ]


def split_by_target(sender: Sender, items: list[PushItem]) -> list[PushSlice]:
    """The slices of a request, in the order in which their partitions first appear in it."""
    queue, partition = items[0].queue, items[0].partition
    if len(items) == 1 or all(item.partition == partition and item.queue == queue for item in items):
        return [PushSlice(sender, (queue, partition), items, None)]
    slices: dict[Target, PushSlice] = {}
    for position, item in enumerate(items):
        target = (item.queue, item.partition)
        slice_ = slices.get(target)
        if slice_ is None:
            slice_ = slices[target] = PushSlice(sender, target, [], [])
        slice_.items.append(item)
        assert slice_.positions is not None
        slice_.positions.append(position)
    return list(slices.values())


class SlicePreparer:
    """Does for a slice, as soon as it arrives, what need not wait until it is stored."""

    def __init__(self, envelope: Envelope, ids: IdSource) -> None:
        self._envelope = envelope
        self._ids = ids

    def prepare(self, slice_: PushSlice, partition: Partition, queue: Queue) -> None:
        """Prepare the slice for a partition; to be done again when the partition turns out to be another."""
        if queue.encryption_enabled and not self._envelope.can_encrypt:
            raise EncryptionKeyMissing(
                f"queue {queue.name!r} is encrypted and the server has no QUEEN_ENCRYPTION_KEY; nothing was stored"
            )
        items, seed = slice_.items, partition.id
        slice_.partition = partition
        slice_.chunks = slice_.joint = None
        if len(items) == 1:
            # Most requests of a busy server are these: worth a path without lists.
            transaction_id = items[0].transaction_id
            slice_.hashes = (_hash(transaction_id.encode(), seed),)
            slice_.transactions = (_encode(transaction_id),)
            nbytes = memoryview(items[0].payload).nbytes
            slice_.lengths = (nbytes,)
        else:
            slice_.hashes = [_hash(item.transaction_id.encode(), seed) for item in items]
            slice_.transactions = [_encode(item.transaction_id) for item in items]
            slice_.lengths = _lengths(items)
            nbytes = sum(slice_.lengths)
        if len(items) >= _OWN_SEGMENT_COUNT or nbytes >= _OWN_SEGMENT_BYTES or slice_.block is not None:
            subjects = slice_.subjects or [slice_.sender.subject] * len(items)
            encrypt = queue.encryption_enabled
            slice_.chunks = self.pack(
                items, slice_.lengths, slice_.hashes, slice_.transactions, subjects, encrypt, block=slice_.block
            )
            slice_.drop_items()

    def pack_unplaced(self, slices: Sequence[PushSlice]) -> list[Chunk]:
        """Pack slices whose partition may not be known: without hashes, and encrypted if that is possible."""
        items = [item for slice_ in slices for item in slice_.items]
        return self.pack(
            items,
            _lengths(items),
            [0] * len(items),
            [_encode(item.transaction_id) for item in items],
            [slice_.sender.subject for slice_ in slices for _ in slice_.items],
            self._envelope.can_encrypt,
        )

    def pack(
        self,
        items: Sequence[PushItem],
        lengths: Sequence[int],
        hashes: Sequence[int],
        transactions: Sequence[bytes],
        subjects: Sequence[str | None],
        encrypt: bool,
        block: IdBlock | None = None,
    ) -> list[Chunk]:
        """Pack items into segments of bounded size; with a `block`, their ids are the first of it."""
        end = _segment_end(lengths, 0)
        if end == len(items):
            return [self._pack_one(items, lengths, hashes, transactions, subjects, encrypt, block)] if items else []
        chunks = []
        start = 0
        while start < len(items):
            end = _segment_end(lengths, start)
            chunks.append(
                self._pack_one(
                    items[start:end],
                    lengths[start:end],
                    hashes[start:end],
                    transactions[start:end],
                    subjects[start:end],
                    encrypt,
                    None if block is None else block.behind(start),
                )
            )
            start = end
        return chunks

    def put_ids_in_order(self, chunks: Sequence[Chunk]) -> None:
        """Segments stored together are of one time: sorting their messages by time and id keeps them in order."""
        before = chunks[0].block
        for chunk in chunks[1:]:
            if (chunk.block.prefix, chunk.block.low) < (before.prefix, before.low):
                chunk.block = self._ids.block(chunk.count)
                chunk.ids = chunk.block.pack() + chunk.ids[16:]
            before = chunk.block

    def _pack_one(
        self,
        items: Sequence[PushItem],
        lengths: Sequence[int],
        hashes: Sequence[int],
        transactions: Sequence[bytes],
        subjects: Sequence[str | None],
        encrypt: bool,
        block: IdBlock | None,
    ) -> Chunk:
        count = len(items)
        if block is None:
            block = self._ids.block(count)
        traces = [item.trace_id for item in items]
        plain = pack_segment(
            transactions,
            [item.payload for item in items],
            [trace or None for trace in traces] if any(traces) else None,
            subjects if any(subjects) else None,
            lengths=lengths,
        )
        ids = block.pack() + array("Q", hashes).tobytes()
        return Chunk(block, count, hashes, ids, plain, self._envelope.seal(plain, encrypt=encrypt))


def _lengths(items: Sequence[PushItem]) -> list[int]:
    # memoryview, because a msgspec.Raw has a buffer but no len().
    return [memoryview(item.payload).nbytes for item in items]


def _segment_end(lengths: Sequence[int], start: int) -> int:
    """Where the segment that begins at `start` ends: at its limit of messages or of bytes."""
    most = min(len(lengths), start + _LARGEST_SEGMENT_COUNT)
    if sum(lengths[start:most]) <= _LARGEST_SEGMENT_BYTES:
        return most
    room = _LARGEST_SEGMENT_BYTES
    for index in range(start, most):
        room -= lengths[index]
        if room < 0 and index > start:
            return index
    return most

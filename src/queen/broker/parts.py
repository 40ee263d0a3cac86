"""Parts: the items of one request that go to one partition, made ready to be stored while they wait for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import xxhash

from queen.broker.catalog import Partition, Queue
from queen.errors import Conflict
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock, IdSource
from queen.wire.push import PushItem
from queen.wire.segment import pack_segment

Target: TypeAlias = tuple[str, str]

_LARGEST_SEGMENT_BYTES = 256 << 10
_LARGEST_SEGMENT_COUNT = 1024
_OWN_SEGMENT_COUNT = 50
_OWN_SEGMENT_BYTES = 32 << 10

_encode = msgspec.json.encode


class Sender(Protocol):
    """Who pushed: the subject of its token, and the segments an attempt of unknown outcome may have stored."""

    @property
    def subject(self) -> str | None: ...

    @property
    def blocks(self) -> set[bytes]: ...


class EncryptionKeyMissing(Conflict):
    """A message for an encrypted queue is refused rather than stored in clear."""


@dataclass(slots=True)
class Chunk:
    """One segment to be."""

    block: IdBlock
    hashes: list[int]
    ids: bytes
    plain: bytes
    sealed: bytes

    @property
    def count(self) -> int:
        return len(self.hashes)


@dataclass(slots=True, eq=False)
class Part:
    """The items of one request for one partition, and where in the request they stand (None: all of it).

    `lengths` of payloads, `hashes` and `transactions` (ids as JSON) are made when the partition is known; `chunks` too
    when the part is large enough to be segments of its own.
    """

    sender: Sender
    target: Target
    items: list[PushItem]
    positions: list[int] | None
    partition: Partition | None = None
    lengths: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    transactions: list[bytes] = field(default_factory=list)
    chunks: list[Chunk] | None = None


def split_by_target(sender: Sender, items: list[PushItem]) -> list[Part]:
    """The parts of a request, in the order in which their partitions first appear in it."""
    queue, partition = items[0].queue, items[0].partition
    if len(items) == 1 or all(item.partition == partition and item.queue == queue for item in items):
        return [Part(sender, (queue, partition), items, None)]
    parts: dict[Target, Part] = {}
    for position, item in enumerate(items):
        target = (item.queue, item.partition)
        part = parts.get(target)
        if part is None:
            part = parts[target] = Part(sender, target, [], [])
        part.items.append(item)
        assert part.positions is not None
        part.positions.append(position)
    return list(parts.values())


class Preparer:
    """Does for a part, as soon as it arrives, what need not wait for its turn to be stored."""

    def __init__(self, envelope: Envelope, ids: IdSource) -> None:
        self._envelope = envelope
        self._ids = ids

    def prepare(self, part: Part, partition: Partition, queue: Queue) -> None:
        """Make the part ready for a partition. It is done again when the partition turns out to be another."""
        if part.partition is partition:
            return
        if queue.encryption_enabled and not self._envelope.can_encrypt:
            raise EncryptionKeyMissing(
                f"queue {queue.name!r} is encrypted and the server has no QUEEN_ENCRYPTION_KEY; nothing was stored"
            )
        hash_one, seed = xxhash.xxh3_64_intdigest, partition.id
        part.hashes = [hash_one(item.transaction_id.encode(), seed) for item in part.items]
        part.transactions = [_encode(item.transaction_id) for item in part.items]
        part.chunks = None
        # memoryview, because a msgspec.Raw has a buffer but no len().
        part.lengths = [memoryview(item.payload).nbytes for item in part.items]
        if len(part.items) >= _OWN_SEGMENT_COUNT or sum(part.lengths) >= _OWN_SEGMENT_BYTES:
            subjects = [part.sender.subject] * len(part.items)
            part.chunks = self.pack(part.items, part.lengths, part.hashes, part.transactions, subjects, queue)
        part.partition = partition

    def pack(
        self,
        items: Sequence[PushItem],
        lengths: list[int],
        hashes: list[int],
        transactions: list[bytes],
        subjects: list[str | None],
        queue: Queue,
    ) -> list[Chunk]:
        """Pack items into segments of bounded size."""
        chunks = []
        start = 0
        while start < len(items):
            end = _segment_end(lengths, start)
            some = items[start:end]
            block = self._ids.block()
            traces = [item.trace_id for item in some]
            plain = pack_segment(
                transactions[start:end],
                [item.payload for item in some],
                [trace or None for trace in traces] if any(traces) else None,
                subjects[start:end] if any(subjects) else None,
                lengths=lengths[start:end],
            )
            own = hashes[start:end] if len(hashes) > end - start else hashes
            ids = block.pack() + array("Q", own).tobytes()
            sealed = self._envelope.seal(plain, encrypt=queue.encryption_enabled)
            chunks.append(Chunk(block, own, ids, plain, sealed))
            start = end
        return chunks


def _segment_end(lengths: list[int], start: int) -> int:
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

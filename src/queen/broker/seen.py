"""A filter of transaction ids that were pushed lately: says for certain what was not."""

from __future__ import annotations

import time
from array import array

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

_PROBES = 8
_BITS_PER_ENTRY = 32
_SMALLEST = 1 << 16
_LARGEST = 1 << 22
_FEW = 8


def transaction_hash(transaction_id: str, partition_id: int) -> int:
    """64 bits that stand for a transaction id within its partition, the same in every process."""
    return xxhash.xxh3_64_intdigest(transaction_id.encode(), partition_id)


def unpack_hashes(packed: bytes) -> Hashes | list[int]:
    """Hashes of 8 bytes each, in the form in which so many are added fastest."""
    if len(packed) <= 8 * _FEW:
        return array("Q", packed).tolist()
    return np.frombuffer(packed, dtype=np.uint64)


class SeenFilter:
    """Bloom filters in generations: a new one when the last is full, the oldest dropped when memory is.

    `complete_since` is the time from which nothing is missing: what was added before may have been dropped.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._generations: list[_Generation] = [_Generation(_SMALLEST)]
        self.complete_since = 0.0

    @property
    def nbytes(self) -> int:
        return sum(generation.bits.nbytes for generation in self._generations)

    def add(self, hashes: Hashes | list[int], since: float | None = None, until: float | None = None) -> None:
        """Add what was stored between two moments (None: just now)."""
        now = time.time()
        since, until = now if since is None else since, now if until is None else until
        if isinstance(hashes, list) and len(hashes) > _FEW:
            hashes = np.array(hashes, dtype=np.uint64)
        while len(hashes):
            newest = self._generations[-1]
            room = newest.capacity - newest.entries
            if room <= 0:
                self._grow(newest.capacity)
                continue
            newest.add(hashes[:room], since, until)
            hashes = hashes[room:]

    def when(self, value: int) -> list[tuple[float, float]]:
        """The stretches of time in which a hash may have been stored."""
        return [(g.oldest_at, g.newest_at) for g in self._generations if g.contains_one(value)]

    def suspects(self, values: list[int]) -> list[int]:
        """The positions of hashes that may have been added; the others certainly were not since `complete_since`."""
        if len(values) > _FEW:
            found: list[int] = np.flatnonzero(self.maybe(np.array(values, dtype=np.uint64))).tolist()
            return found
        return [i for i, value in enumerate(values) if any(g.contains_one(value) for g in self._generations)]

    def maybe(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """For each hash: False when it was certainly not added since `complete_since`."""
        positions = _positions(hashes)
        found = self._generations[-1].contains(positions)
        for generation in self._generations[:-1]:
            found |= generation.contains(positions)
        return found

    def drop_before(self, moment: float) -> None:
        """Forget generations whose entries are all older than `moment`."""
        while len(self._generations) > 1 and self._generations[0].newest_at < moment:
            self._drop_oldest()

    def _grow(self, last_capacity: int) -> None:
        self._generations.append(_Generation(min(last_capacity * 4, _LARGEST)))
        while self.nbytes > self._memory_bytes and len(self._generations) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = self._generations.pop(0)
        self.complete_since = max(self.complete_since, dropped.newest_at)


class _Generation:
    __slots__ = ("_bytes", "bits", "capacity", "entries", "newest_at", "oldest_at", "size_mask")

    def __init__(self, capacity: int) -> None:
        size = 1 << (capacity * _BITS_PER_ENTRY - 1).bit_length()
        self.bits = np.zeros(size >> 3, dtype=np.uint8)
        self._bytes = self.bits.data
        self.size_mask = size - 1
        # A power of two is at least what was asked for; the rest is room for more.
        self.capacity = size // _BITS_PER_ENTRY
        self.entries = 0
        self.newest_at = 0.0
        self.oldest_at = float("inf")

    def add(self, hashes: Hashes | list[int], since: float, until: float) -> None:
        if isinstance(hashes, list):
            for value in hashes:
                self._add_one(value)
        else:
            positions = (_positions(hashes) & np.uint64(self.size_mask)).ravel()
            self._set((positions >> np.uint64(3)).astype(np.intp), _bit(positions))
        self.entries += len(hashes)
        self.newest_at = max(self.newest_at, until)
        self.oldest_at = min(self.oldest_at, since)

    def _set(self, places: npt.NDArray[np.intp], masks: npt.NDArray[np.uint8]) -> None:
        """Set bits. Of two that share a byte one may get lost, so what is still missing is set again."""
        bits = self.bits
        while len(places):
            bits[places] |= masks
            missing = np.flatnonzero((bits[places] & masks) == 0)
            places, masks = places[missing], masks[missing]

    def contains(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        masked = positions & np.uint64(self.size_mask)
        hit: npt.NDArray[np.bool_] = (self.bits[masked >> np.uint64(3)] & _bit(masked)).all(axis=0)
        return hit

    def contains_one(self, value: int) -> bool:
        """The same for a single hash: cheaper than an array of one."""
        stride, mask, bits = value >> 32 | 1, self.size_mask, self._bytes
        for _ in range(_PROBES):
            if not bits[(value & mask) >> 3] >> (value & 7) & 1:
                return False
            value += stride
        return True

    def _add_one(self, value: int) -> None:
        stride, mask, bits = value >> 32 | 1, self.size_mask, self._bytes
        for _ in range(_PROBES):
            bits[(value & mask) >> 3] |= 1 << (value & 7)
            value += stride


_STEPS = np.arange(_PROBES, dtype=np.uint64)[:, None]


def _positions(hashes: Hashes) -> npt.NDArray[np.uint64]:
    """The probes of each hash, one row a probe: its low half, stepped by its (odd) high half."""
    stride = (hashes >> np.uint64(32)) | np.uint64(1)
    return hashes + _STEPS * stride


def _bit(positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (positions & np.uint64(7)).astype(np.uint8))

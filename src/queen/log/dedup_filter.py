"""The dedup filter: Bloom filters of transaction ids in memory, and their spill files on disk."""

from __future__ import annotations

import logging
import mmap
import shutil
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_LEAVE_FREE: Final = 1 << 30
"""Bytes of the disk that are for others: PostgreSQL and the spool may be on it."""
_PIECE: Final = 512 << 10
"""Bytes that are written in one go: few enough for the event loop to wait for."""


class SpillFile:
    """Files without a name, which end with the process. What is read often stays in the memory the kernel has to spare.

    Takes `most_bytes` at most, and nothing while the disk is nearly full.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self.nbytes = 0

    def begin(self, data: Bytes) -> Move:
        """Begin to move bytes to the disk. Raises `OSError` when it has no room for them."""
        if self.nbytes + data.nbytes > self._most_bytes:
            raise OSError(f"the {self._most_bytes >> 20} MB on disk are full")
        self._directory.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self._directory).free < data.nbytes + _LEAVE_FREE:
            raise OSError(f"less than {_LEAVE_FREE >> 20} MB would be left free in {self._directory}")
        move = Move(data, self._directory)
        self.nbytes += data.nbytes
        return move

    def drop(self, data: Bytes) -> None:
        """Bytes are not used any more: their place on disk is free once the last reference to them is gone."""
        self.nbytes -= data.nbytes


class Move:
    """Bytes on their way to the disk, piece by piece."""

    def __init__(self, data: Bytes, directory: Path) -> None:
        self._data = data
        self._written = 0
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (closed by `end`)

    def step(self) -> Bytes | None:
        """Write the next piece; returns the bytes, only to be read, once all of them are there. May raise `OSError`."""
        if self._written < self._data.nbytes:
            self._written += self._file.write(self._data[self._written : self._written + _PIECE].data)
            return None
        view = mmap.mmap(self._file.fileno(), self._data.nbytes, access=mmap.ACCESS_READ)
        # Probes are anywhere: what lies around them is not worth reading.
        view.madvise(mmap.MADV_RANDOM)
        self.end()
        return np.frombuffer(view, dtype=np.uint8)

    def end(self) -> None:
        self._file.close()


log = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]

_PROBES = 10
_FIRST_PROBES = 3
"""These alone rule out most hashes that were never added."""
_BITS_PER_ENTRY = 32
_SMALLEST = 1 << 16
_LARGEST = 1 << 21
_FEW = 8
_AT_ONCE = 4096
"""So many that more would not be cheaper: their probes take some hundred kB."""
_SMALL_BATCH = 256
_GATHERED = 1024
"""Small batches are gathered up to this number of hashes: setting their bits batch by batch costs ten times as much."""
_MOST_CHECKED_AHEAD = 10_000
_COMPLAIN_SECONDS = 3600.0


def unpack_hashes(packed: bytes) -> Hashes | list[int]:
    """Hashes of 8 bytes each: a list of a few, a vector of many, whichever is added faster."""
    if len(packed) <= 8 * _SMALL_BATCH:
        return array("Q", packed).tolist()
    return np.frombuffer(packed, dtype=np.uint64)


class DedupFilter:
    """Bloom filters in generations: a new one when the last is full.

    When memory is full, the oldest in it goes to the `spill` file on disk; without room there the oldest is dropped.
    `complete_since` is the time from which nothing is missing: what was added before may have been dropped.
    """

    def __init__(self, memory_bytes: int, spill: SpillFile | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._largest = min(_LARGEST, memory_bytes * 8 // _BITS_PER_ENTRY // 4)
        self._spill = spill
        self._generations: list[_Generation] = [_Generation(_SMALLEST)]
        self._gathered: set[int] = set()
        self._gathered_between = (float("inf"), 0.0)
        self._absent: set[int] = set()
        self._moving: tuple[_Generation, Move] | None = None
        self._complain_at = 0.0
        self.complete_since = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes; what is on disk, or goes there just now, does not count."""
        moving = self._moving[0] if self._moving is not None else None
        return sum(each.bits.nbytes for each in self._generations if not each.on_disk and each is not moving)

    @property
    def disk_bytes(self) -> int:
        return self._spill.nbytes if self._spill is not None else 0

    def add(self, hashes: Hashes | list[int], since: float | None = None, until: float | None = None) -> None:
        """Add what was stored between two times (None: just now)."""
        self._move_on()
        now = time.time()
        since, until = now if since is None else since, now if until is None else until
        if self._absent:
            self._absent.difference_update(hashes if isinstance(hashes, list) else hashes.tolist())
        if isinstance(hashes, list):
            if len(hashes) <= _SMALL_BATCH:
                self._gather(hashes, since, until)
                return
            hashes = np.array(hashes, dtype=np.uint64)
        self._enter(hashes, since, until)

    def _gather(self, hashes: list[int], since: float, until: float) -> None:
        gathered, (oldest, newest) = self._gathered, self._gathered_between
        gathered.update(hashes)
        self._gathered_between = min(oldest, since), max(newest, until)
        if len(gathered) >= _GATHERED:
            self._enter(np.fromiter(gathered, dtype=np.uint64, count=len(gathered)), *self._gathered_between)
            gathered.clear()
            self._gathered_between = float("inf"), 0.0

    def _enter(self, hashes: Hashes, since: float, until: float) -> None:
        """Set the bits of hashes in the newest generation, and in new ones when that is full."""
        while len(hashes):
            newest = self._generations[-1]
            room = newest.capacity - newest.entries
            if room <= 0:
                self._grow(newest.capacity)
                continue
            some = min(room, _AT_ONCE)
            newest.add(hashes[:some], since, until)
            hashes = hashes[some:]

    def when(self, value: int) -> list[tuple[float, float]]:
        """The stretches of time in which a hash may have been stored."""
        stretches = [(g.oldest_at, g.newest_at) for g in self._generations if g.contains_one(value)]
        return [*stretches, self._gathered_between] if value in self._gathered else stretches

    def check_ahead(self, values: Sequence[int]) -> None:
        """Look for a few hashes while there is time: what is not there, `may_contain` need not look for again."""
        if len(values) > _FEW:
            return
        if len(self._absent) > _MOST_CHECKED_AHEAD:
            # Most are added soon, and leave the negative cache then; these were refused.
            self._absent.clear()
        for value in values:
            if value not in self._gathered and not self._has_entered(value):
                self._absent.add(value)

    def may_contain(self, values: list[int]) -> list[int]:
        """The positions of hashes that may have been added; the others certainly were not since `complete_since`."""
        absent = self._absent
        if not absent:
            return self._look_for(values)
        unchecked = [i for i, value in enumerate(values) if value not in absent]
        return [unchecked[i] for i in self._look_for([values[i] for i in unchecked])] if unchecked else []

    def _look_for(self, values: list[int]) -> list[int]:
        gathered = self._gathered
        if len(values) > _FEW:
            found: list[int] = np.flatnonzero(self._entered(np.array(values, dtype=np.uint64))).tolist()
        else:
            found = [i for i, value in enumerate(values) if self._has_entered(value)]
        if not gathered.isdisjoint(values):
            found = sorted({*found, *(i for i, value in enumerate(values) if value in gathered)})
        return found

    def _has_entered(self, value: int) -> bool:
        """Whether the generations may have a hash; the newest is the likeliest to have it."""
        return any(generation.contains_one(value) for generation in reversed(self._generations))

    def _entered(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """For each hash whether the generations may have it."""
        if len(hashes) > _AT_ONCE:
            parts = [hashes[at : at + _AT_ONCE] for at in range(0, len(hashes), _AT_ONCE)]
            return np.concatenate([self._entered(part) for part in parts])
        found = np.zeros(len(hashes), dtype=np.bool_)
        first: dict[int, _Probes] = {}
        for generation in self._generations:
            mask = generation.size_mask
            if mask not in first:
                first[mask] = _Probes.of(hashes, mask, _FIRST_STEPS)
            # Most are ruled out by their first probes; the few others need all of them.
            left = np.flatnonzero(generation.contains(first[mask]))
            if len(left):
                found[left[generation.contains(_Probes.of(hashes[left], mask))]] = True
        return found

    def drop_before(self, at: float) -> None:
        """Forget generations whose entries are all older than `at`."""
        while len(self._generations) > 1 and self._generations[0].newest_at < at:
            self._drop_oldest()

    def _grow(self, last_capacity: int) -> None:
        self._generations.append(_Generation(max(_SMALLEST, min(last_capacity * 2, self._largest))))
        while self.nbytes > self._memory_bytes and any(not each.on_disk for each in self._generations[:-1]):
            if not self._begin_move():
                self._drop_oldest()

    def _begin_move(self) -> bool:
        """Have the oldest that is in memory go to the disk, if that takes it."""
        if self._spill is None:
            return False
        while self._moving is not None:
            # Rare: so much was added at once that the one before is still on its way.
            self._move_on()
        oldest = next((generation for generation in self._generations[:-1] if not generation.on_disk), None)
        if oldest is None:
            return False
        try:
            self._moving = oldest, self._spill.begin(oldest.bits)
        except OSError as error:
            self._log_failure(error)
            return False
        return True

    def _move_on(self) -> None:
        """Bring what is on its way to the disk a piece further."""
        if self._moving is None:
            return
        generation, move = self._moving
        try:
            bits = move.step()
        except OSError as error:
            self._log_failure(error)
            # It lies in memory that is meant for others by now, and everything before it is older.
            while generation in self._generations:
                self._drop_oldest()
            return
        if bits is not None:
            generation.move_to_disk(bits)
            self._moving = None

    def _drop_oldest(self) -> None:
        dropped = self._generations.pop(0)
        self.complete_since = max(self.complete_since, dropped.newest_at)
        has_room_on_disk = dropped.on_disk
        if self._moving is not None and self._moving[0] is dropped:
            self._moving[1].end()
            self._moving, has_room_on_disk = None, True
        if self._spill is not None and has_room_on_disk:
            self._spill.drop(dropped.bits)

    def _log_failure(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + _COMPLAIN_SECONDS
            log.warning(
                "there are more transactionIds in the window than DEDUP_MEMORY_MB and DEDUP_DISK_MB hold (%s): pushes"
                " check for duplicates in PostgreSQL, which is slower; consider a shorter dedupWindowSeconds",
                error,
            )


class _Generation:
    __slots__ = ("_bytes", "bits", "capacity", "entries", "newest_at", "oldest_at", "on_disk", "size_mask")

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
        self.on_disk = False

    def move_to_disk(self, bits: npt.NDArray[np.uint8]) -> None:
        """Read the same bits from there from now on. It is full, so nothing is added any more."""
        self.bits, self._bytes, self.on_disk = bits, bits.data, True

    def add(self, hashes: Hashes, since: float, until: float) -> None:
        probes = _Probes.of(hashes, self.size_mask)
        self._set(probes.places.ravel(), probes.masks.ravel())
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

    def contains(self, probes: _Probes) -> npt.NDArray[np.bool_]:
        hit: npt.NDArray[np.bool_] = np.all(self.bits[probes.places] & probes.masks, axis=0)
        return hit

    def contains_one(self, value: int) -> bool:
        """The same for a single hash: cheaper than an array of one."""
        stride, mask, bits = value >> 32 | 1, self.size_mask, self._bytes
        for _ in range(_PROBES):
            if not bits[(value & mask) >> 3] >> (value & 7) & 1:
                return False
            value += stride
        return True


_STEPS = np.arange(_PROBES, dtype=np.uint64)[:, None]
_FIRST_STEPS = _STEPS[:_FIRST_PROBES]


class _Probes(NamedTuple):
    """Which bits stand for each of several hashes, one row a probe: in which byte each is, and which of it."""

    places: npt.NDArray[np.intp]
    masks: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, hashes: Hashes, size_mask: int, steps: npt.NDArray[np.uint64] = _STEPS) -> _Probes:
        """The low half of a hash, stepped by its (odd) high half."""
        stride = (hashes >> np.uint64(32)) | np.uint64(1)
        positions = (hashes + steps * stride) & np.uint64(size_mask)
        bits = (positions & np.uint64(7)).astype(np.uint8)
        return cls((positions >> np.uint64(3)).astype(np.intp), np.left_shift(np.uint8(1), bits))

"""The state of a spool, in memory shared by the workers of a host.

A push reads one byte of it, and more only when that is set. Records are counted by bucket, so that a push to a
partition whose messages wait in the spool does not overtake them, whichever worker spooled them.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from queen.files import share, try_lock
from queen.spool.record import BUCKETS, Record

_ENGAGED, _OUTAGE, _WANTED, _BREAKER = range(4)
_COUNTS = 1024
_SIZE = _COUNTS + 4 * BUCKETS
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_NEVER = (1 << 63) - 1


class _Number:
    """A number of the shared memory, at a byte; never below 0."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, state: SharedSpoolState, owner: type) -> int:
        number: int = _NUMBER.unpack_from(state.memory, self._at)[0]
        return number

    def __set__(self, state: SharedSpoolState, number: int) -> None:
        _NUMBER.pack_into(state.memory, self._at, max(0, number))


class SharedSpoolState:
    """Opened by every worker that uses a spool directory. Numbers change only inside `locked`."""

    order = _Number(8)
    """The order of the newest record."""
    records = _Number(16)
    messages = _Number(24)
    nbytes = _Number(32)
    _due_ns = _Number(40)
    _oldest_ns = _Number(48)
    replayed = _Number(56)
    spooled = _Number(64)
    rate = _Number(72)
    """Messages stored per second in the last drain."""
    damaged = _Number(80)
    refused = _Number(88)
    """Requests refused because the spool was full."""
    settled = _Number(96)
    """The order of the newest record that is stored or quarantined, as all before it are."""

    def __init__(self, root: Path) -> None:
        # The file lock is among processes; threads need one of their own.
        self._threads = threading.Lock()
        self._lock = os.open(root / "board.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._users = os.open(root / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.memory = share(root / "board", _SIZE)

    def join(self, leftovers: Callable[[], Iterable[tuple[Record, int]]]) -> None:
        """Start using the state; the first process resets it to the records (and their sizes) that were left."""
        with self.locked():
            if try_lock(self._users):
                self._begin(leftovers())
            # The kernel releases it when this process dies, however it dies.
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def _begin(self, leftovers: Iterable[tuple[Record, int]]) -> None:
        self.memory[:] = bytes(_SIZE)
        oldest, newest = time.time_ns(), 0
        for record, nbytes in leftovers:
            self._count([record], 1, nbytes)
            oldest, newest = min(oldest, int(record.at * 1e9)), max(newest, record.order)
        self._due_ns = 0 if newest else _NEVER
        self._oldest_ns = oldest
        # Records are numbered by the clock, but never below existing ones, should it have been set back.
        self.order = max(time.time_ns(), newest)

    def close(self) -> None:
        os.close(self._users)
        os.close(self._lock)
        self.memory.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Mutual exclusion among processes, for short sections."""
        with self._threads:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self.memory[_ENGAGED] = bool(self.memory[_OUTAGE] or self.records)
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def engaged(self) -> bool:
        """Whether any push may have to go to the spool."""
        return self.memory[_ENGAGED] != 0

    @property
    def outage(self) -> bool:
        """Whether PostgreSQL did not accept the last pushes."""
        return self.memory[_OUTAGE] != 0

    def set_outage(self, outage: bool) -> None:
        with self.locked():
            self.memory[_OUTAGE] = outage

    def holds(self, buckets: Iterable[int]) -> bool:
        """Whether records of these buckets may wait."""
        return any(self.memory[_COUNTS + 4 * bucket : _COUNTS + 4 * bucket + 4] != b"\0\0\0\0" for bucket in buckets)

    def want(self) -> None:
        """A request waits for what the spool holds: it is due now."""
        if not self.memory[_WANTED]:
            with self.locked():
                self.memory[_WANTED] = 1

    @property
    def due(self) -> bool:
        """Whether records are to be replayed now."""
        return bool(self.memory[_WANTED]) or self._due_ns <= time.time_ns()

    def accept(self, records: Sequence[Record], nbytes: int, due_at: float, flush_at: int) -> int:
        """Inside `locked`: count records that are about to be written; returns the order of the first."""
        if not self.records:
            self._oldest_ns = time.time_ns()
        self._count(records, 1, nbytes)
        due = 0 if self.messages >= flush_at else int(due_at * 1e9)
        self._due_ns = min(self._due_ns, due)
        first = max(self.order + 1, time.time_ns())
        self.order = first + len(records) - 1
        self.spooled += sum(record.count for record in records)
        return first

    def withdraw(self, records: Sequence[Record], nbytes: int) -> None:
        """Records could not be written."""
        with self.locked():
            self._count(records, -1, nbytes)
            self.spooled -= sum(record.count for record in records)

    def settle(self, records: Sequence[Record], nbytes: int) -> None:
        """Records are stored, or quarantined."""
        with self.locked():
            self._count(records, -1, nbytes)
            self.replayed += sum(record.count for record in records)
            self._oldest_ns = max(self._oldest_ns, *(int(record.at * 1e9) for record in records))
            self.settled = max(self.settled, *(record.order for record in records))

    def clear(self, *, empty: bool) -> None:
        """Inside `locked`: nothing is left to be stored. `empty`: no file exists."""
        self.memory[_WANTED] = 0
        if empty or not self.records:
            self._due_ns = _NEVER
        if empty:
            # Also what a worker had counted and crashed before writing.
            self.memory[_COUNTS:_SIZE] = bytes(4 * BUCKETS)
            self.records = self.messages = self.nbytes = 0

    def note_rate(self, messages_per_second: float) -> None:
        with self.locked():
            self.rate = int(messages_per_second)

    def note_damage(self) -> None:
        with self.locked():
            self.damaged += 1

    def note_refusal(self) -> None:
        with self.locked():
            self.refused += 1

    def note_breaker(self, state: int) -> None:
        """The state of the drainer's circuit breaker."""
        with self.locked():
            self.memory[_BREAKER] = state

    @property
    def oldest_at(self) -> float:
        return self._oldest_ns / 1e9

    @property
    def breaker(self) -> int:
        return self.memory[_BREAKER]

    def _count(self, records: Sequence[Record], sign: int, nbytes: int) -> None:
        for record in records:
            at = _COUNTS + 4 * record.bucket
            (count,) = _COUNT.unpack_from(self.memory, at)
            _COUNT.pack_into(self.memory, at, max(0, count + sign))
        self.records += sign * len(records)
        self.nbytes += sign * nbytes
        self.messages += sign * sum(record.count for record in records)

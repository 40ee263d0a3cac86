"""What the workers of a host know of their common spool, in memory that they share.

A push looks at one byte of it; only when that is set does it look further. The board counts records by bucket, so that
a push to a partition whose messages wait in the spool does not overtake them, whichever worker put them there.
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

from queen.shared_memory import share
from queen.spool.record import BUCKETS, Record

_ENGAGED, _TROUBLE, _WANTED, _STATE = range(4)
_ORDER, _RECORDS, _MESSAGES, _BYTES, _DUE, _OLDEST = range(8, 56, 8)
_REPLAYED, _SPOOLED, _RATE, _DAMAGED, _REFUSED, _SETTLED = range(56, 104, 8)
_COUNTS = 1024
_SIZE = _COUNTS + 4 * BUCKETS
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_NEVER = (1 << 63) - 1


class SharedSpoolState:
    """Opened by every worker that uses a spool directory. Numbers change only inside `locked`."""

    def __init__(self, root: Path) -> None:
        # The lock of the file is among processes; its threads need one of their own.
        self._threads = threading.Lock()
        self._lock = os.open(root / "board.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._users = os.open(root / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._map = share(root / "board", _SIZE)

    def join(self, leftovers: Callable[[], Iterable[tuple[Record, int]]]) -> None:
        """Begin to use the board; if nobody else does, anew, with the records (and their sizes) that were left."""
        with self.locked():
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                self._begin(leftovers())
            # Given up by the kernel when this process dies, however it dies.
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def _begin(self, leftovers: Iterable[tuple[Record, int]]) -> None:
        self._map[:] = bytes(_SIZE)
        oldest, newest = time.time_ns(), 0
        for record, nbytes in leftovers:
            self._count([record], 1, nbytes)
            oldest, newest = min(oldest, int(record.at * 1e9)), max(newest, record.order)
        self._put(_DUE, 0 if newest else _NEVER)
        self._put(_OLDEST, oldest)
        # Records are numbered by the clock, but never below those that are there, should it have been set back.
        self._put(_ORDER, max(time.time_ns(), newest))

    def close(self) -> None:
        os.close(self._users)
        os.close(self._lock)
        self._map.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time; for moments, not for work."""
        with self._threads:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self._map[_ENGAGED] = bool(self._map[_TROUBLE] or self._get(_RECORDS))
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def engaged(self) -> bool:
        """Whether anything keeps any push from going straight to PostgreSQL."""
        return self._map[_ENGAGED] != 0

    @property
    def trouble(self) -> bool:
        """Whether PostgreSQL lately did not take what was pushed."""
        return self._map[_TROUBLE] != 0

    def set_trouble(self, trouble: bool) -> None:
        with self.locked():
            self._map[_TROUBLE] = trouble

    def holds(self, buckets: Iterable[int]) -> bool:
        """Whether records of these buckets may wait."""
        return any(self._map[_COUNTS + 4 * bucket : _COUNTS + 4 * bucket + 4] != b"\0\0\0\0" for bucket in buckets)

    def want(self) -> None:
        """Somebody waits for what the spool holds: it is due now."""
        if not self._map[_WANTED]:
            with self.locked():
                self._map[_WANTED] = 1

    @property
    def due(self) -> bool:
        """Whether records are to be replayed now."""
        return bool(self._map[_WANTED]) or self._get(_DUE) <= time.time_ns()

    def accept(self, records: Sequence[Record], nbytes: int, due_at: float, flush_at: int) -> int:
        """Inside `locked`: count records that are about to be written; returns the number of the first."""
        if not self._get(_RECORDS):
            self._put(_OLDEST, time.time_ns())
        messages = self._count(records, 1, nbytes)
        due = 0 if messages >= flush_at else int(due_at * 1e9)
        self._put(_DUE, min(self._get(_DUE), due))
        first = max(self._get(_ORDER) + 1, time.time_ns())
        self._put(_ORDER, first + len(records) - 1)
        self._add(_SPOOLED, sum(record.count for record in records))
        return first

    def withdraw(self, records: Sequence[Record], nbytes: int) -> None:
        """Records could not be written after all."""
        with self.locked():
            self._count(records, -1, nbytes)
            self._add(_SPOOLED, -sum(record.count for record in records))

    def settle(self, records: Sequence[Record], nbytes: int) -> None:
        """Records are stored, or set aside."""
        with self.locked():
            self._count(records, -1, nbytes)
            self._add(_REPLAYED, sum(record.count for record in records))
            self._put(_OLDEST, max(self._get(_OLDEST), *(int(record.at * 1e9) for record in records)))
            self._put(_SETTLED, max(self._get(_SETTLED), *(record.order for record in records)))

    def clear(self, *, empty: bool) -> None:
        """Inside `locked`: nothing is left to be replayed. `empty`: there is not even a file."""
        self._map[_WANTED] = 0
        if empty or not self._get(_RECORDS):
            self._put(_DUE, _NEVER)
        if empty:
            # What a worker counted and did not live to write is forgotten here.
            self._map[_COUNTS:_SIZE] = bytes(4 * BUCKETS)
            for field in (_RECORDS, _MESSAGES, _BYTES):
                self._put(field, 0)

    def note_rate(self, messages_per_second: float) -> None:
        with self.locked():
            self._put(_RATE, int(messages_per_second))

    def note_damage(self) -> None:
        with self.locked():
            self._add(_DAMAGED, 1)

    def note_refusal(self) -> None:
        with self.locked():
            self._add(_REFUSED, 1)

    def note_state(self, state: int) -> None:
        """How the one that replays is doing, as a small number that means something to its kind."""
        with self.locked():
            self._map[_STATE] = state

    @property
    def order(self) -> int:
        """The number of the newest record."""
        return self._get(_ORDER)

    @property
    def settled(self) -> int:
        """The number of the newest record that is stored, or set aside; those before it are as well."""
        return self._get(_SETTLED)

    @property
    def records(self) -> int:
        return self._get(_RECORDS)

    @property
    def messages(self) -> int:
        return self._get(_MESSAGES)

    @property
    def nbytes(self) -> int:
        return self._get(_BYTES)

    @property
    def oldest_at(self) -> float:
        return self._get(_OLDEST) / 1e9

    @property
    def replayed(self) -> int:
        return self._get(_REPLAYED)

    @property
    def spooled(self) -> int:
        return self._get(_SPOOLED)

    @property
    def rate(self) -> int:
        return self._get(_RATE)

    @property
    def damaged(self) -> int:
        return self._get(_DAMAGED)

    @property
    def refused(self) -> int:
        """Requests that were sent away because no more may wait."""
        return self._get(_REFUSED)

    @property
    def state(self) -> int:
        return self._map[_STATE]

    def _count(self, records: Sequence[Record], sign: int, nbytes: int) -> int:
        for record in records:
            at = _COUNTS + 4 * record.bucket
            (count,) = _COUNT.unpack_from(self._map, at)
            _COUNT.pack_into(self._map, at, max(0, count + sign))
        self._add(_RECORDS, sign * len(records))
        self._add(_BYTES, sign * nbytes)
        return self._add(_MESSAGES, sign * sum(record.count for record in records))

    def _add(self, field: int, number: int) -> int:
        total = max(0, self._get(field) + number)
        self._put(field, total)
        return total

    def _get(self, field: int) -> int:
        number: int = _NUMBER.unpack_from(self._map, field)[0]
        return number

    def _put(self, field: int, number: int) -> None:
        _NUMBER.pack_into(self._map, field, number)

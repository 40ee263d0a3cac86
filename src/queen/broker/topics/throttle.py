"""Tenants that have much to do hold back while those that have little would suffer from it.

Batches of their own keep a quiet tenant from waiting behind a noisy one, but all use the same processors. So each
worker watches how long tenants with little to do are kept, beside those that have much and without them. When that
grows beyond what is usual for them, those with much to do have one batch at a time on the whole host, a small one, and
pause after it, as long as it takes for the others to be served well again. Where processors are to spare nobody is
slowed down.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import statistics
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from queen.shared_memory import share

_WINDOW_SECONDS: Final = 0.1
_FEW: Final = 5
_USUAL_WINDOWS: Final = 600
_BEARABLE: Final = 3.0
"""How many times as long as usual one in twenty may be kept: on an idle machine, one in a hundred is kept twice."""
_CALM_WINDOWS: Final = 100
_CALM_SECONDS: Final = 600.0
"""For how long it is remembered how tenants are served while nobody has much to do."""
_BEARABLE_AFTER_CALM: Final = 1.5
"""How many times as long as then one in twenty may be kept."""
_ABOUT_SECONDS: Final = 1.0
_ASK_AGAIN_SECONDS: Final = 0.002
_LONGEST_WAIT: Final = 1.0
"""Who has waited so long for the floor has waited for somebody who has stopped."""

_SLOT: Final = struct.Struct("<dddII")
_MOMENT: Final = struct.Struct("<d")


class TenantThrottle:
    """What the workers of a host agree on, in memory that they share; and the pauses of one of them."""

    def __init__(
        self,
        directory: Path,
        worker_id: int,
        workers: int,
        longest_pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A pause is at most `longest_pause` times as long as the batch before it; 0: nobody holds back."""
        self._clock = clock
        self._longest_pause = longest_pause
        self._at = _SLOT.size * worker_id
        self._map = share(directory / "courtesy", _SLOT.size * max(workers, worker_id + 1))
        self._much = _Moments(directory / "courtesy.much", worker_id, workers)
        self._floor = _Floor(directory, worker_id, workers)
        self._samples: list[float] = []
        self._looked_at = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL_WINDOWS)
        self._calm: deque[tuple[float, float]] = deque(maxlen=_CALM_WINDOWS)
        """When nobody had much to do, and how long one in twenty was kept then."""
        self.pause = 0.0
        """How many times as long as their batches took those with much to do pause, as far as this worker can tell."""
        self._tenants: dict[int, float] = {}
        """Those that had little to do, and when they were last served; whoever was last is last."""
        self._busy = False
        self._waiting: dict[Callable[[], None], None] = {}

    def served(self, tenants: Iterable[str], seconds: float) -> None:
        """Tenants that had little to do were served so long after they asked."""
        now = self._clock()
        for tenant in tenants:
            mark = _mark(tenant)
            self._tenants.pop(mark, None)
            self._tenants[mark] = now
        if now - self._looked_at >= _WINDOW_SECONDS:
            self._look_back(now)
            self._looked_at = now
            self._publish(now)
        self._samples.append(seconds)

    def has_much(self) -> None:
        """A batch of tenants with much to do begins or ends."""
        self._much.note(self._clock())

    def pause_of(self, tenant: str) -> float:
        """For how many times as long as its batch took a tenant with much to do is to pause; 0: nobody minds it."""
        now, mark, longest = self._clock(), _mark(tenant), 0.0
        for at, pause, _, *others in _SLOT.iter_unpack(self._map):
            if pause > longest and now - at < _ABOUT_SECONDS and any(other not in (0, mark) for other in others):
                longest = pause
        return longest

    def enter(self, resume: Callable[[], None]) -> bool:
        """Whether a tenant that is to pause may begin a batch; if not, `resume` is called when it should ask again."""
        if not self._busy and self._floor.take(self._clock()):
            self._busy = True
            return True
        if not self._busy and not self._waiting:
            asyncio.get_running_loop().call_later(_ASK_AGAIN_SECONDS, self._resume)
        self._waiting[resume] = None
        return False

    def leave(self, pause_seconds: float) -> None:
        """The batch is over; the next, of any worker, may begin after a pause."""
        asyncio.get_running_loop().call_later(pause_seconds, self._free)

    def close(self) -> None:
        self._floor.close()

    def _free(self) -> None:
        self._busy = False
        self._floor.give()
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for resume in waiting:
            resume()

    def _publish(self, now: float) -> None:
        """Two of those who were served lately will do: one of them is another than whoever asks."""
        self._tenants = {mark: at for mark, at in self._tenants.items() if now - at < _ABOUT_SECONDS}
        last, before = [*reversed(self._tenants), 0, 0][:2]
        _SLOT.pack_into(self._map, self._at, now, self.pause, self._kept_in_calm(now), last, before)

    def _look_back(self, now: float) -> None:
        """Find out whether those who are to pause do so enough."""
        windows = (now - self._looked_at) / _WINDOW_SECONDS
        self.pause = max(0.0, 0.985**windows * self.pause - 0.002 * windows)
        if len(self._samples) < _FEW:
            # Who is served seldom is judged by what was gathered over a longer time.
            return
        samples, self._samples = sorted(self._samples), []
        kept = samples[len(samples) * 19 // 20]
        self._usual.append(samples[len(samples) // 2])
        if not self._somebody_has_much():
            self._calm.append((now, kept))
        elif kept > self._bearable(now):
            self.pause = min(self._longest_pause, max(1.0, 1.25 * self.pause))

    def _somebody_has_much(self) -> bool:
        """Whether any worker had a batch of those with much to do since this one has looked back."""
        return any(at >= self._looked_at - _WINDOW_SECONDS for at in self._much)

    def _bearable(self, now: float) -> float:
        """How long one in twenty may be kept."""
        bearable = _BEARABLE * min(self._usual)
        # A worker that has not seen any calm takes it from one that has.
        calm = self._kept_in_calm(now) or max(
            (calm for at, _, calm, *_ in _SLOT.iter_unpack(self._map) if now - at < _CALM_SECONDS), default=0.0
        )
        return min(bearable, _BEARABLE_AFTER_CALM * calm) if calm else bearable

    def _kept_in_calm(self, now: float) -> float:
        """How long one in twenty is kept while nobody has much to do; 0: not known."""
        while self._calm and now - self._calm[0][0] > _CALM_SECONDS:
            self._calm.popleft()
        return statistics.median(kept for _, kept in self._calm) if len(self._calm) >= _FEW else 0.0


class _Moments:
    """A moment of each worker of the host, in memory that they share; 0: none."""

    def __init__(self, path: Path, worker_id: int, workers: int) -> None:
        self._map = share(path, _MOMENT.size * max(workers, worker_id + 1))
        self._at = _MOMENT.size * worker_id

    def note(self, moment: float) -> None:
        """The moment of this worker."""
        _MOMENT.pack_into(self._map, self._at, moment)

    def __iter__(self) -> Iterator[float]:
        return (moment for (moment,) in _MOMENT.iter_unpack(self._map))


class _Floor:
    """What one worker of the host has at a time: who asked first is next. The kernel takes it from one that dies."""

    def __init__(self, directory: Path, worker_id: int, workers: int) -> None:
        self._file: int | None = os.open(directory / "courtesy.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._waiting = _Moments(directory / "courtesy.waiting", worker_id, workers)
        self._since = 0.0

    def take(self, now: float) -> bool:
        since = self._since or now
        if now - since < _LONGEST_WAIT and not (self._is_first(since, now) and self._lock()):
            self._want(since)
            return False
        self._want(0.0)
        return True

    def give(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file is not None:
            self._want(0.0)
            os.close(self._file)
            self._file = None

    def _is_first(self, since: float, now: float) -> bool:
        return not any(other < since and now - other < _LONGEST_WAIT for other in self._waiting if other)

    def _lock(self) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _want(self, since: float) -> None:
        if since != self._since:
            self._since = since
            self._waiting.note(since)


def _mark(tenant: str) -> int:
    """A number that stands for a tenant; 0 for none."""
    return zlib.crc32(tenant.encode()) | 1

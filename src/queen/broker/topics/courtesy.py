"""Tenants that have much to do hold back while those that have little would suffer from it.

Batches of their own keep a quiet tenant from waiting behind a noisy one, but all use the same processors. So each
worker watches how long tenants with little to do are kept. When that grows beyond what is usual for them, those with
much to do have one batch at a time, a small one, and pause after it, as long as it takes for the others to be served
well again. Where processors are to spare nobody is slowed down.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from queen.shared_memory import share

_WINDOW_SECONDS: Final = 0.1
_FEW: Final = 5
_USUAL_WINDOWS: Final = 600
_BEARABLE: Final = 3.0
"""How many times as long as usual one in twenty may be kept: on an idle machine, one in a hundred is kept twice."""
_ABOUT_SECONDS: Final = 1.0

_SLOT: Final = struct.Struct("<ddII")


class Courtesy:
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
        self._samples: list[float] = []
        self._looked_at = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL_WINDOWS)
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
            self._look_back((now - self._looked_at) / _WINDOW_SECONDS)
            self._looked_at = now
            self._publish(now)
        self._samples.append(seconds)

    def pause_of(self, tenant: str) -> float:
        """For how many times as long as its batch took a tenant with much to do is to pause; 0: nobody minds it."""
        now, mark, longest = self._clock(), _mark(tenant), 0.0
        for at, pause, *others in _SLOT.iter_unpack(self._map):
            if pause > longest and now - at < _ABOUT_SECONDS and any(other not in (0, mark) for other in others):
                longest = pause
        return longest

    def enter(self, resume: Callable[[], None]) -> bool:
        """Whether a tenant that is to pause may begin a batch; if not, `resume` is called when it should ask again."""
        if self._busy:
            self._waiting[resume] = None
            return False
        self._busy = True
        return True

    def leave(self, pause_seconds: float) -> None:
        """The batch is over; the next may begin after a pause."""
        asyncio.get_running_loop().call_later(pause_seconds, self._free)

    def _free(self) -> None:
        self._busy = False
        waiting, self._waiting = self._waiting, {}
        for resume in waiting:
            resume()

    def _publish(self, now: float) -> None:
        """Two of those who were served lately will do: one of them is another than whoever asks."""
        self._tenants = {mark: at for mark, at in self._tenants.items() if now - at < _ABOUT_SECONDS}
        last, before = [*reversed(self._tenants), 0, 0][:2]
        _SLOT.pack_into(self._map, self._at, now, self.pause, last, before)

    def _look_back(self, windows: float) -> None:
        """Find out whether those who are to pause do so enough, after so many windows of time."""
        self.pause = max(0.0, 0.985**windows * self.pause - 0.002 * windows)
        if len(self._samples) < _FEW:
            # Who is served seldom is judged by what was gathered over a longer time.
            return
        samples, self._samples = sorted(self._samples), []
        self._usual.append(samples[len(samples) // 2])
        if samples[len(samples) * 19 // 20] > _BEARABLE * min(self._usual):
            self.pause = min(self._longest_pause, max(1.0, 1.25 * self.pause))


def _mark(tenant: str) -> int:
    """A number that stands for a tenant; 0 for none."""
    return zlib.crc32(tenant.encode()) | 1

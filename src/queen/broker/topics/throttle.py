"""The tenant throttle: heavy tenants pause while the latency of light ones suffers from them.

Separate batches keep a light tenant from waiting behind a heavy one, but both use the same processors. So each worker
measures the latency of light tenants, with and without heavy ones beside them. When it exceeds what is usual, heavy
tenants run one small batch at a time on the whole host and pause after it, until the latency is back to usual. Where
processors are idle, no tenant is slowed down.
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
from typing import Any, Final, TypeVar

from queen.broker.topics.batching import HEAVY_SLOT, LIGHT_SLOT, FairShare
from queen.files import share, try_lock
from queen.metrics.meter import clock

_WINDOW_SECONDS: Final = 0.1
_LEAST_SAMPLES: Final = 5
_MEDIAN_WINDOWS: Final = 600
_MOST_TIMES_MEDIAN: Final = 3.0
"""The p95 that is tolerated, in medians: on an idle machine the p99 is about twice the median."""
_QUIET_WINDOWS: Final = 100
_QUIET_SECONDS: Final = 600.0
"""How long the latencies without heavy tenants are remembered."""
_MOST_TIMES_QUIET: Final = 1.5
"""The p95 that is tolerated, in p95s without heavy tenants."""
_RECENT_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.002
_LONGEST_WAIT: Final = 1.0
"""After this time the holder of the mutex is considered stopped."""
_THROTTLED_SHARE: Final = 100
"""Items of a throttled tenant in one batch: so few that others find a gap soon."""

T = TypeVar("T")

# When a worker published, its pause, its p95 without heavy tenants, and two light tenants it served.
_SLOT: Final = struct.Struct("<dddII")
_TIMESTAMP: Final = struct.Struct("<d")


class TenantThrottle:
    """Measures light tenants and paces heavy ones; the workers of a host share what they measure."""

    def __init__(
        self,
        directory: Path,
        worker_id: int,
        workers: int,
        longest_pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A pause is at most `longest_pause` times as long as the batch before it; 0: no pauses."""
        self._clock = clock
        self._longest_pause = longest_pause
        self._at = _SLOT.size * worker_id
        self._map = share(directory / "throttle", _SLOT.size * max(workers, worker_id + 1))
        self._heavy_at = _WorkerTimestamps(directory / "throttle.heavy", worker_id, workers)
        self._mutex = _HostMutex(directory, worker_id, workers)
        self._samples: list[float] = []
        self._window_start = 0.0
        self._medians: deque[float] = deque(maxlen=_MEDIAN_WINDOWS)
        self._quiet: deque[tuple[float, float]] = deque(maxlen=_QUIET_WINDOWS)
        """Windows without heavy tenants: their time and p95."""
        self.pause = 0.0
        """How long heavy tenants are to pause for those that this worker serves, in durations of their batches."""
        self._tenants: dict[int, float] = {}
        """Light tenants and when they were last served, the latest last."""
        self._busy = False
        self._waiting: dict[Callable[[], None], None] = {}

    def fair_share(
        self, tenant: Callable[[Any], str], weigh: Callable[[Any], int], *, limit: int, share: int
    ) -> FairShare[Any]:
        """A backlog whose heavy tenants are throttled."""
        return ThrottledFairShare(self, tenant, weigh, limit=limit, share=share)

    def served(self, tenants: Iterable[str], seconds: float) -> None:
        """Light tenants were served after `seconds`."""
        now = self._clock()
        for tenant in tenants:
            mark = _mark(tenant)
            self._tenants.pop(mark, None)
            self._tenants[mark] = now
        if now - self._window_start >= _WINDOW_SECONDS:
            self._evaluate(now)
            self._window_start = now
            self._publish(now)
        self._samples.append(seconds)

    def heavy_batch(self) -> None:
        """A batch of heavy tenants begins or ends."""
        self._heavy_at.note(self._clock())

    def pause_of(self, tenant: str) -> float:
        """How long a heavy tenant is to pause, in durations of its batch; 0: not at all."""
        now, mark, longest = self._clock(), _mark(tenant), 0.0
        for at, pause, _, *others in _SLOT.iter_unpack(self._map):
            if pause > longest and now - at < _RECENT_SECONDS and any(other not in (0, mark) for other in others):
                longest = pause
        return longest

    def enter(self, resume: Callable[[], None]) -> bool:
        """Whether a heavy tenant that is to pause may begin a batch; if not, `resume` is called to try again."""
        if not self._busy and self._mutex.acquire(self._clock()):
            self._busy = True
            return True
        if not self._busy and not self._waiting:
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._resume)
        self._waiting[resume] = None
        return False

    def leave(self, pause_seconds: float) -> None:
        """The batch has ended; the next one, of any worker, may begin after a pause."""
        asyncio.get_running_loop().call_later(pause_seconds, self._free)

    def close(self) -> None:
        self._mutex.close()

    def _free(self) -> None:
        self._busy = False
        self._mutex.release()
        self._resume()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for resume in waiting:
            resume()

    def _publish(self, now: float) -> None:
        """Two recently served tenants are enough: one of them is not the heavy tenant that reads them."""
        self._tenants = {mark: at for mark, at in self._tenants.items() if now - at < _RECENT_SECONDS}
        last, before = [*reversed(self._tenants), 0, 0][:2]
        _SLOT.pack_into(self._map, self._at, now, self.pause, self._quiet_p95(now), last, before)

    def _evaluate(self, now: float) -> None:
        """At the end of a window: decay the pause, and raise it when the latency is too high."""
        windows = (now - self._window_start) / _WINDOW_SECONDS
        self.pause = max(0.0, 0.985**windows * self.pause - 0.002 * windows)
        if len(self._samples) < _LEAST_SAMPLES:
            # Too few samples: the window goes on.
            return
        samples, self._samples = sorted(self._samples), []
        p95 = samples[len(samples) * 19 // 20]
        self._medians.append(samples[len(samples) // 2])
        if not self._heavy_in_window():
            self._quiet.append((now, p95))
        elif p95 > self._tolerated(now):
            self.pause = min(self._longest_pause, max(1.0, 1.25 * self.pause))

    def _heavy_in_window(self) -> bool:
        """Whether any worker had a batch of heavy tenants in this window."""
        return any(at >= self._window_start - _WINDOW_SECONDS for at in self._heavy_at)

    def _tolerated(self, now: float) -> float:
        """The highest p95 of light tenants that needs no pause."""
        tolerated = _MOST_TIMES_MEDIAN * min(self._medians)
        # A worker without quiet windows uses those of another.
        quiet = self._quiet_p95(now) or max(
            (quiet for at, _, quiet, *_ in _SLOT.iter_unpack(self._map) if now - at < _QUIET_SECONDS), default=0.0
        )
        return min(tolerated, _MOST_TIMES_QUIET * quiet) if quiet else tolerated

    def _quiet_p95(self, now: float) -> float:
        """The median p95 of windows without heavy tenants; 0: not known."""
        while self._quiet and now - self._quiet[0][0] > _QUIET_SECONDS:
            self._quiet.popleft()
        return statistics.median(p95 for _, p95 in self._quiet) if len(self._quiet) >= _LEAST_SAMPLES else 0.0


class ThrottledFairShare(FairShare[T]):
    """A backlog whose heavy tenants pause as long as the throttle says."""

    def __init__(
        self,
        throttle: TenantThrottle,
        tenant: Callable[[T], str],
        weigh: Callable[[T], int],
        *,
        limit: int,
        share: int,
    ) -> None:
        super().__init__(tenant, weigh, limit=limit, share=share)
        self._throttle = throttle
        self._throttled_share = min(share, _THROTTLED_SHARE)
        self._pause = 0.0
        self._began = [0.0, 0.0]
        """By slot: since when the running batch counts; of light tenants, since the first of them waits."""

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        candidates = self.candidates(slot)
        if slot != HEAVY_SLOT or not candidates:
            return bool(candidates)
        self._pause = max(map(self._throttle.pause_of, candidates))
        return not self._pause or self._throttle.enter(resume)

    def take(self, slot: int) -> tuple[list[T], int]:
        if slot == LIGHT_SLOT:
            taken = super().take(slot)
            self._began[slot] = min(self.since, clock())
            return taken
        self._began[slot] = clock()
        self._throttle.heavy_batch()
        return self.take_shares(slot, self._throttled_share) if self._pause else super().take(slot)

    def done(self, slot: int) -> None:
        tenants, seconds = self._running[slot], clock() - self._began[slot]
        super().done(slot)
        if slot == LIGHT_SLOT:
            self._throttle.served(tenants, seconds)
            return
        self._throttle.heavy_batch()
        if self._pause:
            self._throttle.leave(seconds * self._pause)


class _WorkerTimestamps:
    """A timestamp of each worker of the host, in shared memory; 0: none."""

    def __init__(self, path: Path, worker_id: int, workers: int) -> None:
        self._map = share(path, _TIMESTAMP.size * max(workers, worker_id + 1))
        self._at = _TIMESTAMP.size * worker_id

    def note(self, at: float) -> None:
        """Set the timestamp of this worker."""
        _TIMESTAMP.pack_into(self._map, self._at, at)

    def __iter__(self) -> Iterator[float]:
        return (at for (at,) in _TIMESTAMP.iter_unpack(self._map))


class _HostMutex:
    """A mutex among the workers of the host, first come, first served. The kernel releases it when its holder dies."""

    def __init__(self, directory: Path, worker_id: int, workers: int) -> None:
        self._file: int | None = os.open(directory / "throttle.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._waiting = _WorkerTimestamps(directory / "throttle.waiting", worker_id, workers)
        self._since = 0.0

    def acquire(self, now: float) -> bool:
        since = self._since or now
        if now - since < _LONGEST_WAIT and not (self._is_first(since, now) and self._lock()):
            self._want(since)
            return False
        self._want(0.0)
        return True

    def release(self) -> None:
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
        return self._file is None or try_lock(self._file)

    def _want(self, since: float) -> None:
        if since != self._since:
            self._since = since
            self._waiting.note(since)


def _mark(tenant: str) -> int:
    """A hash of a tenant's name; never 0."""
    return zlib.crc32(tenant.encode()) | 1

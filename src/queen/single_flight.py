"""A single-flight cache: concurrent requests for a key share one computation, and expensive results are kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHEAP_SECONDS: Final = 0.005
_TIMES_AS_LONG: Final = 100
_LEAST_TIMES: Final = 10
_MOST_KEYS: Final = 100
_POLL_SECONDS: Final = 0.01
_CLAIM_TIMEOUT_SECONDS: Final = 5.0
_POPULAR_PER_SECOND: Final = 5
_POPULAR_SECONDS: Final = 1.0
_SLOW_SECONDS: Final = 0.25
"""No request waits for a result that takes longer, if there is an earlier one."""
_OUTDATED_SECONDS: Final = 300.0
_OUTDATED_TIMES: Final = 200
"""How much older than it takes an earlier result may be."""
_SHARED_TIMES: Final = 2.5
"""How much longer than a view a result may be kept of which several are made."""
_WARM_TIMES: Final = 100
_WARM_SECONDS: Final = 600.0


def cache_seconds(took: float, most_seconds: float) -> float:
    """For how many seconds a result that took `took` seconds is kept; 0: not at all.

    A hundred times as long, at most `most_seconds` (0: never), unless even that is too often: computing takes no more
    than a tenth of the time at any load. Cheap results are not kept.
    """
    if not most_seconds or took <= _CHEAP_SECONDS:
        return 0.0
    return max(min(most_seconds, _TIMES_AS_LONG * took), _LEAST_TIMES * took)


@dataclass(frozen=True, slots=True)
class Cached(Generic[T]):
    """A result of another worker, and until when (of the host's monotonic clock) it is valid."""

    value: T
    expires_at: float


class Claim(Protocol):
    """The right to compute a result, for which the other workers of the host wait."""

    def end(self) -> None: ...


class HostCache(Protocol[T]):
    """Results that the workers of a host share. Its methods block on the disk."""

    def look(self, key: str, now: float) -> Cached[T] | Claim | None:
        """The result if another worker has it, else the claim to compute it; None while another has the claim."""

    def put(self, key: str, expires_at: float, value: T) -> None:
        """Share a result, for which this worker has the claim."""


@dataclass(slots=True, eq=False)
class _Demand:
    """How often a key was requested, in this second and in the one before."""

    since: float
    count: int = 0
    before: int = 0

    def note(self, now: float) -> None:
        if now - self.since >= 1.0:
            self.before = self.count if now - self.since < 2.0 else 0
            self.since, self.count = now, 0
        self.count += 1

    @property
    def is_popular(self) -> bool:
        return max(self.count, self.before) >= _POPULAR_PER_SECOND


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    task: asyncio.Task[T]
    demand: _Demand
    expires_at: float = 0.0
    expensive: bool = False


class SingleFlightCache(Generic[T]):
    """Computes each result once for concurrent requests, and keeps it for `cache_seconds`.

    A popular result is kept for a second, however cheap it is. Popular and expensive ones are computed by one worker
    for all of its `host`.
    """

    def __init__(
        self, most_seconds: float, host: HostCache[T] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_seconds = most_seconds
        self._host = host if most_seconds else None
        self._clock = clock
        self._entries: dict[str, _Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: str, compute: Callable[[], Awaitable[T]]) -> T:
        """The result for a key, from `compute` unless it is being computed or kept."""
        entry, now = self._entries.get(key), self._clock()
        demand = entry.demand if entry is not None else _Demand(now)
        demand.note(now)
        if entry is None or (entry.task.done() and now >= entry.expires_at):
            expensive = entry is not None and entry.expensive
            task = asyncio.create_task(self._compute(key, compute, shared=expensive or demand.is_popular))
            entry = self._entries[key] = _Entry(task, demand, expensive=expensive)
        # A caller that is cancelled must not cancel the computation of the others.
        return await asyncio.shield(entry.task)

    async def _compute(self, key: str, compute: Callable[[], Awaitable[T]], *, shared: bool) -> T:
        claim = await self._claim(self._host, key) if shared and self._host is not None else None
        if isinstance(claim, Cached):
            self._entries[key].expires_at = claim.expires_at
            return claim.value
        try:
            began = self._clock()
            value = await compute()
            expires_at = self._keep(key, began)
            if self._host is not None and claim is not None and expires_at:
                await self._share(self._host, key, expires_at, value)
        except BaseException:
            self._entries.pop(key, None)
            raise
        finally:
            if claim is not None:
                claim.end()
        self._evict()
        return value

    async def _claim(self, host: HostCache[T], key: str) -> Cached[T] | Claim | None:
        """The result of another worker, else the claim to compute it; None when neither is available in time."""
        deadline = self._clock() + _CLAIM_TIMEOUT_SECONDS
        try:
            while (claim := await asyncio.to_thread(host.look, key, self._clock())) is None:
                if self._clock() > deadline:
                    break
                await asyncio.sleep(_POLL_SECONDS)
        except OSError as error:
            log.warning("results are not shared among the workers of this host: %s", error)
            return None
        return claim

    async def _share(self, host: HostCache[T], key: str, expires_at: float, value: T) -> None:
        try:
            await asyncio.to_thread(host.put, key, expires_at, value)
        except OSError as error:
            log.warning("a result is not shared with the other workers of this host: %s", error)

    def _keep(self, key: str, began: float) -> float:
        """Until when the result that was just computed is kept; 0: it is not."""
        now = self._clock()
        seconds = cache_seconds(now - began, self._most_seconds)
        entry = self._entries[key]
        entry.expensive = seconds > 0
        if entry.demand.is_popular:
            seconds = max(seconds, min(_POPULAR_SECONDS, self._most_seconds))
        entry.expires_at = now + seconds if seconds else 0.0
        return entry.expires_at

    def _evict(self) -> None:
        if len(self._entries) <= _MOST_KEYS:
            return
        now = self._clock()
        self._entries = {
            key: entry for key, entry in self._entries.items() if not entry.task.done() or entry.expires_at > now
        }


class SharedResult(Generic[T]):
    """One result that many views need: computed once for concurrent requests, and kept for `cache_seconds`.

    It may be kept longer than a view: a view that is asked for again and again does not mean to count again each time.
    Where computing takes long no caller waits for it: callers get the last result while the next is computed.
    """

    def __init__(
        self, compute: Callable[[], Awaitable[T]], most_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._compute = compute
        self._most_seconds = most_seconds
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._last: T | None = None
        self._computed_at = 0.0
        self._took = 0.0

    async def get(self) -> T:
        """The result: the kept one, or a new one; while a slow one is computed, the one before."""
        age = self._clock() - self._computed_at
        if self._last is not None:
            if age < cache_seconds(self._took, _SHARED_TIMES * self._most_seconds):
                return self._last
            if self._took >= _SLOW_SECONDS and age < max(_OUTDATED_SECONDS, _OUTDATED_TIMES * self._took):
                self._flight()
                return self._last
        # A caller that is cancelled must not cancel the computation of the others.
        return await asyncio.shield(self._flight())

    @property
    def last(self) -> T | None:
        """The last result, however old; None: there is none."""
        return self._last

    async def keep_warm(self) -> None:
        """Compute it now and then, so that there is an earlier result where it takes long; forever."""
        while True:
            try:
                await self.get()
            except Exception as error:
                # The next caller gets the error.
                log.debug("a shared result could not be computed ahead: %s", error)
            slow = self._took >= _SLOW_SECONDS
            await asyncio.sleep(_WARM_TIMES * self._took if slow else _WARM_SECONDS)

    def _flight(self) -> asyncio.Task[T]:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_retrieve)
        return self._task

    async def _run(self) -> T:
        began = self._clock()
        try:
            value = await self._compute()
        except BaseException:
            self._last = None
            raise
        self._computed_at = self._clock()
        took, cold = self._computed_at - began, self._last is None
        # The first opens a connection and reads tables from disk, so it does not show what the next will take; and what
        # a new server counts, nothing, is soon outdated.
        self._took = 0.0 if cold and took < _SLOW_SECONDS else took
        self._last = value if self._most_seconds else None
        return value


def _retrieve(task: asyncio.Task[T]) -> None:
    """A failure in the background is not reported: the next request computes the result again, and gets the error."""
    if not task.cancelled():
        task.exception()

"""The schedule of retention: which partitions of a queue to check, and when.

Most partitions of a large queue are idle, and cost nothing until the time comes at which they can have something to
remove. That time is found by reading a partition once; notifications of pushes bring it forward.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_PUSHED = 100_000


class Listener:
    """Partitions of a queue that were pushed to since the last `take`, as far as there is capacity for them."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._pushed: set[int] = set()

    def pushed(self, partition_id: int) -> None:
        if self._capacity.left and partition_id not in self._pushed:
            self._capacity.left -= 1
            self._pushed.add(partition_id)

    def take(self) -> set[int]:
        pushed, self._pushed = self._pushed, set()
        self._capacity.left += len(pushed)
        return pushed


class PushListener:
    """Passes pushes on to the listeners of their queues."""

    def __init__(self) -> None:
        self._capacity = Capacity(_MOST_PUSHED)
        self._listeners: dict[int, list[Listener]] = {}

    def listen(self, queue_id: int) -> Listener:
        listener = Listener(self._capacity)
        self._listeners.setdefault(queue_id, []).append(listener)
        return listener

    def stop(self, queue_id: int, listener: Listener) -> None:
        """Remove a listener."""
        listener.take()
        listeners = self._listeners[queue_id]
        listeners.remove(listener)
        if not listeners:
            del self._listeners[queue_id]

    def pushed(self, queue_id: int, partition_id: int) -> None:
        for listener in self._listeners.get(queue_id, ()):
            listener.pushed(partition_id)


AT_ONCE = 0.0
"""A time in the past."""


@dataclass(slots=True)
class Capacity:
    """How many more ids may be kept, by all that share it."""

    left: int


class TimingWheel:
    """Ids on pages, one for each `grain` seconds: 8 bytes for an id, and some 250 for a page that is in use.

    Taking what is due costs as much as there is to take, however much waits on later pages.
    """

    def __init__(self, grain: float, capacity: Capacity) -> None:
        self._grain = grain
        self._capacity = capacity
        self._pages: dict[int, array[int]] = {}
        self._numbers: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, id_: int, at: float) -> bool:
        """Have an id taken at a time, or up to a grain later; False when there is no capacity for it."""
        if not self._capacity.left:
            return False
        number = math.ceil(at / self._grain)
        if number * self._grain < at:
            # The quotient was rounded down to a whole number.
            number += 1
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = array("q")
            heapq.heappush(self._numbers, number)
        page.append(id_)
        self._count += 1
        self._capacity.left -= 1
        return True

    def take(self, now: float) -> list[int]:
        """Remove and return all ids whose time has come."""
        ids: list[int] = []
        while self._numbers and self._numbers[0] * self._grain <= now:
            ids += self._pages.pop(heapq.heappop(self._numbers))
        self._count -= len(ids)
        self._capacity.left += len(ids)
        return ids

    def clear(self) -> None:
        self._capacity.left += self._count
        self._count = 0
        self._pages.clear()
        self._numbers.clear()


PAGE = 1000
UNSETTLED_SECONDS = 60.0
"""For this long after a partition was created, one with a lower id may still be committed."""
_LIFE_SECONDS = 86_400.0
"""After that everything is read again, in case something was missed."""
_MOST_FRESH = 100_000
_BETWEEN_ROUNDS = 60.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What the schedules of a job share: capacity for partitions, and for those that were pushed to recently.

    The former take about 10 bytes each, the latter about 80.
    """

    known: Capacity
    recent: Capacity


class Schedule:
    """When each partition of a queue is to be checked, for one rule. All times are of one clock.

    A run takes what is `due`, then pages of partitions `after` the known ones, and says of each when to `check_again`.
    """

    def __init__(self, seconds: float, memory: Memory, listener: Listener, now: float) -> None:
        # As late as that is not late for a queue that keeps messages for so many seconds, and pages stay few.
        grain = min(max(1.0, seconds / 1000), 60.0)
        self.listener = listener
        self._seconds = seconds
        self._wheel = TimingWheel(grain, memory.known)
        # Also partitions that were pushed to, while they hold something, wherever the other wheel has them.
        self._recent = TimingWheel(grain, memory.recent)
        self._recently_pushed: set[int] = set()
        self.forget(now)

    def forget(self, now: float) -> None:
        """Start over: every partition is read."""
        self._wheel.clear()
        self._recent.clear()
        self._recently_pushed.clear()
        self.listener.take()
        self._listened_since = self._began = self._next_round = now
        self._due_recent: set[int] = set()
        self._only_recent: set[int] = set()
        self._fresh: set[int] = set()
        self._after = self._settled = 0
        self._listed = self._overfull = False

    def due(self, now: float) -> list[int]:
        """Take the partitions that are to be checked now."""
        if now - self._began > _LIFE_SECONDS or (self._overfull and self.after is None and now >= self._next_round):
            self.forget(now)
        # Those of the last run without a `check_again` no longer exist.
        self._recently_pushed -= self._due_recent
        self._listed = False
        self._take_pushed(now)
        ids = self._wheel.take(now)
        self._due_recent = {*self._recent.take(now)}
        self._only_recent = self._due_recent.difference(ids)
        return [*ids, *self._only_recent]

    @property
    def after(self) -> int | None:
        """After which id to search for unknown partitions; None: not now."""
        return None if self._overfull and self._after == 0 else self._after

    def add_page(self, page: Sequence[tuple[int, bool]], now: float) -> tuple[list[int], bool]:
        """Add a page of partitions (id, settled) after `after`; returns those to check, and whether it was the last."""
        ids = [id_ for id_, _ in page if id_ not in self._fresh]
        self._only_recent.difference_update(ids)
        if not self._overfull:
            # With very many new ones, those committed late are found the next day.
            few = len(self._fresh) < _MOST_FRESH
            self._fresh.update(id_ for id_, settled in page if few and not settled)
            self._settled = max([self._settled, *(id_ for id_, settled in page if settled or not few)])
        self._listed = len(page) < PAGE
        if not self._listed:
            self._after, _ = page[-1]
            return ids, False
        self._fresh = {id_ for id_ in self._fresh if id_ > self._settled}
        self._after = self._settled
        self._next_round = now + _BETWEEN_ROUNDS
        return ids, True

    def check_again(self, partition_id: int, pause: float, now: float, *, empty: bool) -> None:
        """When to check a partition next; with no pause, in the next run. `empty`: nothing in it can become due."""
        at = now + pause if pause > 0 else AT_ONCE
        if partition_id not in self._only_recent and not self._overfull:
            self._put(partition_id, at)
        if partition_id in self._due_recent:
            self._due_recent.discard(partition_id)
            if empty or not self._recent.put(partition_id, at):
                self._recently_pushed.discard(partition_id)

    def _take_pushed(self, now: float) -> None:
        for id_ in self.listener.take() - self._recently_pushed:
            if not self._recent.put(id_, self._listened_since + self._seconds):
                break
            self._recently_pushed.add(id_)
        self._listened_since = now

    def _put(self, partition_id: int, at: float) -> None:
        if self._wheel.put(partition_id, at):
            return
        # Without capacity for all, none is kept: then all are read one after the other, once a minute.
        self._wheel.clear()
        self._fresh.clear()
        self._settled = 0
        self._overfull = True
        if self._listed:
            self._after = 0

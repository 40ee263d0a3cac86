"""Lanes: which partitions have messages for a group, known without a query.

A lane is one group on one queue as one worker sees it: partitions that are ready, longest first; partitions that are
held (leased, or not due yet) and until when; and the pops that wait. Pushes, acks and the other workers keep it up to
date; a slow scan corrects it. It may be wrong in one direction only: a partition it calls ready may turn out not to be.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice

from queen.broker.pop.requests import Pop
from queen.log.catalog import Queue

UNKNOWN = 1 << 30
_MOST_CURSORS = 200_000
_FEW_STALE = 64
_FEWEST_SWEPT = 4096


class Lane:
    """One group on one queue, as one worker sees it."""

    __slots__ = (
        "claiming",
        "conflates",
        "conflation_known",
        "cursors",
        "dropped",
        "freed",
        "freed_since_read",
        "group_id",
        "group_name",
        "held",
        "held_with_messages",
        "nonblocking",
        "not_due",
        "plain",
        "queue",
        "queue_id",
        "queue_name",
        "reads",
        "ready",
        "scan_after",
        "scan_again",
        "scanned_at",
        "scanning",
        "since",
        "stale",
        "subscribed",
        "targeted",
        "total_partitions",
        "unannounced",
        "unresolved",
        "used_at",
        "waiting",
    )

    def __init__(self, queue_id: int, queue_name: str, group_id: int, group_name: str) -> None:
        # The queue with the options it had when the lane was made.
        self.queue: Queue | None = None
        self.queue_id = queue_id
        self.queue_name = queue_name
        self.group_id = group_id
        self.group_name = group_name
        self.ready: dict[int, int] = {}
        # Ready as far as this worker knows, but another one has since consumed all that it found there.
        self.stale: dict[int, int] = {}
        self.held: dict[int, float] = {}
        # Of the held ones, those without a lease: it is only too early for them.
        self.not_due: set[int] = set()
        # Of the held ones, those that are known to have messages.
        self.held_with_messages: set[int] = set()
        self.claiming: set[int] = set()
        self.freed: set[int] = set()
        # How many reads from PostgreSQL run, and whose leases have ended meanwhile: what is read may be from before.
        self.reads = 0
        self.freed_since_read: set[int] = set()
        # Those whose lease ended without a notification to the other workers, as a pop that waits here will take them.
        self.unannounced: set[int] = set()
        self.cursors: set[int] = set()
        # Notifications do not reach it any more; a pop that comes back to it enters again.
        self.dropped = False
        self.waiting: deque[Pop] = deque()
        # The pops here that do not wait. There are few.
        self.nonblocking: set[Pop] = set()
        self.targeted: dict[int, deque[Pop]] = {}
        self.unresolved: dict[str, list[Pop]] = {}
        self.since: datetime | None = None
        # Whether the group gets only the newest message of a partition, and whether that was decided for good.
        self.conflates = False
        self.conflation_known = False
        # Whether the group has no subscription on the queue, so that it starts every partition at its beginning.
        self.plain = False
        # The partitions ("" for all) for which it has been looked up where the group starts.
        self.subscribed: set[str] = set()
        self.scanned_at: float | None = None
        self.scanning = False
        # A scan was asked for while one was under way.
        self.scan_again = False
        self.scan_after = 0
        self.total_partitions = 0
        self.used_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a claim could serve a pop now."""
        if self.waiting and self.ready:
            return True
        return any(id in self.ready and pops for id, pops in self.targeted.items())

    @property
    def parked(self) -> int:
        """How many pops wait here."""
        return (
            len(self.waiting)
            + sum(len(pops) for pops in self.targeted.values())
            + sum(len(pops) for pops in self.unresolved.values())
        )

    def admit(self, pop: Pop) -> None:
        """A pop comes to be served here (and perhaps in other lanes too)."""
        pop.lanes.add(self)
        if not pop.request.wait:
            self.nonblocking.add(pop)

    def forget(self, pop: Pop) -> None:
        """A pop has been answered; it stays in the queue of waiting pops, which skips it."""
        self.nonblocking.discard(pop)

    def nonblocking_pops(self) -> list[Pop]:
        """The pops that do not wait."""
        if self.nonblocking:
            self.nonblocking = {pop for pop in self.nonblocking if not pop.done and self in pop.lanes}
        return list(self.nonblocking)

    def pushed(self, partition_id: int, count: int) -> None:
        """Messages were added to a partition."""
        if partition_id in self.held:
            self.held_with_messages.add(partition_id)
        else:
            self.ready[partition_id] = self.ready.get(partition_id, 0) + count
            self.stale.pop(partition_id, None)

    def mark_stale(self, partition_id: int) -> None:
        """Another worker has consumed all that it saw in a partition: others first."""
        available = self.ready.pop(partition_id, None)
        if available is not None:
            self.stale[partition_id] = available

    def retry_stale(self) -> bool:
        """If nothing else is ready, make a few stale partitions ready: a claim costs no more than a check."""
        if self.ready or not 0 < len(self.stale) <= _FEW_STALE:
            return False
        self.ready, self.stale = self.stale, {}
        return True

    def free(self, partition_id: int, available: int) -> None:
        """A lease on a partition ended; `available` messages wait there."""
        self.held.pop(partition_id, None)
        self.not_due.discard(partition_id)
        if partition_id in self.claiming:
            self.freed.add(partition_id)
        if self.reads:
            self.freed_since_read.add(partition_id)
        if partition_id in self.held_with_messages:
            self.held_with_messages.discard(partition_id)
            available = max(available, 1)
        if available > 0:
            self.ready[partition_id] = max(available, self.ready.get(partition_id, 0))
            self.stale.pop(partition_id, None)

    def hold(self, partition_id: int, until: float, *, not_due: bool = False) -> None:
        """Nothing can be had from a partition before `until` (loop time)."""
        self.held[partition_id] = until
        if not_due:
            self.not_due.add(partition_id)
        else:
            self.not_due.discard(partition_id)
        if self.ready.pop(partition_id, None) is not None or self.stale.pop(partition_id, None) is not None:
            self.held_with_messages.add(partition_id)

    def expire(self, partition_id: int, when: float) -> bool:
        """The hold that was to end at `when` ends, unless it was lifted or lengthened meanwhile."""
        if self.held.get(partition_id) != when:
            return False
        self.held_with_messages.discard(partition_id)
        self.not_due.discard(partition_id)
        del self.held[partition_id]
        self.ready[partition_id] = UNKNOWN
        return True

    def claimed(self, partition_id: int) -> bool:
        """A claim has been answered. Whether a lease ended meanwhile: then the claim may have found it still on."""
        self.claiming.discard(partition_id)
        if partition_id not in self.freed:
            return False
        self.freed.discard(partition_id)
        return True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note leases that end while a scan of ready and leased partitions runs."""
        self.reads += 1
        try:
            yield
        finally:
            self.reads -= 1
            if not self.reads:
                self.freed_since_read.clear()

    def remove(self, partition_id: int) -> list[Pop]:
        """A partition does not exist any more; returns the pops that waited for it, which are to enter again."""
        self.ready.pop(partition_id, None)
        self.stale.pop(partition_id, None)
        self.held.pop(partition_id, None)
        self.not_due.discard(partition_id)
        self.held_with_messages.discard(partition_id)
        self.unannounced.discard(partition_id)
        self.cursors.discard(partition_id)
        return [pop for pop in self.targeted.pop(partition_id, ()) if not pop.done]

    def note_cursor(self, partition_id: int) -> None:
        if len(self.cursors) >= _MOST_CURSORS:
            self.cursors.clear()
        self.cursors.add(partition_id)

    def all_parked(self) -> Iterator[Pop]:
        yield from self.waiting
        for pops in self.targeted.values():
            yield from pops
        for several in self.unresolved.values():
            yield from several

    def abandon(self) -> list[Pop]:
        """Give up all pops that wait here; returns them."""
        parked = [pop for pop in self.all_parked() if not pop.done]
        self.waiting.clear()
        self.targeted.clear()
        self.unresolved.clear()
        return parked

    def sweep(self) -> None:
        """Drop pops that were answered elsewhere or whose client has disconnected."""
        if any(pop.done for pop in self.waiting):
            self.waiting = deque(pop for pop in self.waiting if not pop.done)
        for id, pops in list(self.targeted.items()):
            alive = deque(pop for pop in pops if not pop.done)
            if alive:
                self.targeted[id] = alive
            else:
                del self.targeted[id]
        for name, several in list(self.unresolved.items()):
            still = [pop for pop in several if not pop.done]
            if still:
                self.unresolved[name] = still
            else:
                del self.unresolved[name]


class Holds:
    """When held partitions come free by themselves, over all lanes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Lane, int]] = []
        self._sequence = 0
        self._sweep_at = _FEWEST_SWEPT

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, lane: Lane, partition_id: int, until: float, *, not_due: bool = False) -> None:
        lane.hold(partition_id, until, not_due=not_due)
        self._sequence += 1
        heapq.heappush(self._heap, (until, self._sequence, lane, partition_id))
        if len(self._heap) > self._sweep_at:
            self._sweep()

    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> set[Lane]:
        """End the holds that are over; returns the lanes that got a ready partition by it."""
        touched: set[Lane] = set()
        while self._heap and self._heap[0][0] <= now:
            until, _, lane, partition_id = heapq.heappop(self._heap)
            if lane.expire(partition_id, until):
                touched.add(lane)
        return touched

    def _sweep(self) -> None:
        """Drop holds that were lifted: most leases are acked long before their end, and would accumulate until then."""
        self._heap = [entry for entry in self._heap if entry[2].held.get(entry[3]) == entry[0]]
        heapq.heapify(self._heap)
        self._sweep_at = max(_FEWEST_SWEPT, 2 * len(self._heap))


_MOST_LANES = 10_000
_MOST_LANES_OF_QUEUE = 1_000
"""Beyond it unused lanes are forgotten: what they knew is looked up again. A push to a queue is made
known to all that it has."""


class LaneRegister:
    """Finds lanes by the names of their queue and group, and all that a queue has."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._by_queue: dict[int, list[Lane]] = {}

    def __iter__(self) -> Iterator[Lane]:
        """A snapshot of the lanes: lanes may be added or removed during the iteration."""
        return iter(list(self._lanes.values()))

    def __contains__(self, lane: Lane) -> bool:
        return self._lanes.get((lane.queue_name, lane.group_name)) is lane

    @property
    def parked(self) -> int:
        """How many pops wait in lanes."""
        return sum(lane.parked for lane in self._lanes.values())

    def find(self, queue_name: str, group: str) -> Lane | None:
        return self._lanes.get((queue_name, group))

    def of(self, queue_id: int) -> Sequence[Lane]:
        """The lanes of a queue, one for each group."""
        return self._by_queue.get(queue_id, ())

    def of_group(self, queue_id: int, group_id: int) -> list[Lane]:
        """The lane of a queue and group, if there is one."""
        return [lane for lane in self._by_queue.get(queue_id, ()) if lane.group_id == group_id]

    def open(self, queue: Queue, group_id: int, group: str) -> Lane:
        """The lane of a queue and group, made if there is none."""
        lane = self._lanes.get((queue.name, group))
        if lane is None:
            if len(self._lanes) >= _MOST_LANES:
                self._make_room(self._lanes.values())
            if len(self._by_queue.get(queue.id, ())) >= _MOST_LANES_OF_QUEUE:
                self._make_room(self._by_queue[queue.id])
            lane = self._lanes[queue.name, group] = Lane(queue.id, queue.name, group_id, group)
            lane.queue = queue
            self._by_queue.setdefault(queue.id, []).append(lane)
        return lane

    def _make_room(self, lanes: Collection[Lane]) -> None:
        """Forget a tenth of the lanes, those that were opened first, unless they are in use."""
        idle = (lane for lane in lanes if not lane.parked and not lane.claiming)
        for lane in list(islice(idle, len(lanes) // 10)):
            self.remove(lane)
            lane.dropped = True

    def remove(self, lane: Lane) -> None:
        del self._lanes[lane.queue_name, lane.group_name]
        others = self._by_queue[lane.queue_id]
        others.remove(lane)
        if not others:
            del self._by_queue[lane.queue_id]

    def drop(self, condition: Callable[[Lane], bool]) -> list[Lane]:
        """Remove lanes for good; one that is still referenced is marked as dropped."""
        dropped = [lane for lane in self._lanes.values() if condition(lane)]
        for lane in dropped:
            self.remove(lane)
            lane.dropped = True
        return dropped

    def known(self, queue_names: Sequence[str]) -> tuple[str, ...]:
        """Those of the queues that have a lane, and so exist."""
        there = self.queue_names()
        return tuple([name for name in queue_names if name in there])

    def queue_names(self) -> set[str]:
        return {lane.queue_name for lane in self._lanes.values()}

"""Popping: waiting requests are matched with ready partitions, and one statement leases for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import asyncpg

from queen.broker.events import Event, EventKind, freed, named
from queen.broker.notifications import Handlers, Notifications
from queen.broker.pop.claims import Claim, Claimer
from queen.broker.pop.lanes import UNKNOWN, Holds, Lane, LaneRegister
from queen.broker.pop.matcher import Matcher
from queen.broker.pop.requests import ClosedQueuePops, Pop, PopRequest
from queen.broker.pop.scanner import HoldTimer, LaneScanner, Share
from queen.broker.pop.subscriptions import Subscriptions
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.catalog import Catalog, Queue
from queen.metrics.meter import Meter
from queen.storage.database import Database

log = logging.getLogger(__name__)

_IDLE_LANE_SECONDS = 600.0
_POLL_REST = 9
_PARKED_SECONDS = 0.5
"""A pop that has waited for longer outlives an outage; a younger one is answered 503."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _GroupLookup:
    """A look at what a group is, which has been outdated by a change that was notified of meanwhile."""

    group: str
    outdated: bool = False


class Popper:
    """Serves pops of one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        claimer: Claimer,
        notifications: Notifications,
        on_subscribed: Callable[[int], None],
        meter: Meter,
        *,
        safety_poll: float,
        share: Share,
        default_subscription: str = "",
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._claimer = claimer
        self._notifications = notifications
        self._on_subscribed = on_subscribed
        self._meter = meter
        self._matcher = Matcher(claimer.lease_id)
        self._subscriptions = Subscriptions(database, self._subscribed, default_subscription)
        self._lookups: set[_GroupLookup] = set()
        self._safety_poll = safety_poll
        self._lanes = LaneRegister()
        self._closed = ClosedQueuePops()
        self._holds = Holds()
        self._hold_timer = HoldTimer(self._holds, self._on_lane_ready)
        self._scanner = LaneScanner(
            database, self._holds, self._hold_timer, share, self._kick, self._spawn, safety_poll=safety_poll
        )
        self._active: set[Lane] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._poll_now = asyncio.Event()
        self.paused = False
        self.is_flooded: Callable[[], bool] = lambda: False
        """Whether so many answers wait to be read by clients that there is no memory for more."""

    def start(self) -> None:
        self._spawn(self._safety_polls())

    def pause(self, paused: bool) -> None:
        """While paused, pops are answered empty at once."""
        self.paused = paused
        if paused:
            self.release_parked()

    def release_parked(self) -> None:
        """Answer every parked pop as empty."""
        for lane in self._lanes:
            for pop in list(lane.all_parked()):
                pop.expire()
        for pop in self._closed:
            pop.expire()

    async def stop(self) -> None:
        """Answer every parked pop and end."""
        self.release_parked()
        for task in [*self._tasks, *([self._loop_task] if self._loop_task else [])]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def parked(self) -> int:
        return self._lanes.parked + len(self._closed)

    def parked_by_queue(self) -> dict[str, int]:
        """How many pops wait for each queue, as long as their clients do."""
        found = self._closed.waiting()
        for lane in self._lanes:
            waiting = sum(1 for pop in lane.all_parked() if pop.request.wait and not pop.done)
            if waiting:
                found[lane.queue_name] = found.get(lane.queue_name, 0) + waiting
        return found

    def pop(self, request: PopRequest, render: Callable[[bytes | None], T]) -> asyncio.Future[T]:
        """Pop messages: the future gives the result of `render` for their JSON, or for None when there are none."""
        answer: asyncio.Future[T] = self.begin(request, render).answer
        return answer

    def begin(self, request: PopRequest, render: Callable[[bytes | None], Any]) -> Pop:
        """The same, as a pop that the caller can expire."""
        loop = asyncio.get_running_loop()
        pop = Pop(request, render, loop.create_future(), self._meter)
        queues = request.queues
        if self.paused:
            self._count(pop, self._lanes.known(queues))
            pop.resolve(None)
            return pop
        if self._database.availability.down:
            self._count(pop, self._lanes.known(queues))
            pop.fail(self._database.availability.error())
            return pop
        if request.wait:
            pop.park(loop)
        lane = self._lanes.find(queues[0], request.group) if len(queues) == 1 else None
        if (
            lane is not None
            and request.partition is None
            and lane.scanned_at is not None
            and "" in lane.subscribed
            and (not request.conflation or lane.conflation_known)
        ):
            pop.conflates = lane.conflates
            self._count(pop, queues)
            lane.used_at = loop.time()
            lane.admit(pop)
            lane.waiting.append(pop)
            self._kick(lane)
        else:
            self._spawn(self._enter(pop))
        return pop

    def _count(self, pop: Pop, queue_names: tuple[str, ...]) -> None:
        """Count a request once, for queues that exist: names that were made up are no metrics."""
        if pop.counted is None:
            pop.counted = queue_names
            self._meter.pop_requested(queue_names)

    def handlers(self) -> Handlers:
        """What notifications change about lanes and waiting pops."""
        return {
            EventKind.PUSHED: self._on_pushed,
            EventKind.FREED: self._on_freed,
            EventKind.HELD: self._on_held,
            EventKind.TAKEN: self._on_taken,
            EventKind.PARTITION_GONE: self._on_partition_gone,
            EventKind.RESCAN: self._on_rescan,
            EventKind.QUEUE_CHANGED: self._on_queue_changed,
            EventKind.QUEUE_GONE: self._on_queue_gone,
            EventKind.GROUP_CHANGED: self._on_group_changed,
        }

    def poll(self) -> None:
        """Run the safety poll now."""
        if self.parked:
            self._poll_now.set()

    def leases_ended(self, leases: Sequence[tuple[int, int, int, int]]) -> None:
        """Leases (queue, partition, group, messages available) have ended: offer what they held to waiting pops."""
        # What other workers sent before comes first: that a lease began must not be handled after it has ended.
        self._notifications.drain()
        events = [freed(*lease) for lease in leases]
        self._notifications.handle(events)
        # Where a pop waits here, the partition is taken at once: sending it to others would only make them try.
        takers: dict[tuple[int, int], int] = {}
        unclaimed: list[Event] = []
        for event in events:
            place = (event[1], event[3])
            if place not in takers:
                takers[place] = self._count_waiting(*place, most=len(events))
            takers[place] -= 1
            if takers[place] < 0:
                unclaimed.append(event)
            else:
                for lane in self._lanes.of_group(*place):
                    lane.unannounced.add(event[2])
        self._notifications.send(unclaimed)

    def _on_pushed(self, event: Event) -> None:
        for lane in self._lanes.of(event[1]):
            lane.pushed(event[2], event[4])
            if lane.unresolved:
                self._spawn(self._resolve_partitions(lane))
            if lane.waiting or lane.targeted:
                self._kick(lane)

    def _on_freed(self, event: Event) -> None:
        _, queue_id, partition_id, group_id, available, _ = event
        for lane in self._lanes.of_group(queue_id, group_id):
            lane.free(partition_id, available)
            self._kick(lane)

    def _on_held(self, event: Event) -> None:
        _, queue_id, partition_id, group_id, milliseconds, _ = event
        until = asyncio.get_running_loop().time() + milliseconds / 1000
        for lane in self._lanes.of_group(queue_id, group_id):
            self._holds.add(lane, partition_id, until)
        self._hold_timer.arm()

    def _on_taken(self, event: Event) -> None:
        for lane in self._lanes.of_group(event[1], event[3]):
            if event[2] not in lane.targeted:
                lane.mark_stale(event[2])

    def _on_partition_gone(self, event: Event) -> None:
        for lane in self._lanes.of(event[1]):
            for pop in lane.remove(event[2]):
                self._spawn(self._enter(pop))

    def _on_rescan(self, event: Event) -> None:
        for lane in self._lanes.of(event[1]):
            if lane.scanning:
                # What it finds may be from before.
                lane.scan_again = True
            elif lane.parked:
                lane.scanning = True
                self._spawn(self._find_missed(lane))

    def _on_queue_changed(self, event: Event) -> None:
        # How long its partitions are held depends on its options, and it may be another one than before.
        self._drop_lanes(lambda lane: lane.queue_name == event[5])
        self._admit_waiting(event[5])

    def _on_queue_gone(self, event: Event) -> None:
        self._drop_lanes(lambda lane: lane.queue_name == event[5])

    def _on_group_changed(self, event: Event) -> None:
        self._outdate_lookups(event[5])
        self._drop_lanes(lambda lane: lane.group_name == event[5])

    def _outdate_lookups(self, group: str) -> None:
        for lookup in self._lookups:
            if lookup.group == group:
                lookup.outdated = True

    def _subscribed(self, group: str, change: int) -> None:
        self._outdate_lookups(group)
        # Other workers may believe that the group starts at the beginning: they are to look again.
        self._on_subscribed(change)
        self._notifications.send([named(EventKind.GROUP_CHANGED, group, change)])

    def known_queues(self) -> set[str]:
        """The names of the queues that pops have asked for."""
        return self._lanes.queue_names() | self._closed.queue_names()

    def correct(self, stored: Mapping[str, Queue | None]) -> None:
        """Drop the lanes of queues that are stored otherwise; pops that waited for one of them enter it now."""
        self._drop_lanes(lambda lane: lane.queue_name in stored and lane.queue != stored[lane.queue_name])
        for name, queue in stored.items():
            if queue is not None:
                self._admit_waiting(name, queue)

    def forget_everything(self) -> None:
        self._drop_lanes(lambda lane: True)

    def _count_waiting(self, queue_id: int, group_id: int, most: int) -> int:
        """How many pops of a group wait for a queue at this worker, counted up to `most`."""
        waiting = (pop for lane in self._lanes.of_group(queue_id, group_id) for pop in lane.waiting if not pop.done)
        return sum(1 for _ in itertools.islice(waiting, most))

    async def _enter(self, pop: Pop) -> None:
        """Bring a pop to its lanes, making them as needed."""
        try:
            lanes = []
            closed = []
            for name in pop.request.queues:
                lane = await self._lane(name, pop)
                if lane is not None:
                    lanes.append(lane)
                else:
                    closed.append(name)
            self._count(pop, tuple([lane.queue_name for lane in lanes]))
            if not lanes:
                await self._wait_for_queues(pop, closed)
                return
            if len(lanes) > 1:
                # Priority decides among queues, so what each of them has is known before any is served.
                await asyncio.gather(*(self._scanner.scan(lane) for lane in lanes if lane.scanned_at is None))
            if any(lane.dropped for lane in lanes):
                self._spawn(self._enter(pop))
                return
            if pop.request.partition is None:
                # It may come for a queue that was resumed, and wait in the others already.
                lanes = [lane for lane in lanes if lane not in pop.lanes]
            for lane in lanes:
                lane.admit(pop)
            for lane in lanes:
                if pop.request.partition is not None:
                    await self._target(lane, pop, pop.request.partition)
                else:
                    lane.waiting.append(pop)
                self._kick(lane)
            if closed and pop.request.wait:
                await self._wait_for_queues(pop, closed)
        except (QueenError, asyncpg.PostgresError) as error:
            pop.fail(error)

    async def _wait_for_queues(self, pop: Pop, names: Sequence[str]) -> None:
        """Wait until one of these queues, which are missing or paused, is created or resumed."""
        if not pop.request.wait:
            pop.resolve(None)
            return
        for name in names:
            self._closed.add(name, pop)
        for name in names:
            # It may have been created or resumed, and notified of, just before the pop began to wait for it.
            queue = await self._catalog.queue(name)
            if queue is not None:
                self._admit_waiting(name, queue)

    def _admit_waiting(self, name: str, queue: Queue | None = None) -> None:
        """A queue exists, or was resumed: pops that wait for it enter again, unless it is known to be paused."""
        for pop in self._closed.leave(name, queue):
            self._spawn(self._enter(pop))

    async def _lane(self, queue_name: str, pop: Pop) -> Lane | None:
        lane = self._lanes.find(queue_name, pop.request.group)
        partition = pop.request.partition or ""
        undecided = pop.request.conflation is True and not (lane is not None and lane.conflation_known)
        if lane is None or partition not in lane.subscribed or undecided:
            wanted = pop.request.conflation or self._subscriptions.are_wanted(pop)
            if not wanted and await self._catalog.queue(queue_name) is None:
                # A group that only ever asked for what does not exist leaves nothing behind.
                return None
            while True:
                with self._looking_up(pop.request.group) as lookup:
                    group_id = await self._catalog.group(pop.request.group)
                    since, plain, conflates = await self._subscriptions.place(queue_name, group_id, pop)
                    queue = await self._catalog.queue(queue_name)
                # A group may have been deleted, or begin elsewhere, since that was read.
                if not lookup.outdated:
                    break
            pop.conflates = conflates
            if queue is None or queue.is_paused_for(pop.request.group):
                return None
            lane = self._lanes.open(queue, group_id, pop.request.group)
            lane.since, lane.plain = since, plain
            lane.conflates, lane.conflation_known = conflates, pop.request.conflation is True or conflates
            lane.subscribed.add(partition)
        pop.conflates = lane.conflates
        lane.used_at = asyncio.get_running_loop().time()
        return lane

    @contextlib.contextmanager
    def _looking_up(self, group: str) -> Iterator[_GroupLookup]:
        """While it is read what a group is, and where it starts."""
        lookup = _GroupLookup(group)
        self._lookups.add(lookup)
        try:
            yield lookup
        finally:
            self._lookups.discard(lookup)

    async def _target(self, lane: Lane, pop: Pop, partition_name: str) -> None:
        """Wait for one partition; its first look is always at PostgreSQL."""
        queue = await self._catalog.queue(lane.queue_name)
        partition = await self._catalog.partition(queue, partition_name) if queue else None
        # Before anything is decided: a notification that waits may be that this lane is no more.
        self._notifications.drain()
        if lane.dropped:
            self._spawn(self._enter(pop))
            return
        if partition is None and pop.request.wait:
            lane.unresolved.setdefault(partition_name, []).append(pop)
            # It may have been created, and notified of, just before the pop began to wait for it.
            partition = await self._catalog.partition(queue, partition_name) if queue else None
            waiting = lane.unresolved.get(partition_name, [])
            if partition is None or pop not in waiting:
                return
            waiting.remove(pop)
        if partition is None:
            pop.resolve(None)
            return
        lane.targeted.setdefault(partition.id, deque()).append(pop)
        lane.held.pop(partition.id, None)
        lane.stale.pop(partition.id, None)
        lane.ready.setdefault(partition.id, UNKNOWN)

    async def _resolve_partitions(self, lane: Lane) -> None:
        """A partition that pops wait for by name may exist now."""
        waiting, lane.unresolved = lane.unresolved, {}
        for name, pops in waiting.items():
            for pop in pops:
                if not pop.done:
                    try:
                        await self._target(lane, pop, name)
                    except DatabaseUnavailable:
                        if lane.dropped:
                            self._spawn(self._enter(pop))
                        else:
                            # The next look may find it; until then it waits as before.
                            lane.unresolved.setdefault(name, []).append(pop)
                    except (QueenError, asyncpg.PostgresError) as error:
                        pop.fail(error)
        self._kick(lane)

    def _kick(self, lane: Lane) -> None:
        """Serve a lane's pops, if there is anything to serve or to find out."""
        self._active.add(lane)
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Claim as long as pops wait where partitions are ready; one statement at a time."""
        try:
            while self._active:
                claims = self._match()
                if claims and self.is_flooded():
                    self._refuse(claims)
                elif claims:
                    await self._claim(claims)
        finally:
            self._loop_task = None

    def _match(self) -> list[Claim]:
        """Give ready partitions to waiting pops. Lanes that have nothing to match leave the active set."""
        claims: list[Claim] = []
        lanes = sorted(self._active, key=self._urgency) if len(self._active) > 1 else list(self._active)
        for lane in lanes:
            if not lane.has_work:
                self._notifications.drain()
                if lane.waiting:
                    lane.retry_stale()
            before = len(claims)
            if lane.has_work and not self.paused:
                self._matcher.match(lane, claims)
            if len(claims) == before and not lane.claiming:
                # Nothing can be had here until something happens. What happens, even while the other lanes are being
                # looked at, kicks it again.
                self._active.discard(lane)
                if lane.unannounced:
                    self._announce_freed(lane, list(lane.unannounced))
                if not lane.has_work:
                    self._scanner.settle_empty(lane)
            if len(claims) >= self._matcher.most_claims:
                break
        return claims

    def _refuse(self, claims: Sequence[Claim]) -> None:
        """Fail pops with 503 without leasing: there is no memory for more answers."""
        for claim in claims:
            claim.lane.claimed(claim.partition_id)
            claim.lane.ready.setdefault(claim.partition_id, UNKNOWN)
            for pop in claim.pops:
                pop.fail(Overloaded("clients leave too many answers unread; nothing was leased, try again soon"))

    def _announce_freed(self, lane: Lane, partitions: Sequence[int]) -> None:
        """No pop here has leased these, which the other workers believe to be leased."""
        lane.unannounced.difference_update(partitions)
        self._notifications.send([freed(lane.queue_id, id, lane.group_id, lane.ready.get(id, 0)) for id in partitions])

    def _urgency(self, lane: Lane) -> int:
        queue = self._catalog.cached_queue(lane.queue_name)
        return -queue.priority if queue else 0

    async def _claim(self, claims: list[Claim]) -> None:
        try:
            await self._claimer.run(claims)
        except Exception as error:
            # Whatever it was, its pops are answered with it, and the others are served as before.
            if not isinstance(error, QueenError | asyncpg.PostgresError):
                log.exception("batch of %d claims failed", len(claims))
            for claim in claims:
                claim.lane.claimed(claim.partition_id)
                claim.lane.ready.setdefault(claim.partition_id, UNKNOWN)
                for pop in claim.pops:
                    if isinstance(error, DatabaseUnavailable) and pop.is_parked(_PARKED_SECONDS):
                        # It has been waiting, and goes on waiting.
                        self._retry(claim, pop)
                    else:
                        pop.fail(error)
            if isinstance(error, DatabaseUnavailable):
                await asyncio.sleep(0.1)
            return
        self._matcher.learn(claims)
        now = asyncio.get_running_loop().time()
        for claim in claims:
            lane = claim.lane
            if lane.claimed(claim.partition_id):
                # A lease ended since: the one that was in the way, or already the one that was given out.
                lane.ready.setdefault(claim.partition_id, UNKNOWN)
            elif claim.hold_for > 0:
                self._holds.add(lane, claim.partition_id, now + claim.hold_for, not_due=claim.not_due)
                if claim.left > 0:
                    lane.held_with_messages.add(claim.partition_id)
            elif claim.left > 0:
                lane.ready[claim.partition_id] = max(claim.left, lane.ready.pop(claim.partition_id, 0))
            if claim.partition_id in lane.unannounced:
                if claim.lease_id and claim.end > 0 and claim.hold_for > 0:
                    lane.unannounced.discard(claim.partition_id)
                else:
                    self._announce_freed(lane, [claim.partition_id])
        for claim in claims:
            for pop in claim.pops:
                self._retry(claim, pop)
            self._active.add(claim.lane)
        self._hold_timer.arm()

    def _retry(self, claim: Claim, pop: Pop) -> None:
        """A pop that got nothing from the partition it was matched with is first in line for the next."""
        lane = claim.lane
        if pop.done or not pop.busy:
            return
        pop.busy = False
        if pop.expired:
            pop.resolve(None)
        elif lane.dropped or (claim.gone and pop.request.partition is not None):
            pop.lanes.discard(lane)
            self._spawn(self._enter(pop))
        elif pop.request.partition is not None:
            lane.targeted.setdefault(claim.partition_id, deque()).appendleft(pop)
        else:
            lane.waiting.appendleft(pop)

    def _on_lane_ready(self, lane: Lane) -> None:
        if lane.parked:
            self._kick(lane)

    async def _safety_polls(self) -> None:
        """The safety poll: finds messages whose notification was lost, and removes idle lanes."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._safety_poll):
                    await self._poll_now.wait()
            self._poll_now.clear()
            now = loop.time()
            for lane in self._lanes:
                if lane not in self._lanes:
                    continue
                lane.sweep()
                if lane.parked and not lane.scanning:
                    lane.scanning = True
                    await self._find_missed(lane)
                elif not lane.parked and not lane.claiming and now - lane.used_at > _IDLE_LANE_SECONDS:
                    self._lanes.remove(lane)
            self._closed.sweep()
            for name in self._closed.queue_names():
                queue = await self._queue_appeared(name)
                if queue is not None:
                    self._admit_waiting(name, queue)
            # However many lanes there are, and however often something is written: a tenth of the time at most.
            await asyncio.sleep(_POLL_REST * (loop.time() - now))

    async def _find_missed(self, lane: Lane) -> None:
        """Find messages of a lane whose notification was lost."""
        await self._scanner.scan(lane)
        if lane.unresolved:
            await self._resolve_partitions(lane)

    async def _queue_appeared(self, name: str) -> Queue | None:
        try:
            return await self._catalog.queue(name)
        except (QueenError, asyncpg.PostgresError):
            return None

    def _drop_lanes(self, condition: Callable[[Lane], bool]) -> None:
        """Forget lanes; their pops enter again and find what is there now."""
        for lane in self._lanes.drop(condition):
            self._active.discard(lane)
            for pop in lane.abandon():
                pop.lanes.discard(lane)
                self._spawn(self._enter(pop))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background step of a pop failed", exc_info=task.exception())

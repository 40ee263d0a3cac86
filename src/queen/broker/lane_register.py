"""The lanes that a worker has: one for each queue and group that is popped here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from queen.broker.catalog import Queue
from queen.broker.lanes import Lane


class LaneRegister:
    """Finds lanes by the names of their queue and group, and all that a queue has."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._by_queue: dict[int, list[Lane]] = {}

    def __iter__(self) -> Iterator[Lane]:
        """Those there are now; lanes may come and go meanwhile."""
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
            lane = self._lanes[queue.name, group] = Lane(queue.id, queue.name, group_id, group)
            lane.queue = queue
            self._by_queue.setdefault(queue.id, []).append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        del self._lanes[lane.queue_name, lane.group_name]
        others = self._by_queue[lane.queue_id]
        others.remove(lane)
        if not others:
            del self._by_queue[lane.queue_id]

    def drop(self, doomed: Callable[[Lane], bool]) -> list[Lane]:
        """Remove lanes for good: whoever still has one finds that it was dropped."""
        dropped = [lane for lane in self._lanes.values() if doomed(lane)]
        for lane in dropped:
            self.remove(lane)
            lane.dropped = True
        return dropped

    def queue_names(self) -> set[str]:
        return {lane.queue_name for lane in self._lanes.values()}

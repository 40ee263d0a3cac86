"""Pushes that this worker hears of, its own and those of others, for the jobs that want to know."""

from __future__ import annotations

_MOST_HEARD = 100_000


class Ears:
    """Keeps the ids of partitions that were pushed to, of the queues that somebody listens to."""

    def __init__(self) -> None:
        self._heard: dict[int, list[set[int]]] = {}

    def listen(self, queue_id: int) -> set[int]:
        """The partitions of a queue that are pushed to from now on; whoever listens empties it."""
        heard: set[int] = set()
        self._heard.setdefault(queue_id, []).append(heard)
        return heard

    def stop(self, queue_id: int, heard: set[int]) -> None:
        """Listen no longer."""
        others = [one for one in self._heard[queue_id] if one is not heard]
        if others:
            self._heard[queue_id] = others
        else:
            del self._heard[queue_id]

    def pushed(self, queue_id: int, partition_id: int) -> None:
        for heard in self._heard.get(queue_id, ()):
            if len(heard) < _MOST_HEARD:
                heard.add(partition_id)

"""Pushes that this worker hears of, its own and those of others, for the jobs that want to know."""

from __future__ import annotations

from queen.broker.janitor.agenda import Room

_MOST_HEARD = 100_000


class Listener:
    """Partitions of a queue that were pushed to since they were last asked for, as far as there is room for them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._heard: set[int] = set()

    def pushed(self, partition_id: int) -> None:
        if self._room.left and partition_id not in self._heard:
            self._room.left -= 1
            self._heard.add(partition_id)

    def take(self) -> set[int]:
        heard, self._heard = self._heard, set()
        self._room.left += len(heard)
        return heard


class Ears:
    """Tells listeners of pushes to their queues."""

    def __init__(self) -> None:
        self._room = Room(_MOST_HEARD)
        self._listeners: dict[int, list[Listener]] = {}

    def listen(self, queue_id: int) -> Listener:
        listener = Listener(self._room)
        self._listeners.setdefault(queue_id, []).append(listener)
        return listener

    def stop(self, queue_id: int, listener: Listener) -> None:
        """Listen no longer."""
        listener.take()
        listeners = self._listeners[queue_id]
        listeners.remove(listener)
        if not listeners:
            del self._listeners[queue_id]

    def pushed(self, queue_id: int, partition_id: int) -> None:
        for listener in self._listeners.get(queue_id, ()):
            listener.pushed(partition_id)

"""Ready queues in the memory of one worker."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from queen.hot.interfaces import TURN_SECONDS, Turn, TurnState
from queen.wire.ready_item import ReadyItem

_place = attrgetter("place")


@dataclass(slots=True)
class _Queue:
    token: str
    items: list[ReadyItem] = field(default_factory=list)
    busy_until: float | None = None
    number: int = 0


class MemoryReadyQueue:
    """Sorted lists, by topic."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    async def open(self, topic: int, token: str) -> None:
        self._queues[topic] = _Queue(token)

    async def begin(self, topic: int, token: str, limit: int) -> Turn:
        queue = self._queues.get(topic)
        if queue is None or queue.token != token:
            return Turn(TurnState.LOST)
        now = time.monotonic()
        if queue.busy_until is not None:
            return Turn(TurnState.BUSY if now < queue.busy_until else TurnState.LOST)
        queue.busy_until = now + TURN_SECONDS
        return Turn(TurnState.YOURS, queue.items[:limit], len(queue.items), queue.number)

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        queue = self._queues.get(topic)
        if queue is None or queue.token != token:
            return 0
        del queue.items[:taken]
        for item in offered:
            bisect.insort(queue.items, item, key=_place)
        queue.number = number
        queue.busy_until = None
        return len(queue.items)

    async def drop(self, topic: int) -> None:
        self._queues.pop(topic, None)

    async def depth(self, topic: int) -> int:
        queue = self._queues.get(topic)
        return len(queue.items) if queue is not None else 0

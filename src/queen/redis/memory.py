"""Counters, keys and ready queues in the memory of one worker, where there is no Redis."""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from queen.redis.interfaces import TURN_SECONDS, Counted, FillTurn, FillTurnState
from queen.wire.topics.items import ReadyItem

MINUTE: Final = 60
_SWEEP_AT_LEAST: Final = 1000


class MemoryCounters:
    """Counts of each second of the last minute, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._sweep_at = _SWEEP_AT_LEAST

    async def add(self, name: str, count: int, limit: int) -> Counted:
        second = int(time.monotonic())
        counts = self._counts.setdefault(name, {})
        for old in [at for at in counts if at <= second - MINUTE]:
            del counts[old]
        used = sum(counts.values())
        if used + count > limit:
            return Counted(False, max(0, limit - used), _wait(counts, second, used + count - limit))
        counts[second] = counts.get(second, 0) + count
        self._sweep(second)
        return Counted(True, limit - used - count, 0)

    def _sweep(self, second: int) -> None:
        """Forget names that were not used for a minute, whenever their number has doubled."""
        if len(self._counts) > self._sweep_at:
            self._counts = {name: c for name, c in self._counts.items() if c and max(c) > second - MINUTE}
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._counts))


def _wait(counts: dict[int, int], second: int, too_many: int) -> int:
    """Seconds until `too_many` of them are older than a minute."""
    for at in sorted(counts):
        too_many -= counts[at]
        if too_many <= 0:
            return max(1, at + MINUTE - second)
    return MINUTE


class MemoryKeys:
    """The keys that were added last, with their expiry."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        now = time.monotonic()
        return {key for key in keys if self._until.get((namespace, key), 0.0) > now}

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        for key in keys:
            self._until[namespace, key] = until
            self._until.move_to_end((namespace, key))
        while len(self._until) > self._most:
            self._until.popitem(last=False)


_place = attrgetter("place")
# What an item takes besides its text.
_ITEM_BYTES: Final = 400


@dataclass(slots=True)
class _Queue:
    token: str
    items: list[ReadyItem] = field(default_factory=list)
    busy_until: float | None = None
    number: int = 0


def _held(item: ReadyItem) -> int:
    return len(item.rendered) + _ITEM_BYTES


class MemoryReadyQueue:
    """Sorted lists, by topic."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self.nbytes = 0

    async def open(self, topic: int, token: str) -> None:
        self._forget(topic)
        self._queues[topic] = _Queue(token)

    def drop(self, topic: int, token: str) -> None:
        queue = self._queues.get(topic)
        if queue is not None and queue.token == token:
            self._forget(topic)

    def _forget(self, topic: int) -> None:
        queue = self._queues.pop(topic, None)
        if queue is not None:
            self.nbytes -= sum(_held(item) for item in queue.items)

    async def begin(self, topic: int, token: str, limit: int) -> FillTurn:
        queue = self._queues.get(topic)
        if queue is None or queue.token != token:
            return FillTurn(FillTurnState.LOST)
        now = time.monotonic()
        if queue.busy_until is not None:
            return FillTurn(FillTurnState.BUSY if now < queue.busy_until else FillTurnState.LOST)
        queue.busy_until = now + TURN_SECONDS
        return FillTurn(FillTurnState.YOURS, queue.items[:limit], len(queue.items), queue.number)

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        queue = self._queues.get(topic)
        if queue is None or queue.token != token:
            return 0
        self.nbytes += sum(map(_held, offered)) - sum(map(_held, queue.items[:taken]))
        del queue.items[:taken]
        for item in offered:
            bisect.insort(queue.items, item, key=_place)
        queue.number = number
        queue.busy_until = None
        return len(queue.items)

"""How many messages of a queue may be in flight: received, and neither deleted nor visible again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from queen.http.sqs.errors import SqsError
from queen.http.sqs.queues import MessageStore, SqsQueue

_LOOK_AGAIN_SECONDS: Final = 1.0
_MOST_QUEUES: Final = 100_000


@dataclass(slots=True)
class _Count:
    """How many there were when they were counted, and how many this worker has received since."""

    counted: int
    counted_at: float
    received: int = 0


class InFlightLimit:
    """Messages are counted once in a while, so that the limit is about right and costs little.

    Each worker counts when it has received a twelfth of the limit, and once a second while a queue is close to it.
    """

    def __init__(self, most: int) -> None:
        """`most`: 0 for no limit."""
        self._most = most
        self._step = max(1, most // 12)
        self._counts: dict[int, _Count] = {}

    def received(self, queue: SqsQueue, messages: int) -> None:
        count = self._counts.get(queue.id)
        if count is not None:
            count.received += messages

    async def admit(self, queue: SqsQueue, store: MessageStore, wait: float) -> float | None:
        """How long a receive may still wait for messages; None when it gets none, because too many are in flight.

        Raises `SqsError` where SQS does: for standard queues, by requests that do not wait.
        """
        if not self._most:
            return wait
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while await self._is_full(queue, store):
            left = deadline - loop.time()
            if left > 0:
                await asyncio.sleep(min(left, _LOOK_AGAIN_SECONDS))
            elif wait or queue.is_fifo:
                return None
            else:
                raise SqsError("OverLimit", f"Too many messages in flight: {queue.name} has {self._most} or more.")
        return max(0.0, deadline - loop.time())

    async def _is_full(self, queue: SqsQueue, store: MessageStore) -> bool:
        count, now = self._counts.get(queue.id), time.monotonic()
        if count is not None:
            is_close = count.counted + count.received + 2 * self._step > self._most
            is_due = is_close and now - count.counted_at >= _LOOK_AGAIN_SECONDS
            if count.received < self._step and not is_due:
                return count.counted + count.received >= self._most
        if len(self._counts) >= _MOST_QUEUES:
            self._counts.clear()
        count = self._counts[queue.id] = _Count(await store.in_flight(queue), now)
        return count.counted >= self._most

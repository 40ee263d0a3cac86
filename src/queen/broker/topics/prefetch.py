"""The prefetcher: gives hot topics ready queues, and keeps these from running low."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final

import asyncpg

from queen.background import Errands
from queen.broker.topics.catalog import Topic
from queen.broker.topics.ready import NotReady, ReadyDesk, Seat
from queen.errors import QueenError

log = logging.getLogger(__name__)

_HOT: Final = 20
"""Dequeues with something to give, in a second, that make a topic hot."""
_MOST_SEATS: Final = 200
_AGAIN_SECONDS: Final = 5.0


class Prefetcher:
    """Watches dequeues, and fills ready queues in the background."""

    def __init__(self, desk: ReadyDesk, *, enabled: bool) -> None:
        self._desk = desk
        self._enabled = enabled
        self._second = 0
        self._served: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._busy: set[int] = set()
        self._errands = Errands()
        self._closing = False

    def note(self, topic: Topic) -> None:
        """A dequeue of a topic was given items that were leased one by one."""
        if not self._enabled:
            return
        now = asyncio.get_running_loop().time()
        if int(now) != self._second:
            self._second = int(now)
            self._served.clear()
            self._not_before = {id: at for id, at in self._not_before.items() if at > now}
        served = self._served[topic.id] = self._served.get(topic.id, 0) + 1
        if served >= _HOT and len(self._desk.seats) < _MOST_SEATS and topic.id not in self._not_before:
            self._not_before[topic.id] = now + _AGAIN_SECONDS
            self._spawn(topic.id, self._open(topic))

    def look(self, topic_id: int) -> None:
        """Something was taken from a ready queue, or is there to fill it."""
        seat = self._desk.seats.get(topic_id)
        if seat is not None and seat.depth <= self._desk.size // 2 and not seat.dry:
            self._spawn(topic_id, self._fill(seat))

    def fed(self, topic_id: int) -> None:
        """A topic has new items."""
        seat = self._desk.seats.get(topic_id)
        if seat is not None:
            seat.dry = False

    async def stop(self) -> None:
        self._closing = True
        await self._errands.finish()

    async def _open(self, topic: Topic) -> None:
        if await self._desk.open(topic):
            await self._fill(self._desk.seats[topic.id])

    async def _fill(self, seat: Seat) -> None:
        try:
            await self._desk.fill(seat)
        except NotReady:
            return
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("the ready queue of %s could not be filled: %s", seat.topic.key, error)

    def _spawn(self, topic_id: int, work: Coroutine[None, None, None]) -> None:
        if topic_id in self._busy or self._closing:
            work.close()
            return
        self._busy.add(topic_id)
        task = self._errands.spawn(work)
        task.add_done_callback(lambda _: self._busy.discard(topic_id))

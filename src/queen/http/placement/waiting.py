"""Pops and dequeues: they may wait, and what they wait for may move meanwhile."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import asyncpg

from queen.broker.broker import Broker
from queen.errors import BadRequest, QueenError
from queen.http.api.messaging import MessagingRoutes
from queen.http.api.params import checked_group
from queen.http.placement.calls import Calls, Handlers, call, with_query
from queen.http.server.message import Request, Response
from queen.http.server.router import Handler
from queen.wire.shards import Name

log = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 2.0
_LONGEST_NAP: Final = 0.25
_SHORTEST_NAP: Final = 0.01


class Head(NamedTuple):
    """Queues of one priority (as a number that sorts the highest first) on one shard."""

    priority: int
    shard: int
    queues: tuple[str, ...]


class Waiting:
    """Requests that wait where a queue or topic lives, and move with it."""

    def __init__(self, calls: Calls, brokers: Sequence[Broker]) -> None:
        self._calls = calls
        self._brokers = brokers
        self._messaging = [MessagingRoutes(broker) for broker in brokers]
        self._directory = calls.directory
        self._default_timeout_ms = brokers[0].settings.default_timeout
        self._turn = 0

    async def by_name(self, handlers: Handlers, request: Request, name: Name) -> Response:
        """The answer of the shard that has it, for as long as it has it."""
        if not request.query_bool("wait", False):
            return await self._calls.by_name(handlers, request, name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout(request)
        while True:
            shard = await self._directory.find(name)
            left = max(0, round(1000 * (deadline - loop.time())))
            answer = await self._while_there(handlers[shard], with_query(request, timeout=left), name, shard)
            if answer is not None:
                return answer

    async def anywhere(self, handlers: Handlers, request: Request) -> Response:
        """Pop from the queues of a namespace or task, wherever they live; those of higher priority first."""
        namespace, task = request.query.get("namespace", ""), request.query.get("task", "")
        if not namespace and not task:
            raise BadRequest("namespace or task is required (or pop one queue at /api/v1/pop/queue/<queue>)")
        checked_group(request.query.get("consumerGroup"))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout(request)
        once, nap, read_at = with_query(request, wait="false"), _SHORTEST_NAP, -math.inf
        heads: list[Head] = []
        while True:
            if loop.time() - read_at > _REFRESH_SECONDS:
                heads, read_at = await self._heads(namespace, task), loop.time()
            response = await self._first(heads, once)
            left = deadline - loop.time()
            if response.status != 204 or not request.query_bool("wait", False) or left <= 0 or request.disconnected:
                return response
            await asyncio.sleep(min(nap, left))
            nap = min(_LONGEST_NAP, nap * 2)

    async def _heads(self, namespace: str, task: str) -> list[Head]:
        """What each shard has of each priority, the highest first. Raises when no shard can tell."""
        found: dict[tuple[int, int], list[str]] = {}
        failures: list[QueenError] = []
        for shard, broker in enumerate(self._brokers):
            try:
                queues = await broker.catalog.all_queues()
            except QueenError as error:
                failures.append(error)
                continue
            for queue in queues:
                if (not namespace or queue.namespace == namespace) and (not task or queue.task == task):
                    found.setdefault((-queue.priority, shard), []).append(queue.name)
        if len(failures) == len(self._brokers):
            raise failures[0]
        heads = [Head(priority, shard, tuple(names)) for (priority, shard), names in found.items()]
        heapq.heapify(heads)
        return [heapq.heappop(heads) for _ in range(len(heads))]

    async def _first(self, heads: Sequence[Head], request: Request) -> Response:
        """The first that has something; among those of one priority another one begins each time."""
        self._turn += 1
        for _, level in itertools.groupby(heads, key=lambda head: head.priority):
            some = list(level)
            for place in range(len(some)):
                head = some[(self._turn + place) % len(some)]
                try:
                    response = await self._messaging[head.shard].pop_from(request, head.queues, None)
                except (QueenError, asyncpg.PostgresError) as error:
                    log.debug("shard %d is left out of a pop: %s", head.shard, error)
                    continue
                if response.status != 204:
                    return response
        return Response(204)

    async def _while_there(self, handler: Handler, request: Request, name: Name, shard: int) -> Response | None:
        """The answer; None when the name has left that shard before there was one."""
        asking = asyncio.ensure_future(call(handler, request))
        request.on_disconnect(asking.cancel)
        while True:
            moved = asyncio.ensure_future(self._directory.changed().wait())
            try:
                await asyncio.wait({asking, moved}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                asking.cancel()
                raise
            finally:
                moved.cancel()
            if asking.done():
                return asking.result()
            if await self._directory.find(name) == shard:
                continue
            # Whoever asks here is told that the client has gone, and gives back what it may have claimed.
            request.disconnect()
            await asyncio.wait({asking})
            if not asking.cancelled() and asking.exception() is None:
                return asking.result()
            return None

    def _timeout(self, request: Request) -> float:
        return max(0, request.query_int("timeout", self._default_timeout_ms)) / 1000

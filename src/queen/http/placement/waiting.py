"""Pops and dequeues: they may wait, and what they wait for may move meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final

import asyncpg

from queen.errors import BadRequest, QueenError
from queen.http.message import Request, Response
from queen.http.placement.calls import Calls, Handlers, call, with_query
from queen.http.router import Handler
from queen.wire.shards import Name

_LONGEST_NAP: Final = 0.25
_SHORTEST_NAP: Final = 0.01


class Waiting:
    """Requests that wait where a queue or topic lives, and move with it."""

    def __init__(self, calls: Calls, default_timeout_ms: int) -> None:
        self._calls = calls
        self._directory = calls.directory
        self._default_timeout_ms = default_timeout_ms
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
        """Pop from the queues of a namespace or task: each shard is asked for what it has, in turn."""
        if not request.query.get("namespace") and not request.query.get("task"):
            raise BadRequest("namespace or task is required (or pop one queue at /api/v1/pop/queue/<queue>)")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout(request)
        nap = _SHORTEST_NAP
        once = with_query(request, wait="false")
        while True:
            response = await self._round(handlers, once)
            left = deadline - loop.time()
            if response.status != 204 or not request.query_bool("wait", False) or left <= 0:
                return response
            if request.disconnected:
                return response
            await asyncio.sleep(min(nap, left))
            nap = min(_LONGEST_NAP, nap * 2)

    async def _round(self, handlers: Handlers, request: Request) -> Response:
        """The first shard that has something; another one begins each time."""
        self._turn += 1
        response = Response(204)
        failures: list[Exception] = []
        for place in range(len(handlers)):
            try:
                response = await call(handlers[(self._turn + place) % len(handlers)], request)
            except BadRequest:
                raise
            except (QueenError, asyncpg.PostgresError) as error:
                failures.append(error)
                continue
            if response.status != 204:
                return response
        if len(failures) == len(handlers):
            raise failures[0]
        return response

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

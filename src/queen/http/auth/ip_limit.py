"""A limit of requests per minute and client address."""

from __future__ import annotations

import inspect
from typing import Final

from queen.errors import RedisUnavailable
from queen.http.server.message import Handler, Headers, Request, Response, error_response
from queen.redis.interfaces import Counted, Counters


class IpLimit:
    """Counts requests by the address they come from; one too many is answered 429. It fails open."""

    def __init__(self, counters: Counters, per_minute: int) -> None:
        self._counters = counters
        self._per_minute = per_minute

    def around(self, handler: Handler) -> Handler:
        """The handler, for those within the limit."""

        async def limited(request: Request) -> Response:
            counted = await self._count(request)
            if not counted.admitted:
                return self._refuse(counted)
            result = handler(request)
            answer = await result if inspect.isawaitable(result) else result
            if counted is _NOT_COUNTED:
                return answer
            # A new one: some handlers give the same answer again and again.
            headers = (*answer.headers, *self._headers(counted))
            return Response(answer.status, answer.body, answer.content_type, headers)

        return limited

    async def refusal(self, request: Request) -> Response | None:
        """Count a request that no handler answers; returns the answer if it is one too many."""
        counted = await self._count(request)
        return None if counted.admitted else self._refuse(counted)

    async def _count(self, request: Request) -> Counted:
        try:
            return await self._counters.add(f"ip:{request.peer}", 1, self._per_minute)
        except RedisUnavailable:
            return _NOT_COUNTED

    def _refuse(self, counted: Counted) -> Response:
        return error_response(
            429,
            f"this address may send {self._per_minute} requests a minute; try again in {counted.wait} s",
            (*self._headers(counted), (b"Retry-After", b"%d" % counted.wait)),
        )

    def _headers(self, counted: Counted) -> Headers:
        return (b"X-RateLimit-Limit", b"%d" % self._per_minute), (b"X-RateLimit-Remaining", b"%d" % counted.left)


_NOT_COUNTED: Final = Counted(True, 0, 0)

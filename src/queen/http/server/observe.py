"""Observes requests: a callback when one begins, another when it ends, around the handler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from queen.http.server.errors import status_for
from queen.http.server.message import Handler, Request, Response

Ended = Callable[[Response | None, BaseException | None], None]
Begin = Callable[[Request], Ended | None]


def watched(handler: Handler, begin: Begin) -> Handler:
    """The handler, with `begin` called for each request, and what it returns called with the response or the error."""

    def serve(request: Request) -> Response | Awaitable[Response]:
        ended = begin(request)
        if ended is None:
            return handler(request)
        try:
            result = handler(request)
        except Exception as error:
            ended(None, error)
            raise
        if isinstance(result, Response):
            ended(result, None)
            return result
        if isinstance(result, asyncio.Future):
            # The future itself is returned, so that cancelling it cancels the work.
            result.add_done_callback(partial(_publish, ended))
            return result
        return _awaited(result, ended)

    return serve


def _publish(ended: Ended, future: asyncio.Future[Response]) -> None:
    if future.cancelled():
        ended(None, asyncio.CancelledError())
        return
    error = future.exception()
    ended(future.result() if error is None else None, error)


async def _awaited(result: Awaitable[Response], ended: Ended) -> Response:
    try:
        response = await result
    except BaseException as error:
        ended(None, error)
        raise
    ended(response, None)
    return response


def status_in(response: Response | None, error: BaseException | None) -> int:
    """The status that a request ended with."""
    if response is not None:
        return response.status
    return status_for(error) if error is not None else 500


log = logging.getLogger(__name__)


class SlowLog:
    """Watches requests, and logs those that took `slow_ms` or longer."""

    def __init__(self, slow_ms: int) -> None:
        self._slow_ms = slow_ms

    def begin(self, request: Request) -> Ended | None:
        # A pop that waits takes long because it was asked to.
        if request.query.get("wait") in ("true", "1"):
            return None
        begun, size = time.perf_counter(), len(request.body)

        def ended(response: Response | None, error: BaseException | None) -> None:
            took = (time.perf_counter() - begun) * 1000
            if took >= self._slow_ms:
                self._log(request, size, status_in(response, error), took)

        return ended

    def _log(self, request: Request, size: int, status: int, took: float) -> None:
        log.warning(
            "slow request: %s %s took %.0f ms and was answered %d",
            request.method,
            request.path,
            took,
            status,
            extra={
                "fields": {
                    "method": request.method,
                    "path": request.path,
                    "status": status,
                    "duration_ms": round(took, 1),
                    "request_bytes": size,
                    "peer": request.peer,
                }
            },
        )

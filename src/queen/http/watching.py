"""Being told of a request when it begins and when it ends, without the handler knowing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from queen.http.errors import status_for
from queen.http.message import Request, Response
from queen.http.router import Handler

Ended = Callable[[Response | None, BaseException | None], None]
Begin = Callable[[Request], Ended | None]


def watched(handler: Handler, begin: Begin) -> Handler:
    """The handler, with `begin` told of each request, and what that returns told of the response or the error."""

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
            # The future itself is handed on, so that whoever cancels it cancels the work.
            result.add_done_callback(partial(_tell, ended))
            return result
        return _awaited(result, ended)

    return serve


def _tell(ended: Ended, future: asyncio.Future[Response]) -> None:
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

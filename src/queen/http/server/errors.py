"""The response to an error: its status, and what of it the client reads."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from queen.errors import (
    BadRequest,
    Conflict,
    DatabaseDown,
    DatabaseUnavailable,
    Forbidden,
    NotFound,
    Overloaded,
    QueenError,
    QuotaExceeded,
)
from queen.http.server.message import Headers, HttpError, Request, Response, error_response, json_response

RETRY_SOON: Final[Headers] = ((b"Retry-After", b"1"),)

log = logging.getLogger(__name__)

_STATUSES: Final[tuple[tuple[type[QueenError], int, Headers], ...]] = (
    (BadRequest, 400, ()),
    (Forbidden, 403, ()),
    (NotFound, 404, ()),
    (Conflict, 409, ()),
    (Overloaded, 503, RETRY_SOON),
    (DatabaseUnavailable, 503, RETRY_SOON),
)


def failure_response(request: Request | None, error: BaseException) -> Response:
    """The response to what a handler raised; what is our fault is logged."""
    if isinstance(error, HttpError):
        return error.response()
    where = f"{request.method} {request.path}" if request is not None else "an upgraded connection"
    if isinstance(error, QueenError):
        status, headers = status_of(error)
        if status >= 500 and not isinstance(error, Overloaded | DatabaseDown):
            # Refusals for too much work are counted, and an outage is logged once: not for each request.
            log.error("%s failed: %s", where, error)
        if isinstance(error, BadRequest | NotFound) and error.code:
            return json_response(status, {"error": str(error), "code": error.code}, headers)
        return error_response(status, str(error), headers)
    log.error("%s failed", where, exc_info=error)
    return error_response(500, "Internal server error")


def status_for(error: BaseException) -> int:
    """The status that whatever a handler raised is answered with."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, QueenError):
        return status_of(error)[0]
    return 503 if isinstance(error, asyncio.CancelledError) else 500


def status_of(error: QueenError) -> tuple[int, Headers]:
    """The status and headers of the response to an error."""
    if isinstance(error, QuotaExceeded):
        return 429, ((b"Retry-After", b"%d" % error.retry_after),)
    for kind, status, headers in _STATUSES:
        if isinstance(error, kind):
            return status, headers
    return 500, ()

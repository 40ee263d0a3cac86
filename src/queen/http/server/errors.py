"""Which status an error of Queen's is answered with."""

from __future__ import annotations

import asyncio
from typing import Final

from queen.errors import (
    BadRequest,
    Conflict,
    DatabaseUnavailable,
    Forbidden,
    NotFound,
    Overloaded,
    QueenError,
    QuotaExceeded,
)
from queen.http.server.message import Headers, HttpError

RETRY_SOON: Final[Headers] = ((b"Retry-After", b"1"),)

_STATUSES: Final[tuple[tuple[type[QueenError], int, Headers], ...]] = (
    (BadRequest, 400, ()),
    (Forbidden, 403, ()),
    (NotFound, 404, ()),
    (Conflict, 409, ()),
    (Overloaded, 503, RETRY_SOON),
    (DatabaseUnavailable, 503, RETRY_SOON),
)


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

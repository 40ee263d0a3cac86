"""What the query of a list says: which page, and from when to when."""

from __future__ import annotations

from datetime import UTC, datetime

from queen.errors import BadRequest
from queen.http.message import Request
from queen.wire.times import parse_time

MOST_ON_A_PAGE = 1000
_FARTHEST = 1 << 53


def read_page(request: Request, default: int, most: int = MOST_ON_A_PAGE) -> tuple[int, int]:
    """`limit` and `offset` of a list; numbers out of range become the nearest that is in it."""
    limit = min(most, max(1, request.query_int("limit", default)))
    offset = min(_FARTHEST, max(0, request.query_int("offset", 0)))
    return limit, offset


def read_time(request: Request, name: str) -> datetime | None:
    """A time in the query; None when it is absent. Raises `BadRequest` when it cannot be read."""
    return time_of(request.query.get(name, ""), name)


def time_of(text: str, name: str) -> datetime | None:
    """A time given as text; None when there is none. Raises `BadRequest` when it cannot be read."""
    if not text:
        return None
    moment = parse_time(text)
    try:
        in_utc = moment.astimezone(UTC) if moment is not None else None
    except OverflowError:
        in_utc = None
    if in_utc is None:
        raise BadRequest(f"{name} must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not {text!r}")
    return in_utc

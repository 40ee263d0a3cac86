"""`from` and `to` in a query."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from queen.broker.watching.time_range import TimeRange
from queen.errors import BadRequest
from queen.http.message import Request
from queen.http.names import query_name
from queen.http.paging import read_time


def read_range(request: Request, hours: int) -> TimeRange:
    """From `from` to `to`; without them, the last hours. Raises `BadRequest` when they make no sense."""
    until = read_time(request, "to") or datetime.now(UTC)
    since = read_time(request, "from")
    if since is None:
        try:
            since = until - timedelta(hours=hours)
        except OverflowError:
            since = datetime.min.replace(tzinfo=UTC)
    if since >= until:
        raise BadRequest(f"from ({since.isoformat()}) must be before to ({until.isoformat()})")
    return TimeRange(since, until)


def read_worker(request: Request) -> tuple[str, int | None]:
    """`hostname` and `workerId`: which workers are asked for; empty and None mean any."""
    host, text = query_name(request, "hostname"), request.query.get("workerId", "")
    if not text:
        return host, None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadRequest(f"workerId must be a whole number, not {text!r}")
    return host, int(text)

"""Names in a path or a query: of queues, partitions, groups, namespaces and tasks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from queen.broker.catalog import QUEUE_MODE
from queen.errors import BadRequest
from queen.http.server.message import Request
from queen.monitoring.history import TimeRange
from queen.wire.push import check_name
from queen.wire.times import parse_time

_KINDS: Final = {"group": "ConsumerGroup"}


def path_name(request: Request, key: str) -> str:
    """The name at `{key}` of the route. Raises `BadRequest` when nothing can be called like this."""
    name = request.params[key]
    check_name(name, _kind(key), f"<{key}> in the path")
    return name


def query_name(request: Request, key: str) -> str:
    """The name that the query gives for `key`; empty when it gives none."""
    name = request.query.get(key, "")
    if name:
        check_name(name, _kind(key), key)
    return name


def _kind(key: str) -> str:
    return _KINDS.get(key, key.capitalize())


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


MOST_BATCH: Final = 10_000


def checked_group(name: str | None) -> str:
    """A pop or an ack makes the group it names, so the name has to be one."""
    if not name:
        return QUEUE_MODE
    check_name(name, "ConsumerGroup", "consumerGroup")
    return name


def starting_point(mode: str, start: str) -> tuple[str, datetime | None]:
    """`subscriptionMode` and `subscriptionFrom` as a mode and a time; no time where the text is not one."""
    if start == "now":
        return "new", None
    return mode, parse_time(start) if start else None

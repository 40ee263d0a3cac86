"""Times as streams use them: whole milliseconds since 1970."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def now_ms() -> int:
    return int(time.time() * 1000)


def to_iso(ms: int) -> str:
    """`2026-04-26T10:59:28.267Z`."""
    moment = _EPOCH + timedelta(milliseconds=ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_iso_ms(text: str) -> int | None:
    """The milliseconds of an ISO-8601 time; one without a zone is UTC. None when it cannot be read."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return datetime_ms(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def datetime_ms(moment: datetime) -> int:
    """The milliseconds of a datetime; one without a zone is local time, as everywhere in Python."""
    return (moment.astimezone(UTC) - _EPOCH) // _MILLISECOND


def any_ms(value: Any) -> int | None:
    """The milliseconds of what an `event_time` function returned: a datetime, a number of them, or ISO-8601 text."""
    if isinstance(value, datetime):
        return datetime_ms(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    return parse_iso_ms(value) if isinstance(value, str) else None

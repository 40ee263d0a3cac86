"""Times as text (ISO-8601 in UTC with a literal Z), and durations (`30 seconds`, `5 min`, `1 hour 30 minutes`)."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final, overload

_PART: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_MILLISECONDS: Final = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
    **dict.fromkeys(("w", "week", "weeks"), 604_800_000),
}
EXPECTED_DURATION: Final = "a length of time such as '30 seconds', '5 minutes' or '1h'"


def iso_micros(moment: datetime) -> str:
    """`2026-04-26T10:59:28.267966Z`, the form of `createdAt` in a pop."""
    return _iso(moment, "microseconds")


@overload
def iso_millis(moment: datetime) -> str: ...


@overload
def iso_millis(moment: None) -> None: ...


@overload
def iso_millis(moment: datetime | None) -> str | None: ...


def iso_millis(moment: datetime | None) -> str | None:
    """`2026-04-26T10:59:28.267Z`, the form everywhere else; None stays None."""
    if moment is None:
        return None
    return _iso(moment, "milliseconds")


def iso_seconds(moment: datetime) -> str:
    """`2026-04-26T10:59:00Z`, the form of stretches of time that are counted together."""
    return _iso(moment, "seconds")


def parse_time(text: str) -> datetime | None:
    """Read an ISO-8601 time; one without a zone is UTC. None when it cannot be read."""
    # A client that does not escape `+` in a query sends `…T10:00:00+02:00` as `…T10:00:00 02:00`.
    for candidate in (text.strip(), "+".join(text.strip().rsplit(" ", 1))):
        try:
            moment = datetime.fromisoformat(candidate)
        except ValueError:
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None


def _iso(moment: datetime, precision: str) -> str:
    # Not strftime: it writes the year 251 with three digits.
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=precision) + "Z"


def duration_ms(text: str) -> int | None:
    """Milliseconds of a duration; None when it cannot be parsed."""
    total, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2].lower() not in _MILLISECONDS:
            return None
        total += float(part[1]) * _MILLISECONDS[part[2].lower()]
        at = part.end()
    return round(total) if text.strip() and math.isfinite(total) else None


def spark_interval(text: str) -> str:
    """A duration in the form of Spark's intervals."""
    found = duration_ms(text)
    if found is None:
        raise ValueError(f"{text!r} is not {EXPECTED_DURATION}")
    return f"{found} milliseconds"

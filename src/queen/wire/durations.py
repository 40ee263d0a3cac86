"""Lengths of time as people write them: `30 seconds`, `5 min`, `1h`, `1 hour 30 minutes`."""

from __future__ import annotations

import re
from typing import Final

_PART: Final = re.compile(r"\s*(\d+)\s*([a-z]+)\s*", re.IGNORECASE)
_MILLISECONDS: Final = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
    **dict.fromkeys(("w", "week", "weeks"), 604_800_000),
}

EXPECTED: Final = "a length of time such as '30 seconds', '5 minutes' or '1h'"


def milliseconds(text: str) -> int | None:
    """How long that is; None when it cannot be read."""
    total, at = 0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2].lower() not in _MILLISECONDS:
            return None
        total += int(part[1]) * _MILLISECONDS[part[2].lower()]
        at = part.end()
    return total if text.strip() else None


def interval(text: str) -> str:
    """The same as Spark reads it."""
    found = milliseconds(text)
    if found is None:
        raise ValueError(f"{text!r} is not {EXPECTED}")
    return f"{found} milliseconds"

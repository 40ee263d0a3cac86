"""Times and durations as people type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

from queen.wire.times import duration_ms

BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)
END_WORDS: Final = frozenset({"now", "end", "latest"})
BEGINNING_WORDS: Final = frozenset({"beginning", "start", "earliest"})

TIME_HELP: Final = "2026-04-26T10:59:28Z, '2026-04-26 10:59', 2026-04-26, unix seconds, now, beginning, 5m, '2h ago'"

_UNIX = re.compile(r"\d{9,13}(?:\.\d+)?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_LONGEST_MILLIS: Final = 100 * 365 * 86_400_000


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """A moment in UTC; a span such as `5m` or `2h ago` counts back from now. Raises `typer.BadParameter`."""
    now = now or datetime.now(UTC)
    word = text.strip().lower()
    if word in END_WORDS:
        return now
    if word in BEGINNING_WORDS:
        return BEGINNING
    if _UNIX.fullmatch(word):
        seconds = float(word)
        # Thirteen digits are milliseconds: as seconds they would be tens of thousands of years ahead.
        return datetime.fromtimestamp(seconds / 1000 if seconds >= 1e12 else seconds, UTC)
    try:
        return _moment(text.strip(), now)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time; try {TIME_HELP}") from None


def _moment(text: str, now: datetime) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        span = duration_ms(text.lower().removesuffix("ago"))
        if span is None:
            raise
        return now - timedelta(milliseconds=span)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def parse_duration(text: str) -> float:
    """Seconds of a duration: `500ms`, `10s`, `1h30m`, or a plain number of seconds. Raises `typer.BadParameter`."""
    word = text.strip()
    span = duration_ms(f"0{word}s" if _NUMBER.fullmatch(word) else word)
    if span is None or span > _LONGEST_MILLIS:
        raise typer.BadParameter(f"{text!r} is not a duration; try 500ms, 10s, 5m, 1h30m or 2d")
    return span / 1000


def iso(moment: datetime) -> str:
    """The moment as the server takes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def optional_time(text: str | None) -> str | None:
    """A time argument as the server takes it; None when it was not given."""
    return None if text is None else iso(parse_time(text))


def age(seconds: float | None) -> str:
    """A span for people: `42s`, `3m12s`, `5h07m`, `2d4h`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"

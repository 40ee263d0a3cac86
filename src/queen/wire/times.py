"""Times on the wire: ISO-8601 in UTC with a literal Z."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload


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

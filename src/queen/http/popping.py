"""What every way of asking for messages has in common."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from queen.broker.catalog import QUEUE_MODE
from queen.wire.push import check_name
from queen.wire.times import parse_time

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

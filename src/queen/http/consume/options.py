"""Parameters of pops, over HTTP or a WebSocket."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from queen.errors import BadRequest
from queen.log.catalog import QUEUE_MODE
from queen.wire.push import check_name
from queen.wire.times import parse_time

MOST_BATCH: Final = 10_000


def checked_group(name: str | None) -> str:
    """The consumer group of a pop or an ack, which is created when it is first named."""
    if not name:
        return QUEUE_MODE
    check_name(name, "ConsumerGroup", "consumerGroup")
    return name


def starting_point(mode: str, start: str) -> tuple[str, datetime | None]:
    """`subscriptionMode` and `subscriptionFrom` as a mode and a time; no time where the text is not one."""
    if start == "now":
        return "new", None
    return mode, parse_time(start) if start else None


def check_conflation(conflation: bool | None, group: str | None, auto_ack: bool) -> None:
    """Refuse a pop whose group could not get only the newest messages."""
    if not conflation:
        return
    if not group:
        raise BadRequest("conflation needs a consumerGroup: it is a policy of the group")
    if auto_ack:
        raise BadRequest("conflation and autoAck exclude each other: the newest message is acknowledged")

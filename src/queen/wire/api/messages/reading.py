"""Structs of the routes that read logs by offset."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from queen.wire.api.fields import CLAMPED, Answer, Count, Query, Uuid

FARTHEST = (1 << 63) - 1
_Offset: TypeAlias = Annotated[int, Meta(ge=0, le=FARTHEST, extra={CLAMPED: True})]


class LogPosition(Answer):
    """The offsets that a partition holds, [firstOffset, nextOffset), and the first that was stored at `at` or later."""

    partition: str
    partition_id: Uuid
    first_offset: Count
    next_offset: Count
    offset_at: Count | None


class LogPositions(Answer):
    """The partitions of a queue, by name."""

    queue: str
    partitions: list[LogPosition]


class PositionsQuery(Query):
    """The time whose offset is looked up."""

    at: Annotated[datetime | None, Meta(description="Return the first offset stored at this time or later.")] = None


class SegmentsQuery(Query):
    """The offsets that are read."""

    start: Annotated[_Offset, Meta(description="The first offset.")] = field(default=0, name="from")
    end: Annotated[_Offset, Meta(description="The end offset, exclusive.")] = field(default=FARTHEST, name="to")

"""Descriptions of reading whole logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from queen.http.openapi.operation import FOUND, Answer, Count, Media, Operation, Parameter, Time, Uuid
from queen.wire.segment import MEDIA_TYPE

_TAG: Final = "Messages"
_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


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


OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/read/{queue}": Operation(
        id="logPositions",
        summary="Where the partitions of a queue begin and end",
        description='For reading whole queues by offset, as `format("queen")` of Spark does.',
        tag=_TAG,
        parameters=(Parameter("at", "Say which offset was the first from this time on.", Time),),
        answers={200: LogPositions},
        errors=FOUND,
    ),
    "GET /api/v1/read/{queue}/partition/{partition}": Operation(
        id="logSegments",
        summary="Messages of a partition by offset, as they are stored",
        description=(
            "Consumes nothing. The answer is binary: segments with many messages each, as many as fit in some megabytes"
            " and at least one. Ask again from the end of the last one; an empty answer means that there are no more."
        ),
        tag=_TAG,
        parameters=(
            Parameter("from", "From this offset on.", _Offset, 0),
            Parameter("to", "Up to this offset, which is excluded.", _Offset),
        ),
        answers={200: Media(MEDIA_TYPE)},
        errors=(404, 409, 503),
    ),
}

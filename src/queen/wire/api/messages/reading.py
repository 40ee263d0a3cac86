"""Structs of the routes that read logs by offset."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Raw, field

from queen.errors import BadRequest
from queen.wire.decode import decoder
from queen.wire.fields import CLAMPED, Answer, Body, Count, Query, Time, Uuid
from queen.wire.push import NameText, check_name

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


MOST_ENTRIES: Final = 1024
MOST_FETCHED: Final = 8 << 20
MOST_CHANGED: Final = 1000
OUT_OF_RANGE: Final = "OFFSET_OUT_OF_RANGE"
UNKNOWN_PARTITION: Final = "UNKNOWN_TOPIC_OR_PARTITION"

_Bytes: TypeAlias = Annotated[
    int, Meta(ge=1, le=FARTHEST, description="At most 8 MiB are read, even if more is requested.")
]


class FetchEntry(Body):
    """A partition, and the offset from which it is read."""

    queue: NameText
    partition: NameText = "Default"
    offset: Annotated[int, Meta(ge=0, le=FARTHEST)] = 0
    max_bytes: _Bytes = MOST_FETCHED


class FetchBody(Body):
    """Partitions to read from; `maxBytes` is for all of them together."""

    entries: list[FetchEntry]
    max_bytes: _Bytes = MOST_FETCHED


class FetchedRecord(Answer):
    """A message at its offset, and when it was stored."""

    offset: Count
    transaction_id: str
    payload: Raw
    ts: Time


class FetchedEntry(Answer):
    """What was read of a partition, in order of the offsets; deleted messages are left out.

    `highWatermark` is the offset that its next message gets, `logStartOffset` the first one that it still holds. An
    offset outside of these is an error, and so is a partition that does not exist.
    """

    queue: str
    partition: str
    records: list[FetchedRecord]
    high_watermark: Count | None = None
    log_start_offset: Count | None = None
    error: Literal["OFFSET_OUT_OF_RANGE", "UNKNOWN_TOPIC_OR_PARTITION"] | None = None


class Fetched(Answer):
    """One entry for each that was requested, in the same order."""

    entries: list[FetchedEntry]


class ChangedEntry(Body):
    """A queue; only partitions that were written to at `since` or later, after the one where the last page ended."""

    queue: NameText
    since: datetime | None = None
    after: Annotated[str, Meta(description="`next` of the page before.")] | None = None
    limit: Annotated[int, Meta(ge=1, description="Partitions per page, at most 1000.")] = MOST_CHANGED


class ChangedBody(Body):
    """Queues whose partitions are requested."""

    entries: list[ChangedEntry]


class ChangedPartition(Answer):
    """A partition: its last offset (-1: none), the first one that it still holds, and when it was last written to."""

    name: str
    id: Uuid
    last_offset: Annotated[int, Meta(ge=-1)]
    log_start: Count
    last_write_at: Time


class ChangedPartitions(Answer):
    """A page of partitions in the order of their creation; `next` is null on the last one."""

    queue: str
    partitions: list[ChangedPartition]
    next: str | None = None
    error: Literal["UNKNOWN_TOPIC_OR_PARTITION"] | None = None


class Changed(Answer):
    """One entry for each that was requested. Every write before `safeTime` is included: it is the next `since`."""

    entries: list[ChangedPartitions]
    safe_time: Time


_fetch: Final = decoder(FetchBody)
_changed: Final = decoder(ChangedBody)


def decode_fetch(body: bytes) -> FetchBody:
    """The body of `POST /api/v1/fetch`."""
    sent: FetchBody = _fetch(body)
    _check_entries(sent.entries)
    for index, entry in enumerate(sent.entries):
        check_name(entry.partition, "Partition", f"entries[{index}].partition")
    return sent


def decode_changed(body: bytes) -> ChangedBody:
    """The body of `POST /api/v1/partitions/changed`."""
    sent: ChangedBody = _changed(body)
    _check_entries(sent.entries)
    for index, entry in enumerate(sent.entries):
        if entry.after is not None and not (entry.after.isascii() and entry.after.isdigit() and len(entry.after) < 19):
            raise BadRequest(f"after must be the `next` of an earlier answer (at entries[{index}].after)")
    return sent


def _check_entries(entries: Sequence[FetchEntry | ChangedEntry]) -> None:
    if len(entries) > MOST_ENTRIES:
        raise BadRequest(f"a request has at most {MOST_ENTRIES} entries, not {len(entries)}")
    for index, entry in enumerate(entries):
        check_name(entry.queue, "Queue", f"entries[{index}].queue")

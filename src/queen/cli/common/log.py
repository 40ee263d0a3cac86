"""Reading the log of a queue from end to end through the server, which consumes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import msgspec

from queen.cli.common.session import Session
from queen.wire.paths import path_of

if TYPE_CHECKING:
    from queen.wire.segment import Frame

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def positions(
    session: Session, queue: str, partition: str | None = None, at: str | None = None
) -> list[dict[str, Any]]:
    """Which offsets the partitions of a queue hold; `offsetAt` is the first that was stored at a time or later."""
    found: list[dict[str, Any]] = session.admin.get_log_positions(queue, at)["partitions"]
    return [place for place in found if partition in (None, place["partition"])]


def read_log(
    session: Session, queue: str, partition: str | None = None, since: str | None = None, until: datetime | None = None
) -> Iterator[dict[str, Any]]:
    """Every message of a queue, partition by partition and in order, from a time on and until another."""
    for place in positions(session, queue, partition, since):
        start = place["firstOffset"] if since is None else place["offsetAt"]
        if start is None:
            continue
        for message in _read_partition(session, queue, place, start):
            if until is not None and message["createdAt"] > until:
                break
            yield {**message, "createdAt": message["createdAt"].isoformat().replace("+00:00", "Z")}


def _read_partition(session: Session, queue: str, place: dict[str, Any], start: int) -> Iterator[dict[str, Any]]:
    from queen.wire.segment import decode_frames

    path = path_of("/api/v1/read", queue, "partition", place["partition"])
    end = place["nextOffset"]
    while start < end:
        reached = start
        for frame in decode_frames(session.queen.download(f"{path}?{urlencode({'from': start, 'to': end})}")):
            reached = frame.base_offset + frame.messages
            yield from _messages(queue, place, frame, start)
        if reached <= start:
            return
        start = reached


def _messages(queue: str, place: dict[str, Any], frame: Frame, start: int) -> Iterator[dict[str, Any]]:
    from queen.wire.envelope import Envelope
    from queen.wire.ids import IdBlock
    from queen.wire.segment import Segment

    created = _EPOCH + timedelta(microseconds=frame.created_micros)
    segment = Segment(frame.base_offset, created, IdBlock.parse(frame.first_id), Envelope().open(frame.body))
    segment.check()
    names = segment.transaction_ids()
    for index in range(max(0, start - frame.base_offset), segment.count):
        if segment.is_deleted(index):
            continue
        yield {
            "queue": queue,
            "partition": place["partition"],
            "partitionId": place["partitionId"],
            "offset": frame.base_offset + index,
            "id": segment.block.text(index),
            "transactionId": names[index],
            "traceId": segment.trace_id(index),
            "producerSub": segment.producer(index),
            "createdAt": created,
            "data": msgspec.json.decode(segment.payload(index)),
        }

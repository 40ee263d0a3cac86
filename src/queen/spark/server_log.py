"""The messages through a server, where PostgreSQL is out of reach."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from queen.errors import DatabaseAway, NotFound, QueenError
from queen.spark.log import Position, Span, StoredSegment
from queen.wire.ids import parse_partition_uuid
from queen.wire.segment_frames import decode_frames
from queen.wire.times import iso_micros

_TIMEOUT_SECONDS: Final = 60


class _Partition(msgspec.Struct, rename="camel"):
    partition: str
    partition_id: str
    first_offset: int
    next_offset: int
    offset_at: int | None


class _Partitions(msgspec.Struct):
    partitions: list[_Partition]


class ServerLog:
    """Reads logs through the routes below /api/v1/read."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def positions(self, queues: Sequence[str]) -> list[Position]:
        return [
            Position(queue, one.partition, *_row(one), one.first_offset, one.next_offset)
            for queue in sorted(queues)
            for one in self._partitions(queue, {})
        ]

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        found: dict[tuple[str, int], int] = {}
        for queue in sorted({position.queue for position in positions}):
            for one in self._partitions(queue, {"at": iso_micros(moment)}):
                if one.offset_at is not None:
                    found[queue, _row(one)[1]] = one.offset_at
        # A partition may have gone, or have grown, since its position was asked for.
        return [min(found.get((position.queue, position.id), position.next), position.next) for position in positions]

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        for slot, span in enumerate(spans):
            at = span.start
            while at < span.end:
                place = f"/{quote(span.queue, safe='')}/partition/{quote(span.partition, safe='')}"
                data = self._get(place, {"from": str(at), "to": str(span.end)})
                before = at
                for frame in decode_frames(data):
                    yield StoredSegment(slot, *frame)
                    at = frame.base_offset + frame.messages
                if at <= before:
                    break

    def _partitions(self, queue: str, query: Mapping[str, str]) -> list[_Partition]:
        return msgspec.json.decode(self._get(f"/{quote(queue, safe='')}", query), type=_Partitions).partitions

    def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        url = f"{self._url}/api/v1/read{path}?{urlencode(query)}"
        request = urllib.request.Request(url, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:1000]
            if error.code == 404:
                raise NotFound(f"{self._url} answered 404: {said}") from error
            raise QueenError(f"{self._url} answered {error.code} to a read: {said}") from error
        except OSError as error:
            raise DatabaseAway(f"the server at {self._url} is not reachable: {error}") from error


def _row(one: _Partition) -> tuple[int, int]:
    """The shard and the row of a partition."""
    found = parse_partition_uuid(one.partition_id)
    if found is None:
        raise QueenError(
            f"the server calls partition {one.partition!r} {one.partition_id!r}, which is no id of Queen's"
        )
    return found

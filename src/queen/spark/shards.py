"""The messages straight from the PostgreSQL shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from queen.errors import NotFound, SettingsError
from queen.spark.connections import ShardConnection, shard_connection
from queen.spark.log import Position, Span, StoredSegment
from queen.spark.stream_offsets import Place


class ShardLog:
    """Reads logs from every shard; a queue lives on one of them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def positions(self, queues: Sequence[str]) -> list[Position]:
        found: list[Position] = []
        for shard in range(len(self._urls)):
            rows = self._fetch(shard, "log_positions", list(queues))
            found += [
                Position(queue, partition, shard, partition_id, first, ends)
                for queue, partition, partition_id, first, ends in rows
            ]
        if len(self._urls) > 1:
            found.sort(key=lambda position: (position.queue, position.partition))
        self._check_places(queues, found)
        return found

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        offsets = [position.next for position in positions]
        try:
            # The statement finds what was stored after a time; times are whole microseconds.
            before = moment - timedelta(microseconds=1)
        except OverflowError:
            before = moment
        for shard in sorted({position.shard for position in positions}):
            here = [number for number, position in enumerate(positions) if position.shard == shard]
            rows = self._fetch(
                shard,
                "offsets_after",
                [positions[number].id for number in here],
                [positions[number].first for number in here],
                [positions[number].next for number in here],
                [before] * len(here),
            )
            for slot, offset in rows:
                offsets[here[slot - 1]] = offset
        return offsets

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        for shard in sorted({span.shard for span in spans}):
            slots = [number for number, span in enumerate(spans) if span.shard == shard]
            yield from self._segments(shard, slots, [spans[number] for number in slots])

    def _segments(self, shard: int, slots: list[int], spans: list[Span]) -> Iterator[StoredSegment]:
        columns = [span.id for span in spans], [span.start for span in spans], [span.end for span in spans]
        for slot, *segment in self.connection(shard).stream("log_spans", *columns):
            yield StoredSegment(slots[slot - 1], *segment)

    def move_group(self, group: str, places: Sequence[Place]) -> None:
        """Have a group stand at these places, each on the shard where its queue is."""
        columns = [place.id for place in places], [place.queue for place in places], [place.offset for place in places]
        for shard in range(len(self._urls)):
            self._fetch(shard, "mirror_group", group, *columns)

    def connection(self, shard: int) -> ShardConnection:
        if shard >= len(self._urls):
            raise SettingsError(f"databaseUrls has {len(self._urls)} shards, and shard {shard} is wanted")
        return shard_connection(self._urls[shard])

    def _fetch(self, shard: int, name: str, *args: Any) -> list[tuple[Any, ...]]:
        return self.connection(shard).fetch(name, *args)

    def _check_places(self, queues: Sequence[str], found: Sequence[Position]) -> None:
        shards: dict[str, set[int]] = {}
        for position in found:
            shards.setdefault(position.queue, set()).add(position.shard)
        for queue, places in shards.items():
            if len(places) > 1:
                raise SettingsError(
                    f"queue {queue!r} has partitions on shards {sorted(places)}: it is just being moved (try again),"
                    " or databaseUrls names other databases or the same one twice"
                )
        absent = [queue for queue in queues if queue not in shards]
        if absent:
            self.check_queues(absent)

    def check_queues(self, queues: Sequence[str]) -> None:
        """Raises `NotFound` for a queue that is on no shard."""
        known = {
            name for shard in range(len(self._urls)) for (name,) in self._fetch(shard, "known_queues", list(queues))
        }
        absent = [queue for queue in queues if queue not in known]
        if absent:
            shards = "the shard" if len(self._urls) == 1 else f"any of the {len(self._urls)} shards"
            raise NotFound(f"there is no queue {', '.join(absent)} on {shards} that databaseUrls names")

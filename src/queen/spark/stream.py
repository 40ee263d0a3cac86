"""Streaming reads: how far there is to go, and what each micro-batch reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from queen.errors import SettingsError
from queen.spark.logs import Position, ShardLog
from queen.spark.offsets import Place, from_json, to_json
from queen.spark.options import LATEST, EdgeKind, ReadOptions, Table
from queen.spark.planning import SpanTask, edge_offsets, share_out, spans_between
from queen.spark.reading import MessageReading, open_log, report_loss


@dataclass
class Mirror:
    """Moves the cursors of a group to the position of a stream. Without a group it does nothing."""

    group: str | None
    log: ShardLog | None
    shown: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ReadOptions) -> Mirror:
        group = options.mirror_group or options.group
        if group is None:
            return cls(None, None)
        if options.access.server is not None:
            raise SettingsError("mirrorGroup needs databaseUrls: a server moves groups to times, not to offsets")
        return cls(group, ShardLog(options.access.database_urls))

    def show(self, places: Sequence[Place]) -> None:
        """The stream is done with everything before these places."""
        if self.group is None or self.log is None:
            return
        moved = [place for place in places if self.shown.get((place.queue, place.id)) != place.offset]
        if not moved:
            return
        self.log.move_group(self.group, moved)
        self.shown |= {(place.queue, place.id): place.offset for place in moved}


log = logging.getLogger(__name__)

_Key = tuple[str, str]


class QueenStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows queues. New partitions are read from their beginning; those that are gone are left out."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.ending is not LATEST:
            raise SettingsError("a stream has no end: endingOffsets and endingTimestamp are for batch reads")
        if options.table is not Table.MESSAGES:
            raise SettingsError(f"messages can be followed; table {options.table} is read in a batch")
        self._options = options
        self._log = open_log(options.access)
        self._fail = options.fail_on_data_loss is not False
        self._reading = MessageReading(options, schema, fail_on_data_loss=self._fail)
        self._mirror = Mirror.of(options)
        self._last_ends: dict[_Key, Position] = {}
        self._target: dict[_Key, Position] | None = None

    def initialOffset(self) -> dict[str, Any]:
        positions = self._log.positions(self._options.queues)
        starts = edge_offsets(self._log, positions, self._options.starting or LATEST, otherwise=EdgeKind.EARLIEST)
        return to_json(
            Place(position.queue, position.partition, position.id, start)
            for position, start in zip(positions, starts, strict=True)
        )

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._look()

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_rows_per_batch
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        places = from_json(start)
        # Everything before the start is done: Spark asks for the next batch once the one before is committed.
        self._mirror.show(places)
        ends = self._look() if self._target is None else self._target
        began = {(place.queue, place.partition): place for place in places}
        self._check_vanished(began, ends)
        starts = {key: self._start(began.get(key), position) for key, position in ends.items()}
        waiting = {key: max(position.next - starts[key], 0) for key, position in ends.items()}
        taken = _limited(waiting, limit.max_rows) if isinstance(limit, ReadMaxRows) else waiting
        self._last_ends = ends
        return to_json(
            Place(position.queue, position.partition, position.id, starts[key] + taken[key])
            for key, position in ends.items()
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        ends = self._target or self._last_ends
        return to_json(
            Place(position.queue, position.partition, position.id, position.next) for position in ends.values()
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        began = {(place.queue, place.partition): place for place in from_json(start)}
        ends = from_json(end)
        # A batch that is done again after a restart is planned before anything else was looked at.
        known = self._last_ends or self._look()
        positions: list[Position] = []
        starts: list[int] = []
        for place in ends:
            position = known.get((place.queue, place.partition))
            if position is None or position.id != place.id:
                began_at = began.get((place.queue, place.partition))
                if began_at is None or began_at.offset < place.offset:
                    report_loss(f"messages of {place.queue}/{place.partition}", fail=self._fail)
                continue
            positions.append(position)
            starts.append(self._start(began.get((place.queue, place.partition)), position))
        upto = {(place.queue, place.partition): place.offset for place in ends}
        stops = [upto[position.queue, position.partition] for position in positions]
        return share_out(spans_between(positions, starts, stops), self._options.max_tasks)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SpanTask)
        return self._reading.read(partition.spans)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read; what this process remembers and is connected to is no business of theirs.
        return {"_reading": self._reading}

    def _look(self) -> dict[_Key, Position]:
        positions = self._log.positions(self._options.queues)
        return {(position.queue, position.partition): position for position in positions}

    def _start(self, place: Place | None, position: Position) -> int:
        """Where to go on in a partition. One that was not there before is read from its beginning."""
        if place is None or place.id != position.id:
            return position.first
        if place.offset < position.first:
            lost = f"offsets {place.offset} to {position.first - 1} of {place.queue}/{place.partition}"
            report_loss(lost, fail=self._fail)
            return position.first
        return place.offset

    def _check_vanished(self, began: Mapping[_Key, Place], ends: Mapping[_Key, Position]) -> None:
        """Partitions are removed when they are empty: that is a loss only where messages had not been read."""
        for key, place in began.items():
            if key in ends and ends[key].id == place.id:
                continue
            last = self._last_ends.get(key)
            if last is not None and last.id == place.id and place.offset < last.next:
                report_loss(
                    f"offsets {place.offset} to {last.next - 1} of {place.queue}/{place.partition}", fail=self._fail
                )
            log.warning("partition %s/%s was removed after offset %d", place.queue, place.partition, place.offset)


def _limited(waiting: Mapping[_Key, int], most: int) -> dict[_Key, int]:
    """So many messages in all, each partition with its share of what waits, and none kept waiting for ever."""
    total = sum(waiting.values())
    if total <= most:
        return dict(waiting)
    taken = {key: count * most // total for key, count in waiting.items()}
    left = most - sum(taken.values())
    # What rounding left over goes, one each, to those that got least: where little waits, it is done the sooner.
    for key in sorted(waiting, key=lambda key: (taken[key], waiting[key])):
        more = min(left, 1, waiting[key] - taken[key])
        taken[key] += more
        left -= more
    return taken

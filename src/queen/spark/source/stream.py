"""Streaming reads: where the logs end, and what each micro-batch reads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from queen.errors import Conflict, NotFound, SettingsError
from queen.spark.options import LATEST, EdgeKind, ReadOptions, Table
from queen.spark.source.logs import QueueEnds, ShardLog, Span
from queen.spark.source.offsets import Numbers, PartitionOffsets, StreamOffset, decode_offset, encode_offset, offsets_of
from queen.spark.source.planning import SpanTask, edge_offsets, queues_to_read, share_out
from queen.spark.source.reading import MessageReading, open_log, report_loss

log = logging.getLogger(__name__)

_NONE: Final = PartitionOffsets(np.empty(0, np.int64), np.empty(0, np.int64))
_MOST_NAMED: Final = 10
# To look at the sizes of so many segments takes a quarter of a second.
_MOST_SEGMENTS: Final = 100_000


@dataclass
class GroupMirror:
    """Moves the cursors of a consumer group to the offsets of a stream. Without a group it does nothing."""

    group: str | None
    log: ShardLog | None
    moved: dict[str, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ReadOptions) -> GroupMirror:
        group = options.mirror_group or options.group
        if group is None:
            return cls(None, None)
        if options.access.server is not None:
            raise SettingsError("mirrorGroup needs databaseUrls: a server moves groups to times, not to offsets")
        return cls(group, ShardLog(options.access.database_urls, options.access.outage_grace))

    def move(self, offset: Mapping[str, PartitionOffsets]) -> None:
        """The stream has processed everything before these offsets."""
        if self.group is None or self.log is None:
            return
        for queue, offsets in offset.items():
            before = self.moved.setdefault(queue, {})
            changed = {
                id: at
                for id, at in zip(offsets.ids.tolist(), offsets.offsets.tolist(), strict=True)
                if before.get(id) != at
            }
            if changed:
                self.log.move_group(self.group, queue, changed)
                before |= changed


class QueenStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows queues. New partitions, and new queues of a pattern, are read from their beginning."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.ending is not LATEST:
            raise SettingsError("a stream has no end: endingOffsets and endingTimestamp are for batch reads")
        if options.table is not Table.MESSAGES:
            raise SettingsError(f"only messages can be streamed; table {options.table} is read in a batch")
        if options.partitions is not None:
            raise SettingsError("option partitions is for batch reads: a stream follows all partitions of its queues")
        self._options = options
        self._log = open_log(options.access)
        self._fail = options.fail_on_data_loss is not False
        self._reading = MessageReading(options, schema, fail_on_data_loss=self._fail)
        self._mirror = GroupMirror.of(options)
        self._initial: dict[str, Any] | None = None
        self._last_ends: list[QueueEnds] | None = None
        self._target: list[QueueEnds] | None = None
        self._reported: set[int] = set()
        self._last_batch = -math.inf
        # Where a batch has no room for all partitions: the place, among all of them, of the one whose turn it is.
        self._turn = 0
        limits = options.limits
        for name, limit in (("maxBytesPerTrigger", limits.max_bytes), ("minBytesPerTrigger", limits.min_bytes)):
            if limit is not None and not isinstance(self._log, ShardLog):
                raise SettingsError(f"{name} needs databaseUrls: a server does not report the sizes of segments")

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks before the first batch, and again to plan it: an end that has moved on by then would leave out what
        # was pushed in between.
        if self._initial is None:
            self._initial = self._find_initial_offset()
        return self._initial

    def _find_initial_offset(self) -> dict[str, Any]:
        starting = self._options.starting or LATEST
        if starting.kind in (EdgeKind.EARLIEST, EdgeKind.LATEST):
            earliest = starting.kind is EdgeKind.EARLIEST
            ends = self._look() if self._target is None else self._target
            return _encode(ends, [one.first if earliest else one.next for one in ends])
        positions = self._log.positions(queues_to_read(self._log, self._options))
        starts = edge_offsets(self._log, positions, starting, otherwise=EdgeKind.EARLIEST)
        queues: dict[str, tuple[list[int], list[int]]] = {}
        # A partition that was created since the target was set is left for the next run.
        known = {id for one in self._target or () for id in one.ids.tolist()}
        for position, start in zip(positions, starts, strict=True):
            if self._target is not None and position.id not in known:
                continue
            ids, offsets = queues.setdefault(position.queue, ([], []))
            ids.append(position.id)
            offsets.append(start)
        return encode_offset({queue: offsets_of(*columns) for queue, columns in queues.items()})

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._look()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark gives it back with every batch, except where it wants all there is; it takes one, whichever it is."""
        limits = self._options.limits
        if limits.max_rows is not None:
            return ReadMaxRows(limits.max_rows)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadMinRows(limits.min_rows or 1) if limits else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        began = decode_offset(start)
        # Everything before the start is processed: Spark requests the next batch once the previous one is committed.
        self._mirror.move(began)
        ends = self._look() if self._target is None else self._target
        self._check_removed(began, ends)
        self._last_ends = ends
        starts = [self._starts(began, one) for one in ends]
        waiting = [np.maximum(one.next - first, 0) for one, first in zip(ends, starts, strict=True)]
        if not isinstance(limit, ReadAllAvailable):
            if self._holds_back(ends, starts, waiting):
                return start
            waiting = self._limited(ends, starts, waiting)
        return _encode(ends, [first + count for first, count in zip(starts, waiting, strict=True)])

    def _holds_back(self, ends: list[QueueEnds], starts: list[Numbers], waiting: list[Numbers]) -> bool:
        """Whether there is too little for a batch. What is available now is all that will come."""
        limits, now = self._options.limits, time.monotonic()
        if (limits.min_rows is None and limits.min_bytes is None) or self._target is not None:
            return False
        rows = sum(int(counts.sum()) for counts in waiting)
        if now - self._last_batch < limits.delay:
            if rows < (limits.min_rows or 0):
                return True
            if limits.min_bytes is not None and self._is_below(limits.min_bytes, ends, starts, waiting):
                return True
        if rows:
            self._last_batch = now
        return False

    def _is_below(self, least: int, ends: list[QueueEnds], starts: list[Numbers], waiting: list[Numbers]) -> bool:
        """Whether the backlog has fewer bytes; with more segments than are examined, it has enough."""
        total = 0
        for segments, first, counts in zip(self._all_sizes(ends, starts, waiting), starts, waiting, strict=True):
            total += int(segments[:, 2].sum())
            listed = first.copy()
            np.maximum.at(listed, segments[:, 0], segments[:, 1])
            if total >= least or (listed < first + counts)[segments[:, 0]].any():
                return False
        return True

    def _limited(self, ends: list[QueueEnds], starts: list[Numbers], waiting: list[Numbers]) -> list[Numbers]:
        limits, turn = self._options.limits, self._turn
        if limits.max_rows is not None:
            waiting, self._turn = _limited_by_rows(waiting, limits.max_rows, turn)
        # A pattern may match no queue yet.
        if limits.max_bytes is None or not ends:
            return waiting
        segments = self._all_sizes(ends, starts, waiting)
        waiting, reached = _limited_by_bytes(starts, waiting, segments, limits.max_bytes, turn)
        self._turn = self._turn if reached is None else reached
        return waiting

    def _all_sizes(self, ends: list[QueueEnds], starts: list[Numbers], waiting: list[Numbers]) -> list[Numbers]:
        """Segments that wait, by queue: so many of each partition that there are not too many."""
        busy = sum(int(np.count_nonzero(counts)) for counts in waiting)
        return [
            self._sizes(one, first, counts, max(1, _MOST_SEGMENTS // max(1, busy)))
            for one, first, counts in zip(ends, starts, waiting, strict=True)
        ]

    def _sizes(self, ends: QueueEnds, starts: Numbers, waiting: Numbers, most: int) -> Numbers:
        """Segments of a queue that wait: the place of their partition, where they end, their bytes."""
        assert isinstance(self._log, ShardLog)
        some = np.flatnonzero(waiting)
        chosen = replace(ends, ids=ends.ids[some], first=ends.first[some], next=ends.next[some])
        rows = self._log.segment_sizes(chosen, starts[some], (starts + waiting)[some], most) if len(some) else []
        found = np.array(rows, np.int64).reshape(-1, 3)
        found[:, 0] = some[found[:, 0]]
        return found

    def reportLatestOffset(self) -> dict[str, Any] | None:
        ends = self._target or self._last_ends or []
        return _encode(ends, [one.next for one in ends])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        began, stops = decode_offset(start), decode_offset(end)
        # A batch that is done again after a restart is planned before anything else was looked up.
        known = {one.queue: one for one in self._last_ends or self._look()}
        spans: list[Span] = []
        for queue, stop in stops.items():
            before = began.get(queue, _NONE).of(stop.ids, np.zeros(len(stop.ids), np.int64))
            if queue not in known:
                self._lost(queue, stop.ids, before, stop.offsets)
                continue
            ends = known[queue]
            here = np.isin(stop.ids, ends.ids)
            self._lost(queue, stop.ids[~here], before[~here], stop.offsets[~here])
            ids, upto = stop.ids[here], stop.offsets[here]
            starts = self._starts(began, ends)[np.searchsorted(ends.ids, ids)]
            spans += self._spans(ends, ids, starts, upto)
        return share_out(spans, self._options.max_tasks)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SpanTask)
        return self._reading.read(partition.spans)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks only read: what the driver remembers and is connected to stays with it.
        return {"_reading": self._reading}

    def _look(self) -> list[QueueEnds]:
        while True:
            queues = queues_to_read(self._log, self._options)
            try:
                return self._log.ends(queues)
            except NotFound:
                # A queue that matched may be deleted before it is read: then it no longer matches.
                if self._options.pattern is None or queues == queues_to_read(self._log, self._options):
                    raise

    def _spans(self, ends: QueueEnds, ids: Numbers, starts: Numbers, stops: Numbers) -> list[Span]:
        some = starts < stops
        if not some.any():
            return []
        names = self._log.partition_names(ends, ids[some])
        return [
            Span(ends.queue, names.get(id, f"#{id}"), ends.shard, id, start, stop)
            for id, start, stop in zip(ids[some].tolist(), starts[some].tolist(), stops[some].tolist(), strict=True)
        ]

    def _starts(self, began: StreamOffset, ends: QueueEnds) -> Numbers:
        """Where to go on in each partition: at the first message in one that is new."""
        starts = began.get(ends.queue, _NONE).of(ends.ids, ends.first)
        behind = starts < ends.first
        if behind.any():
            names = self._log.partition_names(ends, ends.ids[behind])
            lost = [
                f"offsets {start} to {first - 1} of {ends.queue}/{names.get(id, f'#{id}')}"
                for id, start, first in zip(
                    ends.ids[behind].tolist(), starts[behind].tolist(), ends.first[behind].tolist(), strict=True
                )
            ]
            report_loss(_listed(lost), fail=self._fail)
        ahead = starts > ends.next
        if ahead.any():
            self._report_ahead(ends, ahead, starts)
        return np.clip(starts, ends.first, ends.next)

    def _report_ahead(self, ends: QueueEnds, ahead: npt.NDArray[np.bool_], starts: Numbers) -> None:
        """The log ends before what this stream has read: messages that were pushed to it since would be passed over."""
        names = self._log.partition_names(ends, ends.ids[ahead])
        shorter = [
            f"{ends.queue}/{names.get(id, f'#{id}')} ends at offset {end} and was read up to {start}"
            for id, start, end in zip(
                ends.ids[ahead].tolist(), starts[ahead].tolist(), ends.next[ahead].tolist(), strict=True
            )
        ]
        text = f"{_listed(shorter)}: PostgreSQL was restored from a backup, or a standby that was behind has taken over"
        if self._fail:
            raise Conflict(f"{text}. Set failOnDataLoss to false to go on at the end, without what was pushed since")
        log.warning("%s; going on at the end (failOnDataLoss is false)", text)

    def _check_removed(self, began: StreamOffset, ends: Sequence[QueueEnds]) -> None:
        """Partitions are removed with their queue, or when retention has emptied them: both may lose messages."""
        known = {one.queue: one.ids for one in ends}
        for queue, offsets in began.items():
            if self._options.pattern is None and queue not in self._options.queues:
                # It is no longer among the queues of this stream.
                continue
            gone = ~np.isin(offsets.ids, known[queue]) if queue in known else np.ones(len(offsets.ids), np.bool_)
            if gone.any():
                self._report_removed(queue, offsets.ids[gone].tolist(), offsets.offsets[gone].tolist())

    def _report_removed(self, queue: str, ids: Sequence[int], offsets: Sequence[int]) -> None:
        seen: dict[int, int] = {}
        for one in self._last_ends or ():
            if one.queue == queue:
                seen = dict(zip(one.ids.tolist(), one.next.tolist(), strict=True))
        removed = self._log.removed(ids)
        lost: list[str] = []
        for id, offset in zip(ids, offsets, strict=True):
            if id in self._reported:
                continue
            self._reported.add(id)
            name = removed[id].name if id in removed else f"#{id}"
            end = removed[id].next if id in removed else seen.get(id)
            if end is None:
                lost.append(f"messages of {queue}/{name} from offset {offset} on (how many is not known)")
            elif end > offset:
                lost.append(f"offsets {offset} to {end - 1} of {queue}/{name}")
            else:
                log.info(
                    "partition %s/%s was removed after its last message (offset %d) was read", queue, name, end - 1
                )
        if lost:
            if self._fail:
                # It is reported again when the query is started again.
                self._reported.clear()
            report_loss(_listed(lost), fail=self._fail)

    def _lost(self, queue: str, ids: Numbers, starts: Numbers, stops: Numbers) -> None:
        """Part of a planned batch is in partitions that were removed."""
        unread = starts < stops
        if not unread.any():
            return
        names = self._log.removed(ids[unread].tolist())
        lost = [
            f"offsets {start} to {stop - 1} of {queue}/{names[id].name if id in names else f'#{id}'}"
            for id, start, stop in zip(
                ids[unread].tolist(), starts[unread].tolist(), stops[unread].tolist(), strict=True
            )
        ]
        report_loss(_listed(lost), fail=self._fail)


def _encode(ends: Sequence[QueueEnds], offsets: Sequence[Numbers]) -> dict[str, Any]:
    return encode_offset({one.queue: PartitionOffsets(one.ids, at) for one, at in zip(ends, offsets, strict=True)})


def _limited_by_rows(waiting: Sequence[Numbers], most: int, turn: int) -> tuple[list[Numbers], int]:
    """At most `most` messages in all: one of each partition, and the rest in proportion to their backlogs.

    With fewer than there are partitions they take turns. Returns whose turn is next as well.
    """
    counts = np.concatenate(waiting) if waiting else np.empty(0, np.int64)
    if int(counts.sum()) <= most:
        return [*waiting], turn
    busy = np.flatnonzero(counts)
    busy = np.roll(busy, -int(np.searchsorted(busy, turn)))
    chosen = busy[:most]
    shares = np.zeros(len(counts), np.int64)
    shares[chosen] = 1
    room = most - len(chosen)
    if room:
        # None of them gets more than it has: all of it would be above the limit.
        rest = counts - shares
        total = int(rest.sum())
        shares += np.array([count * room // total for count in rest.tolist()], np.int64)
        candidates = busy[(counts > shares)[busy]]
        shares[candidates[: most - int(shares.sum())]] += 1
    sizes = np.cumsum([len(one) for one in waiting])[:-1]
    return np.split(shares, sizes), int(chosen[-1]) + 1


def _limited_by_bytes(
    starts: Sequence[Numbers], waiting: Sequence[Numbers], segments: Sequence[Numbers], most: int, turn: int
) -> tuple[list[Numbers], int | None]:
    """So many bytes in all: the first segment of each partition, then the second of each, and so on; one at least.

    They take turns at being first. Returns whose turn is next as well; None where all had theirs.
    """
    sizes = [len(one) for one in waiting]
    firsts = np.cumsum([0, *sizes])[:-1]
    places = np.concatenate([one[:, 0] + first for one, first in zip(segments, firsts, strict=True)])
    uptos = np.concatenate([one[:, 1] for one in segments])
    nbytes = np.concatenate([one[:, 2] for one in segments])
    # They come in order within each partition: its place in that order is its round.
    order = np.argsort(places, kind="stable")
    places, uptos, nbytes = places[order], uptos[order], nbytes[order]
    rounds = np.arange(len(places)) - np.searchsorted(places, places)
    total = max(1, sum(sizes))
    wanted = np.lexsort(((places - turn) % total, rounds))
    taken = wanted[: max(1, int(np.searchsorted(np.cumsum(nbytes[wanted]), most, side="right")))]
    stops = np.concatenate([*starts, np.empty(0, np.int64)])
    full = stops + np.concatenate([*waiting, np.empty(0, np.int64)])
    # Messages without a segment are lost, which is found out by reading them.
    listed = np.isin(np.arange(len(stops)), places)
    reached = np.where(listed, stops, full)
    np.maximum.at(reached, places[taken], uptos[taken])
    counts = np.minimum(reached, full) - stops
    following = int(places[taken[-1]]) + 1 if len(taken) < len(wanted) else None
    return np.split(counts, np.cumsum(sizes)[:-1]), following


def _listed(lost: Sequence[str]) -> str:
    if len(lost) <= _MOST_NAMED:
        return ", ".join(lost)
    return f"{', '.join(lost[:_MOST_NAMED])} and of {len(lost) - _MOST_NAMED} more partitions"

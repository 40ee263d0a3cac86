"""Where messages are read from: the PostgreSQL of each shard, or a server."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlencode

import msgspec
import numpy as np
import psycopg

from queen.errors import DatabaseUnavailable, NotFound, QueenError, SettingsError
from queen.spark.source.connections import (
    PAUSE_SECONDS,
    QueueMoving,
    ShardConnection,
    retry_unavailable,
    shard_connection,
)
from queen.spark.source.offsets import Numbers
from queen.suggestions import did_you_mean
from queen.wire.ids import parse_partition_uuid
from queen.wire.paths import path_of
from queen.wire.segment import Frame, decode_frames
from queen.wire.times import iso_micros

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """A partition and the offsets that its log holds: [first, next)."""

    queue: str
    partition: str
    shard: int
    id: int
    first: int
    next: int


@dataclass(frozen=True, slots=True, eq=False)
class QueueEnds:
    """The same of all partitions of a queue, by ascending id; without names, because there may be very many."""

    queue: str
    shard: int
    ids: Numbers
    first: Numbers
    next: Numbers


class RemovedPartition(NamedTuple):
    """A partition that is no more, and where its log ended."""

    name: str
    next: int


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets [start, end) of one partition."""

    queue: str
    partition: str
    shard: int
    id: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRun:
    """Segments of one span as they are stored, in order; their bodies lie one after the other."""

    slot: int
    """Which of the wanted spans they are of."""
    bases: Numbers
    counts: Numbers
    micros: Numbers
    sizes: Numbers
    first_ids: bytes
    bodies: bytes
    head: int = 1
    """Bytes before the content of each body: how it is stored, or none when it has been opened."""

    @classmethod
    def of(cls, slot: int, frames: Sequence[Frame]) -> SegmentRun:
        bases, counts, micros, first_ids, bodies = zip(*frames, strict=True)
        return cls(
            slot,
            np.array(bases, np.int64),
            np.array(counts, np.int64),
            np.array(micros, np.int64),
            np.array([*map(len, bodies)], np.int64),
            b"".join(first_ids),
            b"".join(bodies),
        )

    @property
    def end(self) -> int:
        return int(self.bases[-1] + self.counts[-1])

    def part(self, first: int, last: int, bodies: bytes) -> SegmentRun:
        """Segments [first, last) of the run, with the bodies of these."""
        these = slice(first, last)
        return SegmentRun(
            self.slot,
            self.bases[these],
            self.counts[these],
            self.micros[these],
            self.sizes[these],
            self.first_ids[16 * first : 16 * last],
            bodies,
        )


class Log(Protocol):
    """Reads the logs of queues."""

    def queue_names(self) -> list[str]:
        """Every queue."""

    def positions(self, queues: Sequence[str]) -> list[Position]:
        """Every partition of the queues, by queue and name. Raises `NotFound` for a queue that does not exist."""

    def ends(self, queues: Sequence[str]) -> list[QueueEnds]:
        """The same as vectors. Raises `NotFound` for a queue that does not exist."""

    def partition_names(self, ends: QueueEnds, ids: Numbers) -> dict[int, str]:
        """The names of partitions of a queue; without those that were removed meanwhile."""

    def removed(self, ids: Sequence[int]) -> dict[int, RemovedPartition]:
        """Removed partitions, as far as they are remembered."""

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        """For each partition the first offset whose message was stored at the moment or later; else where it ends."""

    def segments(self, spans: Sequence[Span]) -> Iterator[SegmentRun]:
        """The segments that overlap the spans; those of one span in order."""


_BLOCK: Final = 1024
"""Offsets whose small segments come in one row: a row of its own costs more than reading a small segment."""
_LARGE_BODY: Final = 8192


class ShardLog:
    """Reads logs from every shard; a queue lives on one of them."""

    def __init__(self, urls: Sequence[str], outage_grace: float = 0.0) -> None:
        """`outage_grace`: for how many seconds it waits for a PostgreSQL that is unavailable."""
        self._urls = tuple(urls)
        self._grace = outage_grace

    def queue_names(self) -> list[str]:
        return sorted(self._known_names())

    def _known_names(self) -> set[str]:
        return {name for shard in range(len(self._urls)) for (name,) in self.fetch(shard, "rollup_queues")}

    def positions(self, queues: Sequence[str]) -> list[Position]:
        return retry_unavailable(lambda: self._positions(queues), self._grace)

    def _positions(self, queues: Sequence[str]) -> list[Position]:
        found: list[Position] = []
        for shard in range(len(self._urls)):
            rows = self.connection(shard).fetch("log_positions", list(queues))
            found += [
                Position(queue, partition, shard, partition_id, first, ends)
                for queue, partition, partition_id, first, ends in rows
            ]
        if len(self._urls) > 1:
            found.sort(key=lambda position: (position.queue, position.partition))
        self._check_shards(queues, found)
        return found

    def ends(self, queues: Sequence[str]) -> list[QueueEnds]:
        return retry_unavailable(lambda: self._ends(queues), self._grace)

    def _ends(self, queues: Sequence[str]) -> list[QueueEnds]:
        found = [
            QueueEnds(queue, shard, *columns)
            for shard in range(len(self._urls))
            for queue, *columns in self.connection(shard).fetch("log_ends", list(queues))
        ]
        self._check_shards(queues, found)
        return found

    def partition_names(self, ends: QueueEnds, ids: Numbers) -> dict[int, str]:
        return dict(self.fetch(ends.shard, "log_partition_names", ids.tolist()))

    def removed(self, ids: Sequence[int]) -> dict[int, RemovedPartition]:
        found: dict[int, RemovedPartition] = {}
        for shard in range(len(self._urls)):
            try:
                rows = self.fetch(shard, "log_removed_partitions", list(ids))
            except psycopg.errors.UndefinedTable:
                # The servers of this database are older than this reader.
                continue
            found |= {id: RemovedPartition(name, next) for id, name, next in rows}
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
            rows = self.fetch(
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

    def segments(self, spans: Sequence[Span]) -> Iterator[SegmentRun]:
        for shard in sorted({span.shard for span in spans}):
            slots = [number for number, span in enumerate(spans) if span.shard == shard]
            yield from self._segments(shard, slots, [spans[number] for number in slots])

    def _segments(self, shard: int, slots: list[int], spans: list[Span]) -> Iterator[SegmentRun]:
        """Goes on behind the last segment when PostgreSQL was unavailable for a while."""
        deadline: float | None = None
        while True:
            columns = [span.id for span in spans], [span.start for span in spans], [span.end for span in spans]
            reached = [span.start for span in spans]
            try:
                rows = self.connection(shard).stream("log_runs", *columns, _BLOCK, _LARGE_BODY, size=1)
                for run in _runs(rows):
                    yield replace(run, slot=slots[run.slot])
                    reached[run.slot] = run.end
                return
            except DatabaseUnavailable as error:
                if deadline is None or any(at > span.start for at, span in zip(reached, spans, strict=True)):
                    deadline = time.monotonic() + self._grace
                if time.monotonic() + PAUSE_SECONDS > deadline:
                    raise
                log.warning("%s; retrying for %.0f s", error, deadline - time.monotonic())
            time.sleep(PAUSE_SECONDS)
            left = [number for number, span in enumerate(spans) if reached[number] < span.end]
            slots = [slots[number] for number in left]
            spans = [replace(spans[number], start=reached[number]) for number in left]

    def segment_sizes(self, ends: QueueEnds, starts: Numbers, stops: Numbers, most: int) -> list[tuple[int, int, int]]:
        """The first `most` segments of each partition in [start, stop): which partition, where it ends, and its bytes.

        The partition is its place in `ends`, beginning with 0.
        """
        columns = ends.ids.tolist(), starts.tolist(), stops.tolist()
        rows = self.fetch(ends.shard, "log_span_sizes", *columns, most)
        return [(slot - 1, upto, nbytes) for slot, upto, nbytes in rows]

    def move_group(self, group: str, queue: str, offsets: Mapping[int, int]) -> None:
        """Put the cursors of a group at these offsets, by partition id, on the shard where the queue is."""
        columns = list(offsets), [queue] * len(offsets), list(offsets.values())
        for shard in range(len(self._urls)):
            self.fetch(shard, "mirror_group", group, *columns)

    def connection(self, shard: int) -> ShardConnection:
        if shard >= len(self._urls):
            raise SettingsError(f"databaseUrls has {len(self._urls)} shards, and shard {shard} is wanted")
        return shard_connection(self._urls[shard])

    def fetch(self, shard: int, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named statement on a shard, again while PostgreSQL is unavailable."""
        return retry_unavailable(lambda: self.connection(shard).fetch(name, *args), self._grace)

    def _check_shards(self, queues: Sequence[str], found: Sequence[Position | QueueEnds]) -> None:
        shards: dict[str, set[int]] = {}
        for position in found:
            shards.setdefault(position.queue, set()).add(position.shard)
        for queue, places in shards.items():
            if len(places) > 1:
                raise QueueMoving(
                    f"queue {queue!r} has partitions on shards {sorted(places)}: it is being moved (try again), or"
                    " databaseUrls names other databases or the same one twice"
                )
        absent = [queue for queue in queues if queue not in shards]
        if absent:
            self.check_queues(absent)

    def check_queues(self, queues: Sequence[str]) -> None:
        """Raises `NotFound` for a queue that is on no shard."""
        known = {
            name for shard in range(len(self._urls)) for (name,) in self.fetch(shard, "known_queues", list(queues))
        }
        absent = [queue for queue in queues if queue not in known]
        if absent and len(self._urls) > 1:
            arriving = {name for shard in range(len(self._urls)) for _, name, *_ in self.fetch(shard, "arrivals")}
            if arriving & set(absent):
                raise QueueMoving(f"queue {', '.join(sorted(arriving & set(absent)))} is being moved to another shard")
        if absent:
            shards = "the shard" if len(self._urls) == 1 else f"any of the {len(self._urls)} shards"
            hint = did_you_mean(absent[0], self._known_names(), "create it, or check databaseUrls")
            raise NotFound(f"there is no queue {', '.join(absent)} on {shards} that databaseUrls names; {hint}")


def _runs(rows: Iterator[tuple[Any, ...]]) -> Iterator[SegmentRun]:
    """What statement log_runs returns."""
    for slot, bases, counts, micros, sizes, first_ids, bodies in rows:
        block = SegmentRun(slot - 1, bases, counts, micros, sizes, first_ids, bodies)
        large = np.flatnonzero(sizes >= _LARGE_BODY)
        ends = np.cumsum(np.where(sizes < _LARGE_BODY, sizes, 0)).tolist()
        done = done_bytes = 0
        for place in [*large.tolist(), len(sizes)]:
            if done < place:
                yield block.part(done, place, bodies[done_bytes : ends[place - 1]])
                done_bytes = ends[place - 1]
            if place < len(sizes):
                *_, body = next(rows)
                yield block.part(place, place + 1, body)
            done = place + 1


_TIMEOUT_SECONDS: Final = 60
_BUSY: Final = (429, 502, 503, 504)
_LONGEST_ANSWER: Final = 1000


class _Error(msgspec.Struct):
    error: str


class _Partition(msgspec.Struct, rename="camel"):
    partition: str
    partition_id: str
    first_offset: int
    next_offset: int
    offset_at: int | None


class _Partitions(msgspec.Struct):
    partitions: list[_Partition]


class _Queue(msgspec.Struct):
    name: str


class _Queues(msgspec.Struct):
    queues: list[_Queue]


class ServerLog:
    """Reads logs through the routes below /api/v1/read. Shards are the server's affair: all positions name shard 0."""

    def __init__(self, url: str, token: str | None, outage_grace: float = 0.0) -> None:
        """`outage_grace`: for how many seconds it waits for a server that is unavailable."""
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._grace = outage_grace
        self._names: dict[int, str] = {}

    def queue_names(self) -> list[str]:
        answer = self._get("/api/v1/resources/queues", {})
        return sorted(one.name for one in msgspec.json.decode(answer, type=_Queues).queues)

    def positions(self, queues: Sequence[str]) -> list[Position]:
        return [
            Position(queue, one.partition, 0, _row(one), one.first_offset, one.next_offset)
            for queue in sorted(queues)
            for one in self._partitions(queue, {})
        ]

    def ends(self, queues: Sequence[str]) -> list[QueueEnds]:
        found: list[QueueEnds] = []
        for queue in sorted(queues):
            positions = sorted(self.positions([queue]), key=lambda position: position.id)
            self._names |= {position.id: position.partition for position in positions}
            ids, first, ends = (
                np.array([getattr(position, name) for position in positions], np.int64)
                for name in ("id", "first", "next")
            )
            found.append(QueueEnds(queue, 0, ids, first, ends))
        return found

    def partition_names(self, ends: QueueEnds, ids: Numbers) -> dict[int, str]:
        return {id: self._names[id] for id in ids.tolist() if id in self._names}

    def removed(self, ids: Sequence[int]) -> dict[int, RemovedPartition]:
        # No route says where a removed log ended: what cannot be proven to be read counts as lost.
        return {}

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        found: dict[tuple[str, int], int] = {}
        for queue in sorted({position.queue for position in positions}):
            for one in self._partitions(queue, {"at": iso_micros(moment)}):
                if one.offset_at is not None:
                    found[queue, _row(one)] = one.offset_at
        # A partition may have been removed, or have grown, since its position was asked for.
        return [min(found.get((position.queue, position.id), position.next), position.next) for position in positions]

    def segments(self, spans: Sequence[Span]) -> Iterator[SegmentRun]:
        for slot, span in enumerate(spans):
            at = span.start
            while at < span.end:
                place = path_of("/api/v1/read", span.queue, "partition", span.partition)
                data = self._get(place, {"from": str(at), "to": str(span.end)})
                before = at
                frames = list(decode_frames(data))
                if frames:
                    run = SegmentRun.of(slot, frames)
                    yield run
                    at = run.end
                if at <= before:
                    break

    def _partitions(self, queue: str, query: Mapping[str, str]) -> list[_Partition]:
        answer = self._get(path_of("/api/v1/read", queue), query)
        return msgspec.json.decode(answer, type=_Partitions).partitions

    def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(f"{self._url}{path}?{urlencode(query)}", headers=self._headers)
        return retry_unavailable(lambda: self._send(request), self._grace)

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            text = _said(error.read())
            if error.code in (401, 403):
                need = "of the role to read" if error.code == 403 else "that is valid"
                raise SettingsError(
                    f"the server at {self._url} refuses to be read: {text}. Give a token {need}: option token,"
                    " or --token"
                ) from error
            if error.code == 404:
                raise NotFound(f"{text} ({self._url})") from error
            if error.code in _BUSY:
                raise DatabaseUnavailable(f"{self._url} answered {error.code} to a read: {text}") from error
            raise QueenError(f"{self._url} answered {error.code} to a read: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            # The last is an answer that ends in its middle.
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            why = str(reason) or type(error).__name__
            raise DatabaseUnavailable(f"the server at {self._url} is unavailable: {why}") from error


def _said(body: bytes) -> str:
    """The error in an answer; of an answer that is not a server's, its beginning."""
    try:
        return msgspec.json.decode(body, type=_Error).error
    except msgspec.DecodeError:
        return " ".join(body.decode("utf-8", "replace")[:_LONGEST_ANSWER].split())


def _row(one: _Partition) -> int:
    """The row id of a partition."""
    found = parse_partition_uuid(one.partition_id)
    if found is None:
        raise QueenError(f"the server calls partition {one.partition!r} {one.partition_id!r}, which is not an id")
    return found

"""Where messages are read from: the PostgreSQL of each shard, or a server."""

from __future__ import annotations

import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import numpy as np
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.raw_cursor import RawCursor

from queen.errors import Conflict, DatabaseUnavailable, NotFound, QueenError, SettingsError
from queen.spark.source.offsets import Numbers
from queen.storage.statements import load_statements
from queen.wire.ids import parse_partition_uuid
from queen.wire.segment import decode_frames
from queen.wire.times import iso_micros

log = logging.getLogger(__name__)

T = TypeVar("T")


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


class StoredSegment(NamedTuple):
    """A segment as it is stored, and which of the wanted spans it is for."""

    slot: int
    base_offset: int
    messages: int
    created_micros: int
    first_id: bytes
    body: bytes


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

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        """The segments that overlap the spans; those of one span in order. `slot` is the number of the span."""


class QueueMoving(Conflict):
    """A queue has partitions on two shards: it is being moved, or databaseUrls is wrong."""


_CONNECT_SECONDS: Final = 10
_ROWS_AT_A_TIME: Final = 32
_SETTINGS: Final = "-c jit=off -c max_parallel_workers_per_gather=0"
_PAUSE_SECONDS: Final = 0.5
# PostgreSQL answered, and will answer the same until a setting is changed.
_REFUSED: Final = re.compile(
    r'authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) "[^"]*" does not exist'
    r"|permission denied|server does not support SSL"
)


class ShardConnection:
    """A connection to one shard that runs statements by their names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._statements = load_statements()

    def fetch(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named statement; once more when an idle connection turns out to be closed."""
        idle = self._connection is not None
        try:
            return self._fetch(name, args)
        except DatabaseUnavailable:
            if not idle:
                raise
        return self._fetch(name, args)

    def stream(self, name: str, *args: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a named statement, a few at a time: all of them may be more than fits in memory."""
        # An idle connection may be closed; this finds out, and opens a new one.
        self.fetch("spark_ping")
        try:
            with self.cursor() as cursor:
                yield from cursor.stream(self.statement(name), args, binary=True, size=_ROWS_AT_A_TIME)
        except psycopg.OperationalError as error:
            self.close()
            raise _unavailable(self._url, error) from error

    def cursor(self) -> RawCursor[tuple[Any, ...]]:
        """A cursor whose statements have their arguments as $1, $2."""
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    conninfo(self._url),
                    autocommit=True,
                    connect_timeout=_CONNECT_SECONDS,
                    application_name="queen-spark",
                    options=_SETTINGS,
                )
            except psycopg.OperationalError as error:
                raise _unavailable(self._url, error) from error
        return RawCursor(self._connection)

    def statement(self, name: str) -> bytes:
        return self._statements[name].encode()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fetch(self, name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            with self.cursor() as cursor:
                cursor.execute(self.statement(name), args, binary=True)
                return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            self.close()
            raise _unavailable(self._url, error) from error


def conninfo(url: str) -> str:
    """A URL as libpq reads it: servers take `host=a:5432,b:5433` for several hosts, libpq wants the ports apart."""
    given = conninfo_to_dict(url)
    places = [place.rpartition(":") for place in str(given.get("host") or "").split(",")]
    if not all(host and port.isdigit() and ":" not in host for host, _, port in places):
        return url
    hosts, _, ports = zip(*places, strict=True)
    return make_conninfo(**given | {"host": ",".join(hosts), "port": ",".join(ports)})


def shard_connection(url: str) -> ShardConnection:
    """This process's connection to a shard: Spark keeps its Python processes, and a new connection per task is slow."""
    return _kept(url, os.getpid())


@lru_cache(maxsize=64)
def _kept(url: str, pid: int) -> ShardConnection:
    # The process is part of the key, because a fork must not share its parent's connections.
    return ShardConnection(url)


def _unavailable(url: str, error: Exception) -> QueenError:
    where = psycopg.conninfo.conninfo_to_dict(url)
    place = f"{where.get('host') or 'the local socket'}:{where.get('port') or 5432}/{where.get('dbname') or ''}"
    text = str(error).strip()
    if _REFUSED.search(text):
        reason = text.rpartition("FATAL:")[2].strip()
        return SettingsError(f"PostgreSQL at {place} refuses the connection: {reason}. Check databaseUrls")
    return DatabaseUnavailable(f"PostgreSQL at {place} is unavailable: {text}")


def retry_unavailable(attempt: Callable[[], T], seconds: float) -> T:
    """Repeat what failed because PostgreSQL is unavailable, or because a queue is being moved, for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except (DatabaseUnavailable, QueueMoving) as error:
            left = deadline - time.monotonic()
            if left < _PAUSE_SECONDS:
                raise
            log.warning("%s; retrying for %.0f s", error, left)
        time.sleep(_PAUSE_SECONDS)


class ShardLog:
    """Reads logs from every shard; a queue lives on one of them."""

    def __init__(self, urls: Sequence[str], outage_grace: float = 0.0) -> None:
        """`outage_grace`: for how many seconds it waits for a PostgreSQL that is unavailable."""
        self._urls = tuple(urls)
        self._grace = outage_grace

    def queue_names(self) -> list[str]:
        shards = range(len(self._urls))
        return sorted({name for shard in shards for (name,) in self._fetch(shard, "rollup_queues")})

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
            QueueEnds(queue, shard, *(np.array(column, np.int64) for column in columns))
            for shard in range(len(self._urls))
            for queue, *columns in self.connection(shard).fetch("log_ends", list(queues))
        ]
        self._check_shards(queues, found)
        return found

    def partition_names(self, ends: QueueEnds, ids: Numbers) -> dict[int, str]:
        return dict(self._fetch(ends.shard, "log_partition_names", ids.tolist()))

    def removed(self, ids: Sequence[int]) -> dict[int, RemovedPartition]:
        found: dict[int, RemovedPartition] = {}
        for shard in range(len(self._urls)):
            try:
                rows = self._fetch(shard, "log_removed_partitions", list(ids))
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
        """Goes on behind the last segment when PostgreSQL was unavailable for a while."""
        deadline: float | None = None
        while True:
            columns = [span.id for span in spans], [span.start for span in spans], [span.end for span in spans]
            reached = [span.start for span in spans]
            try:
                for slot, base, messages, *rest in self.connection(shard).stream("log_spans", *columns):
                    yield StoredSegment(slots[slot - 1], base, messages, *rest)
                    reached[slot - 1] = base + messages
                return
            except DatabaseUnavailable as error:
                if deadline is None or any(at > span.start for at, span in zip(reached, spans, strict=True)):
                    deadline = time.monotonic() + self._grace
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
                log.warning("%s; retrying for %.0f s", error, deadline - time.monotonic())
            time.sleep(_PAUSE_SECONDS)
            left = [number for number, span in enumerate(spans) if reached[number] < span.end]
            slots = [slots[number] for number in left]
            spans = [replace(spans[number], start=reached[number]) for number in left]

    def segment_sizes(self, ends: QueueEnds, starts: Numbers, stops: Numbers, most: int) -> list[tuple[int, int, int]]:
        """The first `most` segments of each partition in [start, stop): which partition, where it ends, and its bytes.

        The partition is its place in `ends`, beginning with 0.
        """
        columns = ends.ids.tolist(), starts.tolist(), stops.tolist()
        rows = self._fetch(ends.shard, "log_span_sizes", *columns, most)
        return [(slot - 1, upto, nbytes) for slot, upto, nbytes in rows]

    def move_group(self, group: str, queue: str, offsets: Mapping[int, int]) -> None:
        """Put the cursors of a group at these offsets, by partition id, on the shard where the queue is."""
        columns = list(offsets), [queue] * len(offsets), list(offsets.values())
        for shard in range(len(self._urls)):
            self._fetch(shard, "mirror_group", group, *columns)

    def connection(self, shard: int) -> ShardConnection:
        if shard >= len(self._urls):
            raise SettingsError(f"databaseUrls has {len(self._urls)} shards, and shard {shard} is wanted")
        return shard_connection(self._urls[shard])

    def _fetch(self, shard: int, name: str, *args: Any) -> list[tuple[Any, ...]]:
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
            name for shard in range(len(self._urls)) for (name,) in self._fetch(shard, "known_queues", list(queues))
        }
        absent = [queue for queue in queues if queue not in known]
        if absent and len(self._urls) > 1:
            arriving = {name for shard in range(len(self._urls)) for _, name, *_ in self._fetch(shard, "arrivals")}
            if arriving & set(absent):
                raise QueueMoving(f"queue {', '.join(sorted(arriving & set(absent)))} is being moved to another shard")
        if absent:
            shards = "the shard" if len(self._urls) == 1 else f"any of the {len(self._urls)} shards"
            raise NotFound(f"there is no queue {', '.join(absent)} on {shards} that databaseUrls names")


_TIMEOUT_SECONDS: Final = 60


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
    """Reads logs through the routes below /api/v1/read."""

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
            Position(queue, one.partition, *_row(one), one.first_offset, one.next_offset)
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
            found.append(QueueEnds(queue, positions[0].shard if positions else 0, ids, first, ends))
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
                    found[queue, _row(one)[1]] = one.offset_at
        # A partition may have been removed, or have grown, since its position was asked for.
        return [min(found.get((position.queue, position.id), position.next), position.next) for position in positions]

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        for slot, span in enumerate(spans):
            at = span.start
            while at < span.end:
                place = f"/api/v1/read/{quote(span.queue, safe='')}/partition/{quote(span.partition, safe='')}"
                data = self._get(place, {"from": str(at), "to": str(span.end)})
                before = at
                for frame in decode_frames(data):
                    yield StoredSegment(slot, *frame)
                    at = frame.base_offset + frame.messages
                if at <= before:
                    break

    def _partitions(self, queue: str, query: Mapping[str, str]) -> list[_Partition]:
        answer = self._get(f"/api/v1/read/{quote(queue, safe='')}", query)
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
            text = error.read().decode("utf-8", "replace")[:1000]
            if error.code == 404:
                raise NotFound(f"{self._url} answered 404: {text}") from error
            if error.code in (502, 503, 504):
                raise DatabaseUnavailable(f"{self._url} answered {error.code} to a read: {text}") from error
            raise QueenError(f"{self._url} answered {error.code} to a read: {text}") from error
        except OSError as error:
            raise DatabaseUnavailable(f"the server at {self._url} is unavailable: {error}") from error


def _row(one: _Partition) -> tuple[int, int]:
    """The shard and the row id of a partition."""
    found = parse_partition_uuid(one.partition_id)
    if found is None:
        raise QueenError(f"the server calls partition {one.partition!r} {one.partition_id!r}, which is not an id")
    return found

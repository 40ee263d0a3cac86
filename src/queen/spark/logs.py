"""What every way to the messages offers: where logs begin and end, and the segments of a span."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, urlencode

import msgspec
import psycopg
from psycopg.raw_cursor import RawCursor

from queen.errors import DatabaseUnavailable, NotFound, QueenError, SettingsError
from queen.spark.offsets import Place
from queen.storage.statements import load_statements
from queen.wire.ids import parse_partition_uuid
from queen.wire.segment import decode_frames
from queen.wire.times import iso_micros


@dataclass(frozen=True, slots=True)
class Position:
    """A partition and the offsets that its log holds: [first, next)."""

    queue: str
    partition: str
    shard: int
    id: int
    first: int
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
    """A way to the messages."""

    def positions(self, queues: Sequence[str]) -> list[Position]:
        """Every partition of the queues, by queue and name. Raises `NotFound` for a queue that is not there."""

    def offsets_from(self, positions: Sequence[Position], moment: datetime) -> list[int]:
        """For each partition the first offset whose message was stored at the moment or later; else where it ends."""

    def segments(self, spans: Sequence[Span]) -> Iterator[StoredSegment]:
        """The segments that overlap the spans; those of one span in order. `slot` is the number of the span."""


_CONNECT_SECONDS = 10
_ROWS_AT_A_TIME = 32
_SETTINGS = "-c jit=off -c max_parallel_workers_per_gather=0"


class ShardConnection:
    """A connection to one shard that runs statements by their names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._statements = load_statements()

    def fetch(self, name: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run a named statement; once more when a connection that lay idle turns out to be dead."""
        idle = self._connection is not None
        try:
            return self._fetch(name, args)
        except psycopg.OperationalError as error:
            self.close()
            if not idle:
                raise _away(self._url, error) from error
        try:
            return self._fetch(name, args)
        except psycopg.OperationalError as error:
            self.close()
            raise _away(self._url, error) from error

    def stream(self, name: str, *args: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a named statement, a few at a time: all of them may be more than fits in memory."""
        # A connection that lay idle may have died; this finds out, and makes a new one.
        self.fetch("spark_ping")
        try:
            with self.cursor() as cursor:
                yield from cursor.stream(self.statement(name), args, binary=True, size=_ROWS_AT_A_TIME)
        except psycopg.OperationalError as error:
            self.close()
            raise _away(self._url, error) from error

    def cursor(self) -> RawCursor[tuple[Any, ...]]:
        """A cursor whose statements have their arguments as $1, $2."""
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=_CONNECT_SECONDS,
                    application_name="queen-spark",
                    options=_SETTINGS,
                )
            except psycopg.OperationalError as error:
                raise _away(self._url, error) from error
        return RawCursor(self._connection)

    def statement(self, name: str) -> bytes:
        return self._statements[name].encode()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fetch(self, name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self.cursor() as cursor:
            cursor.execute(self.statement(name), args, binary=True)
            return cursor.fetchall() if cursor.description else []


def shard_connection(url: str) -> ShardConnection:
    """This process's connection to a shard: Spark keeps its Python processes, and a new connection per task is slow."""
    return _kept(url, os.getpid())


@lru_cache(maxsize=64)
def _kept(url: str, pid: int) -> ShardConnection:
    # The process is part of the key, because a fork must not share its parent's connections.
    return ShardConnection(url)


def _away(url: str, error: Exception) -> DatabaseUnavailable:
    where = psycopg.conninfo.conninfo_to_dict(url)
    place = f"{where.get('host') or 'the local socket'}:{where.get('port') or 5432}/{where.get('dbname') or ''}"
    return DatabaseUnavailable(f"PostgreSQL at {place} is not reachable: {str(error).strip()}")


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
            raise DatabaseUnavailable(f"the server at {self._url} is not reachable: {error}") from error


def _row(one: _Partition) -> tuple[int, int]:
    """The shard and the row of a partition."""
    found = parse_partition_uuid(one.partition_id)
    if found is None:
        raise QueenError(
            f"the server calls partition {one.partition!r} {one.partition_id!r}, which is no id of Queen's"
        )
    return found

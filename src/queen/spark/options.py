"""The options of `format("queen")`: read from Spark's, checked, and given their types.

Names are spelled as in the documentation; Spark compares them without regard to case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from queen.errors import BadRequest, SettingsError
from queen.suggestions import did_you_mean
from queen.wire.api.messages.stages import LARGEST_BATCH
from queen.wire.push import check_name
from queen.wire.times import EXPECTED_DURATION, duration_ms, parse_time

_ACCESS: Final = ("databaseUrls", "encryptionKey", "server", "token", "outageGraceSeconds")
_OUTAGE_GRACE_SECONDS: Final = 30.0
_READING: Final = (
    "queue",
    "path",
    "subscribePattern",
    "partitions",
    "table",
    "what",
    "columns",
    "schema",
    "parsedColumn",
    "mode",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRowsPerBatch",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "minBytesPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "maxTasks",
    "maxReadShare",
    "failOnDataLoss",
    "group",
    "mirrorGroup",
    "namespace",
    "topic",
)

_OF_ALL_TABLES: Final = ("queue", "path", "table", "what", "columns", "group", "namespace", "topic")
_OF_TOPICS: Final = ("namespace", "topic")

Offsets = dict[str, dict[str, int]]
"""Queue, partition, offset. The queue is empty where only partitions were named."""


_Kind = TypeVar("_Kind", bound=StrEnum)


class Table(StrEnum):
    """What can be read."""

    MESSAGES = "messages"
    DLQ = "dlq"
    TRACES = "traces"
    TOPIC = "topic"
    LAG = "lag"


class ParseMode(StrEnum):
    """What happens to a payload that does not fit the schema: it goes to _corrupt_record, or it ends the query."""

    PERMISSIVE = "PERMISSIVE"
    FAILFAST = "FAILFAST"


class EdgeKind(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    OFFSETS = "offsets"


@dataclass(frozen=True, slots=True)
class Edge:
    """Where reading begins or ends: at the first or the last message, at a time, or at an offset per partition."""

    kind: EdgeKind
    time: datetime | None = None
    offsets: Offsets | None = None

    def offset(self, queue: str, partition: str) -> int | None:
        """The offset that was given for a partition, if one was."""
        if self.offsets is None:
            return None
        for name in (queue, ""):
            if partition in self.offsets.get(name, {}):
                return self.offsets[name][partition]
        return None


EARLIEST: Final = Edge(EdgeKind.EARLIEST)
LATEST: Final = Edge(EdgeKind.LATEST)


@dataclass(frozen=True, slots=True)
class Access:
    """How the messages are reached: straight from the PostgreSQL shards, or through a server."""

    database_urls: tuple[str, ...] = ()
    encryption_keys: tuple[bytes, ...] = ()
    server: str | None = None
    token: str | None = None
    outage_grace: float = _OUTAGE_GRACE_SECONDS
    """Seconds to wait for a PostgreSQL or server that is unavailable."""


_TRIGGER_DELAY_SECONDS: Final = 900.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a micro-batch reads, and for how long too little waits."""

    max_rows: int | None = None
    min_rows: int | None = None
    max_bytes: int | None = None
    """As they are stored, by whole segments."""
    min_bytes: int | None = None
    """As they are stored."""
    delay: float = _TRIGGER_DELAY_SECONDS
    """Seconds after which fewer than `min_rows` and `min_bytes` are read all the same."""

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.max_rows, self.min_rows, self.max_bytes, self.min_bytes))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is to be read, and how."""

    access: Access
    table: Table
    queues: tuple[str, ...]
    pattern: str | None
    """A regular expression: the queues whose names match it as a whole."""
    partitions: frozenset[str] | None
    columns: tuple[str, ...] | None
    schema: str | None
    parsed_column: str | None
    """The fields of the payload as one struct of this name, instead of columns."""
    mode: ParseMode
    starting: Edge | None
    ending: Edge
    limits: BatchLimits
    max_tasks: int
    max_read_share: float
    """The share of the machine that a read may use; tasks pause to stay within it."""
    fail_on_data_loss: bool | None
    group: str | None
    mirror_group: str | None
    namespace: str | None
    topic: str | None


def parse_access(options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Access:
    """The options that say where the messages are; DATABASE_URLS and QUEEN_ENCRYPTION_KEY stand in for absent ones."""
    given = _lower(options)
    server = given.get("server") or None
    # A server that is named is meant, whatever the environment says; databases that are named too are the shorter way.
    grace = _seconds(given, "outageGraceSeconds")
    urls = _words(given.get("databaseurls") or ("" if server else environment.get("DATABASE_URLS", "")))
    if server is not None and not urls:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"server must be a URL such as http://127.0.0.1:6632, not {server!r}")
        return Access(server=server.rstrip("/"), token=given.get("token") or None, outage_grace=grace)
    if not urls:
        raise SettingsError(
            "say where the messages are: option databaseUrls (or the variable DATABASE_URLS) with the PostgreSQL of"
            " every shard, separated by commas, or option server with the URL of a Queen server"
        )
    for url in urls:
        if urlsplit(url).scheme not in ("postgresql", "postgres"):
            raise SettingsError("databaseUrls must be URLs that begin with postgresql://, separated by commas")
    keys = _words(given.get("encryptionkey") or environment.get("QUEEN_ENCRYPTION_KEY", ""))
    return Access(database_urls=urls, encryption_keys=tuple(_key(text) for text in keys), outage_grace=grace)


def parse_read_options(options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> ReadOptions:
    """The options of a read. Raises `SettingsError` that says which one is wrong, and how it is written."""
    given = _lower(options)
    if "provider" in given:
        # Spark adds it where a table is created, and has forgotten all options when the table is read.
        raise SettingsError(
            "a table cannot be read USING queen, because Spark keeps no options for sources written in Python:"
            " CREATE TEMPORARY VIEW … USING queen OPTIONS (queue 'orders') does what it would do"
        )
    check_known(options, _READING)
    table = _choice(Table, "table", given.get("table") or given.get("what") or Table.MESSAGES.value)
    queues = _names(given, "queue") or _names(given, "path")
    pattern = _pattern(given)
    _check_source(given, table, queues, pattern)
    several = len(queues) if pattern is None else 2
    if given.get("parsedcolumn") and not given.get("schema"):
        raise SettingsError("parsedColumn names the struct that schema is parsed into: give option schema as well")
    ending = _edge(given, "ending", several) or LATEST
    starting = _edge(given, "starting", several)
    _check_edges(starting, ending)
    partitions = _names(given, "partitions")
    if given.get("partitions") and not partitions:
        raise SettingsError("option partitions names none: leave it out to read them all")
    columns = _names(given, "columns")
    if len(set(columns)) < len(columns):
        raise SettingsError(f"option columns names a column twice: {', '.join(columns)}")
    return ReadOptions(
        access=parse_access(options, environment),
        table=table,
        queues=queues,
        pattern=pattern,
        partitions=frozenset(partitions) or None,
        columns=columns or None,
        schema=given.get("schema") or None,
        parsed_column=given.get("parsedcolumn") or None,
        mode=_choice(ParseMode, "mode", (given.get("mode") or ParseMode.PERMISSIVE.value).upper()),
        starting=starting,
        ending=ending,
        limits=_limits(given),
        max_tasks=_count(given, "maxTasks") or os.cpu_count() or 1,
        max_read_share=_share(given, "maxReadShare"),
        fail_on_data_loss=_flag(given, "failOnDataLoss"),
        group=given.get("group") or None,
        mirror_group=given.get("mirrorgroup") or None,
        namespace=given.get("namespace") or None,
        topic=given.get("topic") or None,
    )


def _check_source(given: Mapping[str, str], table: Table, queues: Sequence[str], pattern: str | None) -> None:
    """Queues, or a pattern of them, are named where messages are read, and every option is one of the table."""
    if table is Table.MESSAGES and not queues and pattern is None:
        raise SettingsError(
            'say which queue to read: option("queue", "orders"), several separated by commas or as a JSON list, or'
            ' option("subscribePattern", "orders-.*")'
        )
    if queues and pattern is not None:
        raise SettingsError("give either queue or subscribePattern, not both")
    if table is not Table.MESSAGES:
        for name in _given(given, (name for name in _READING if name not in _OF_ALL_TABLES)):
            raise SettingsError(f"option {name} is for messages; table {table} is read whole")
    if table is Table.TOPIC and queues:
        raise SettingsError("topics are not in queues: name them with options namespace and topic")
    if table is not Table.TOPIC:
        for name in _given(given, _OF_TOPICS):
            raise SettingsError(f"option {name} is for items of topics, which option table with the value topic reads")
    if len(set(queues)) < len(queues):
        raise SettingsError(f"option queue names a queue twice: {', '.join(queues)}")


def _check_edges(starting: Edge | None, ending: Edge) -> None:
    if ending.kind is EdgeKind.EARLIEST:
        raise SettingsError("endingOffsets cannot be earliest: nothing would be read")
    if starting is not None and starting.time is not None and ending.time is not None and starting.time > ending.time:
        raise SettingsError("endingTimestamp is before startingTimestamp: nothing would be read")


def _limits(given: Mapping[str, str]) -> BatchLimits:
    rows, offsets = _count(given, "maxRowsPerBatch"), _count(given, "maxOffsetsPerTrigger")
    if rows is not None and offsets is not None and rows != offsets:
        raise SettingsError("maxRowsPerBatch and maxOffsetsPerTrigger are two names of one limit: give one of them")
    most, least = rows or offsets, _count(given, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise SettingsError(f"minOffsetsPerTrigger ({least}) must not be above maxOffsetsPerTrigger ({most})")
    most_bytes, least_bytes = _count(given, "maxBytesPerTrigger"), _count(given, "minBytesPerTrigger")
    if most_bytes is not None and least_bytes is not None and least_bytes > most_bytes:
        raise SettingsError(f"minBytesPerTrigger ({least_bytes}) must not be above maxBytesPerTrigger ({most_bytes})")
    delay = _TRIGGER_DELAY_SECONDS
    if text := given.get("maxtriggerdelay"):
        if least is None and least_bytes is None:
            raise SettingsError(
                "maxTriggerDelay is how long a batch waits for minOffsetsPerTrigger messages, or minBytesPerTrigger:"
                " give that option as well"
            )
        found = duration_ms(text)
        if found is None:
            raise SettingsError(f"maxTriggerDelay must be {EXPECTED_DURATION}, not {text!r}")
        delay = found / 1000
    return BatchLimits(most, least, most_bytes, least_bytes, delay)


def check_known(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse an option that would have no effect; those that say where the messages are are known everywhere."""
    names = (*known, *_ACCESS)
    lower = {name.lower() for name in names}
    for name in options:
        if name.lower() not in lower:
            hint = did_you_mean(name, names, f"known are {', '.join(sorted(names))}")
            raise SettingsError(f"format queen has no option {name!r} here; {hint}")


def _given(given: Mapping[str, str], names: Iterable[str]) -> Iterator[str]:
    """Those of some options that were given."""
    return (name for name in names if given.get(name.lower()))


def _lower(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _names(given: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Names separated by commas, or a JSON list of them for names that have a comma."""
    return names_in(given.get(name.lower()) or "", name)


def names_in(text: str, option: str = "queue") -> tuple[str, ...]:
    """Names separated by commas, or a JSON list of them. Raises `SettingsError`."""
    if not text.strip().startswith("["):
        return _words(text)
    try:
        return tuple(msgspec.json.decode(text, type=list[str]))
    except msgspec.DecodeError as error:
        raise SettingsError(
            f'{option} must be names separated by commas, or a JSON list such as ["a", "b,c"], not {text!r} ({error})'
        ) from None


def _pattern(given: Mapping[str, str]) -> str | None:
    text = given.get("subscribepattern") or None
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise SettingsError(f"subscribePattern {text!r} is not a regular expression: {error}") from None
    return text


def _seconds(given: Mapping[str, str], name: str) -> float:
    text = given.get(name.lower())
    if not text:
        return _OUTAGE_GRACE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise SettingsError(f"{name} must be seconds from 0 to 86400, not {text!r}")
    return seconds


def _share(given: Mapping[str, str], name: str) -> float:
    text = given.get(name.lower())
    if not text:
        return 1.0
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 1:
        raise SettingsError(f"{name} must be a share of the machine from 0.01 to 1, not {text!r}")
    return share


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SettingsError("encryptionKey must be keys of 64 hexadecimal digits, separated by commas")
    return key


def _edge(given: Mapping[str, str], which: str, queues: int) -> Edge | None:
    offsets = given.get(f"{which}offsets")
    moment = given.get(f"{which}timestamp")
    if offsets and moment:
        raise SettingsError(f"give either {which}Offsets or {which}Timestamp, not both")
    if moment:
        return Edge(EdgeKind.TIME, time=_time(f"{which}Timestamp", moment))
    if not offsets:
        return None
    word = offsets.strip().lower()
    if word in (EdgeKind.EARLIEST, EdgeKind.LATEST):
        return EARLIEST if word == EdgeKind.EARLIEST else LATEST
    return Edge(EdgeKind.OFFSETS, offsets=_offsets(f"{which}Offsets", offsets, queues))


def _time(name: str, text: str) -> datetime:
    """An ISO-8601 time, or milliseconds since 1970 as Spark's own sources take them."""
    if text.strip().lstrip("-").isdigit():
        try:
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        except (OverflowError, OSError, ValueError):
            pass
    moment = parse_time(text)
    if moment is None:
        raise SettingsError(f"{name} must be a time such as 2026-04-26T10:59:28Z, not {text!r}")
    return moment


def _offsets(name: str, text: str, queues: int) -> Offsets:
    try:
        named: Offsets = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.DecodeError:
        try:
            named = {"": msgspec.json.decode(text, type=dict[str, int])}
        except msgspec.DecodeError:
            raise SettingsError(
                f'{name} must be earliest, latest, or JSON such as {{"Default": 12}} or'
                f' {{"orders": {{"Default": 12}}}}, not {text!r}'
            ) from None
        if queues > 1:
            example = '{"orders": {"Default": 12}}'
            raise SettingsError(f"{name} must name the queue of each partition: {example}") from None
    for queue, partitions in named.items():
        for partition, offset in partitions.items():
            if offset < 0:
                place = f"{queue}/{partition}" if queue else partition
                raise SettingsError(f"{name} has offset {offset} for {place}; offsets begin at 0")
    return named


def _choice(kind: type[_Kind], name: str, text: str) -> _Kind:
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{name} must be one of {', '.join(kind)}, not {text!r}") from None


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SettingsError(f"{name} must be a whole number above 0, not {text!r}")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool | None:
    text = given.get(name.lower())
    if not text:
        return None
    if text.lower() not in ("true", "false"):
        raise SettingsError(f"{name} must be true or false, not {text!r}")
    return text.lower() == "true"


_WRITING: Final = (
    "queue",
    "path",
    "partition",
    "namespace",
    "topic",
    "run",
    "batch",
    "dedupWindowSeconds",
    # Spark passes these on with the others.
    "checkpointLocation",
    "queryName",
)
_DEDUP_WINDOW_SECONDS: Final = 3600


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows go. What is None is taken from the column of that name."""

    access: Access
    queue: str | None
    partition: str | None
    namespace: str | None
    topic: str | None
    run: str | None
    batch: int
    dedup_window: float


def parse_write_options(options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> WriteOptions:
    """Raises `SettingsError` that says which option is wrong, and how it is written."""
    check_known(options, _WRITING)
    given = {name.lower(): value for name, value in options.items() if value}
    if "queue" in given and ("topic" in given or "namespace" in given):
        raise SettingsError("give either queue, or namespace and topic: a write goes to queues or to topics")
    if "batch" in given and "run" not in given:
        raise SettingsError("batch numbers the writes of a run: give option run, which names it, as well")
    return WriteOptions(
        access=parse_access(options, environment),
        queue=_name(given, "queue") or _name(given, "path"),
        partition=_name(given, "partition"),
        namespace=_name(given, "namespace"),
        topic=_name(given, "topic"),
        run=_name(given, "run"),
        batch=_whole(given, "batch", 0, LARGEST_BATCH),
        dedup_window=float(
            _whole(
                given,
                "dedupWindowSeconds",
                int(environment.get("DEDUP_WINDOW_SECONDS", "") or _DEDUP_WINDOW_SECONDS),
                1 << 31,
            )
        ),
    )


def _name(given: Mapping[str, str], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        check_name(value, name.capitalize(), f"option {name}")
    except BadRequest as error:
        raise SettingsError(str(error)) from error
    return value


def _whole(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name.lower())
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise SettingsError(f"{name} must be a whole number from 0 to {most}, not {text!r}")
    return int(text)

"""A pipeline as it was declared, whether in Python or in YAML: sources, steps, sinks."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from queen.pipelines.errors import Where

# Windows, joins and late data all turn on one thing: when an event happened, and how late it may come.


class SourceKind(enum.Enum):
    """Where rows come from."""

    QUEUE = "queue"
    QUEUE_PATTERN = "queue_pattern"
    FILES = "files"
    RATE = "rate"


class OutputMode(enum.StrEnum):
    """What a sink gets of windows and other aggregates: results that are final, or every result that has changed."""

    APPEND = "append"
    UPDATE = "update"


class SinkKind(enum.Enum):
    """Where rows go."""

    QUEUE = "queue"
    TOPIC = "topic"
    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"
    POSTGRES = "postgres"
    CONSOLE = "console"


class WindowKind(enum.Enum):
    """The kinds of windows."""

    TUMBLING = "tumbling"
    SLIDING = "sliding"
    SESSION = "session"


_OF_QUEUES: Final = frozenset(
    {
        "start",
        "group",
        "rows_per_batch",
        "min_rows_per_batch",
        "min_bytes_per_batch",
        "max_delay",
        "bytes_per_batch",
        "max_read_share",
        "max_tasks",
        "fail_on_data_loss",
    }
)
SOURCE_OPTIONS: Final[Mapping[SourceKind, frozenset[str]]] = {
    SourceKind.QUEUE: _OF_QUEUES,
    SourceKind.QUEUE_PATTERN: _OF_QUEUES,
    SourceKind.FILES: frozenset({"files_per_batch"}),
    SourceKind.RATE: frozenset(),
}
SINK_OPTIONS: Final[Mapping[SinkKind, frozenset[str]]] = {
    SinkKind.QUEUE: frozenset({"partition", "transaction_id", "payload", "mode"}),
    SinkKind.TOPIC: frozenset({"priority", "deliver_after", "idempotency_key", "payload", "mode"}),
    SinkKind.PARQUET: frozenset({"partition_by"}),
    SinkKind.DELTA: frozenset({"partition_by", "key", "order_by", "delete_when", "mode"}),
    SinkKind.ICEBERG: frozenset({"partition_by", "key", "order_by", "delete_when", "catalog", "mode"}),
    SinkKind.POSTGRES: frozenset({"database", "key", "order_by", "mode"}),
    SinkKind.CONSOLE: frozenset({"rows", "mode"}),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that come in. `target` is the queue, the pattern of queues, the path, or for `rate` the rows per second."""

    name: str
    where: Where
    kind: SourceKind
    target: str
    schema: str | None = None
    """Fields of the JSON payload, as Spark's DDL; without it rows are as they are stored."""
    event_time: str | None = None
    lateness: str | None = None
    expect: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads_queues(self) -> bool:
        return self.kind in (SourceKind.QUEUE, SourceKind.QUEUE_PATTERN)


@dataclass(frozen=True, slots=True)
class Sql:
    """A query over the sources and steps before it, by their names."""

    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A function of DataFrames; its parameters name its inputs."""

    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Each:
    """A function called with each record as a dict; what it raises makes the record a dead letter."""

    function: Callable[[dict[str, Any]], Any]
    schema: str


@dataclass(frozen=True, slots=True)
class Window:
    """Aggregates over stretches of event time."""

    kind: WindowKind
    size: str
    """The length, or for sessions the gap that ends one."""
    aggregate: Mapping[str, str]
    slide: str | None = None
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Join:
    """Two streams, matched within a stretch of time."""

    on: str
    how: str = "inner"


@dataclass(frozen=True, slots=True)
class Dedup:
    """One row for each value of these columns; among those not further apart than the lateness, with an event time."""

    columns: tuple[str, ...]


Action: TypeAlias = Sql | Frame | Each | Window | Join | Dedup


@dataclass(frozen=True, slots=True)
class Step:
    """What is done with rows."""

    name: str
    where: Where
    action: Action
    inputs: tuple[str, ...]
    event_time: str | None = None
    lateness: str | None = None
    expect: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the rows of a source or step go. `target` is the queue, namespace/topic, path or table."""

    name: str
    where: Where
    source: str
    kind: SinkKind
    target: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> OutputMode:
        return OutputMode(self.options.get("mode", OutputMode.APPEND))

    def __str__(self) -> str:
        return f"{self.kind.value} {self.target}".strip()


Node: TypeAlias = Source | Step

ONCE: Final = "once"
WINDOW_TIME: Final = "_window_time"
"""The event time of what a window step gives. Columns that begin with _ are left out by sinks."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A pipeline."""

    name: str
    where: Where
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    trigger: str = "1 second"
    """How often batches begin, or `once`: all that is available now, and then end."""
    dead_letters: Sink | None = None

    @property
    def nodes(self) -> Iterator[Node]:
        yield from self.sources
        yield from self.steps

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    def upstream(self, name: str) -> Iterator[Node]:
        """The node, and all it gets rows from."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            one = waiting.pop()
            node = self.node(one)
            if node is None or one in seen:
                continue
            seen.add(one)
            yield node
            if isinstance(node, Step):
                waiting.extend(node.inputs)

    def event_time_of(self, name: str) -> str | None:
        """The event time that rows of a node carry: its own, else what its first input passes on."""
        node = self.node(name)
        if node is None or node.event_time is not None or isinstance(node, Source):
            return node.event_time if node is not None else None
        if isinstance(node.action, Window):
            return WINDOW_TIME
        return next((time for time in map(self.event_time_of, node.inputs) if time is not None), None)


_TABLES = re.compile(r"\b(?:from|join)\s+`?([a-z_]\w*+)`?(?!\s*\()", re.IGNORECASE)
_COMMON_TABLES = re.compile(r"(?:\bwith|,)\s+`?([a-z_]\w*)`?\s+as\s*\(", re.IGNORECASE)
_TEXTS = re.compile(r"'(?:[^'\\]|\\.)*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_EXTRACT = re.compile(r"\b(?:extract|trim|substring|overlay)\s*\([^()]*\)", re.IGNORECASE)


def tables_of(query: str) -> tuple[str, ...]:
    """The names after FROM and JOIN in a query, without its common table expressions."""
    text = _EXTRACT.sub(" ", _TEXTS.sub(" ", query))
    common = {name.lower() for name in _COMMON_TABLES.findall(text)}
    return tuple(dict.fromkeys(name for name in _TABLES.findall(text) if name.lower() not in common))

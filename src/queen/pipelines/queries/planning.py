"""Which queries a pipeline runs as: one for all sinks that can be fed by one read of their source.

A streaming query computes the rows of one node, its trunk: a source, or a step that keeps state. Whatever its sinks get
is made from each batch of these without a look at any other batch, so one batch serves them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from queen.pipelines.declaration import Declaration, OutputMode, Sink, SinkKind, Step
from queen.pipelines.errors import DeclarationError, PipelineError
from queen.pipelines.queries.frames import Frames
from queen.pipelines.queries.late_rows import are_diverted_once
from queen.pipelines.queries.operators import stream_reads
from queen.pipelines.queries.side_output import SideOutput
from queen.pipelines.session import Connection
from queen.pipelines.sinks import sink_problems
from queen.pipelines.state import LAYOUT_FILE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

DEAD_LETTERS: Final = "dead_letters"
_LETTER: Final = (
    "pipeline string, step string, error string, record string, queue string, partition string, offset long,"
    " transaction_id string"
)


class Query(msgspec.Struct, kw_only=True):
    """A query, as it is noted beside its checkpoint: a sink stays with the query that it began with."""

    name: str
    """That of its checkpoint."""
    trunk: str
    mode: OutputMode = OutputMode.APPEND
    sinks: list[str]


@dataclass
class PlannedQuery:
    """A query that can be started."""

    name: str
    trunk: str
    mode: OutputMode
    sinks: list[Sink]
    rows: DataFrame
    """Of the trunk; those that the only sink gets, if it is `direct`."""
    side: SideOutput | None = None
    judges: frozenset[str] = field(default_factory=frozenset)
    """The nodes whose dead letters it writes."""
    direct: bool = False

    @property
    def has_dead_letters(self) -> bool:
        return bool(self.judges) or (self.side is not None and bool(self.side.taps))


@dataclass
class Plan:
    """All queries of a pipeline, and the rows that each sink gets."""

    queries: list[PlannedQuery]
    rows: list[tuple[Sink, DataFrame]]
    layout: list[Query]

    def save(self, checkpoints: Path) -> None:
        """Before the first query starts, so that its checkpoint is not taken for one of another layout."""
        checkpoints.mkdir(parents=True, exist_ok=True)
        fresh = checkpoints / f"{LAYOUT_FILE}.tmp"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self.layout)))
        fresh.replace(checkpoints / LAYOUT_FILE)


def plan(
    spark: SparkSession,
    declaration: Declaration,
    connection: Connection,
    fail_on_data_loss: bool | None = None,
    checkpoints: Path | None = None,
) -> Plan:
    """Raises `DeclarationError` with every problem. `checkpoints`: where those of earlier runs would be."""
    frames = Frames(spark, declaration, connection, fail_on_data_loss=fail_on_data_loss)
    frames.check_all()
    rows = [(sink, frames.of(sink.source)) for sink in declaration.sinks]
    letters = dead_letter_sink(declaration), spark.createDataFrame([], _LETTER)
    problems = [problem for sink, given in (*rows, letters) for problem in sink_problems(sink, given)]
    if problems:
        raise DeclarationError(problems)
    trunks = _Trunks(declaration, frames)
    known = read_layout(checkpoints, declaration) if checkpoints is not None else []
    layout = lay_out({sink.name: trunks.key(sink) for sink in declaration.sinks}, known)
    planner = _Planner(spark, declaration, connection, fail_on_data_loss, checkpoints or Path())
    queries = planner.queries(layout, frames.judging)
    if any(query.has_dead_letters or query.name == DEAD_LETTERS for query in queries):
        rows.append(letters)
    return Plan(queries, rows, layout)


def dead_letter_sink(declaration: Declaration) -> Sink:
    """As declared, else a queue where queues are used, else the console."""
    if declaration.dead_letters is not None:
        return declaration.dead_letters
    queues = any(source.reads_queues for source in declaration.sources)
    queues |= any(sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC) for sink in declaration.sinks)
    kind = SinkKind.QUEUE if queues else SinkKind.CONSOLE
    target = f"{declaration.name}-dead-letters" if queues else ""
    return Sink(DEAD_LETTERS, declaration.where, "", kind, target)


Key = tuple[str, OutputMode]
"""Sinks of one trunk and mode can share a query."""


def read_layout(checkpoints: Path, declaration: Declaration) -> list[Query]:
    """The queries of earlier runs. Raises `PipelineError` when what is noted of them cannot be read."""
    try:
        return msgspec.json.decode((checkpoints / LAYOUT_FILE).read_bytes(), type=list[Query])
    except FileNotFoundError:
        # Checkpoints without a note were made when each sink was a query of its own, and so were dead letters.
        names = [*(sink.name for sink in declaration.sinks), DEAD_LETTERS]
        found = [name for name in names if (checkpoints / name / "offsets").is_dir()]
        if len(found) > 1:
            log.info(
                "pipeline '%s': %s keep one query each, as in their checkpoints; --fresh merges them into one",
                declaration.name,
                ", ".join(found),
            )
        return [Query(name=name, trunk="", sinks=[name]) for name in found]
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{checkpoints / LAYOUT_FILE} says which sinks share a checkpoint, and cannot be read ({error}):"
            " put it back, or begin again with --fresh"
        ) from error


def lay_out(keys: Mapping[str, Key], known: Sequence[Query]) -> list[Query]:
    """The queries for these sinks. One that is new reads from the start; it does not join a query that is further."""
    layout: list[Query] = []
    placed: set[str] = set()
    for query in known:
        here = [name for name in query.sinks if name in keys]
        if not here:
            # A sink that was alone goes on where it ended if it comes back.
            if query.sinks == [query.name]:
                layout.append(query)
                placed.add(query.name)
            continue
        noted = (query.trunk, query.mode)
        key = noted if any(keys[name] == noted for name in here) else keys[here[0]]
        members = [name for name in here if keys[name] == key]
        layout.append(Query(name=query.name, trunk=key[0], mode=key[1], sinks=members))
        placed.update(members)
    new: dict[Key, list[str]] = {}
    for name, key in keys.items():
        if name not in placed:
            new.setdefault(key, []).append(name)
    taken = {query.name for query in [*known, *layout]}
    for (trunk, mode), members in new.items():
        name = next(one for one in _names(trunk, mode, members) if one not in taken)
        taken.add(name)
        layout.append(Query(name=name, trunk=trunk, mode=mode, sinks=members))
    return layout


def _names(trunk: str, mode: OutputMode, members: Sequence[str]) -> Iterator[str]:
    """Names for a new query. No sink has a '-' in its name."""
    if len(members) == 1:
        yield members[0]
    base = f"from-{trunk}" if mode is OutputMode.APPEND else f"from-{trunk}-{mode}"
    yield base
    number = 2
    while True:
        yield f"{base}-{number}"
        number += 1


class _Trunks:
    def __init__(self, declaration: Declaration, frames: Frames) -> None:
        self._declaration = declaration
        self._frames = frames
        self._found: dict[str, str] = {}

    def key(self, sink: Sink) -> Key:
        trunk = self.of(sink.source)
        # Rows that nothing is kept of do not change: one mode is as the other.
        return trunk, sink.mode if self._keeps_state(trunk) else OutputMode.APPEND

    def of(self, name: str) -> str:
        """The node from whose batches the rows of a node are made."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> str:
        node = self._declaration.node(name)
        if not isinstance(node, Step) or self._frames.keeps_state(name):
            return name
        trunks = {self.of(one) for one in node.inputs}
        return trunks.pop() if len(trunks) == 1 else name

    def _keeps_state(self, trunk: str) -> bool:
        return any(isinstance(node, Step) for node in self._declaration.upstream(trunk))


class _Planner:
    def __init__(
        self,
        spark: SparkSession,
        declaration: Declaration,
        connection: Connection,
        fail_on_data_loss: bool | None,
        checkpoints: Path,
    ) -> None:
        self._spark = spark
        self._declaration = declaration
        self._connection = connection
        self._fail_on_data_loss = fail_on_data_loss
        self._checkpoints = checkpoints

    def queries(self, layout: list[Query], judging: set[str]) -> list[PlannedQuery]:
        """The queries of the layout, to which one for dead letters is added where no other can write them."""
        sinks = {sink.name: sink for sink in self._declaration.sinks}
        running = [query for query in layout if any(name in sinks for name in query.sinks)]
        apart = any(query.sinks == [DEAD_LETTERS] for query in layout)
        alone = {query.name for query in running if not self._reads_once(query)}
        judges = {} if apart else self._judges([query for query in running if query.name not in alone], judging)
        planned: list[PlannedQuery] = []
        for query in running:
            side = SideOutput(self._checkpoints / query.name) if self._is_stateful(query) else None
            own = frozenset(node for node, name in judges.items() if name == query.name)
            frames, rows = self._trunk(query, own, side)
            if side is not None and query.name in alone and not are_diverted_once(side, rows):
                side = None
                frames, rows = self._trunk(query, own, side)
            members = [sinks[name] for name in query.sinks if name in sinks]
            found = PlannedQuery(query.name, query.trunk, query.mode, members, rows, side, own)
            if len(members) == 1 and not found.has_dead_letters:
                found.rows, found.direct = frames.of(members[0].source), True
            planned.append(found)
        left = judging - judges.keys()
        if not apart:
            # What nothing takes rows from is not read for its dead letters alone.
            left &= {node for query in running for node in self._used(query)}
        letters = self._frames(judges=left)
        letters.check_all()
        rows_left = letters.dead_letters() if left else None
        if rows_left is not None:
            if not apart:
                layout.append(Query(name=DEAD_LETTERS, trunk="", sinks=[DEAD_LETTERS]))
            sink = dead_letter_sink(self._declaration)
            planned.append(PlannedQuery(DEAD_LETTERS, "", OutputMode.APPEND, [sink], rows_left, direct=True))
        return planned

    def _trunk(self, query: Query, judges: frozenset[str], side: SideOutput | None) -> tuple[Frames, DataFrame]:
        frames = self._frames(
            moves_groups=self._declaration.sinks[0].name in query.sinks,
            # What comes after the trunk is judged batch by batch.
            judges=judges & self._before(query),
            side=side,
        )
        return frames, frames.raw(query.trunk)

    def _frames(
        self, *, moves_groups: bool = False, judges: frozenset[str] | set[str], side: SideOutput | None = None
    ) -> Frames:
        return Frames(
            self._spark,
            self._declaration,
            self._connection,
            moves_groups=moves_groups,
            fail_on_data_loss=self._fail_on_data_loss,
            judges=judges,
            side=side,
        )

    def _judges(self, queries: Sequence[Query], judging: set[str]) -> dict[str, str]:
        """Which query writes the dead letters of a node: one that has its rows in a batch, else one that reads them."""
        found: dict[str, str] = {}
        for before in (False, True):
            for query in queries:
                nodes = self._before(query) if before else self._used(query) - self._before(query)
                for node in nodes & judging:
                    found.setdefault(node, query.name)
        return found

    def _used(self, query: Query) -> set[str]:
        """The nodes that its sinks get their rows from."""
        sources = [sink.source for sink in self._declaration.sinks if sink.name in query.sinks]
        return {node.name for source in sources for node in self._declaration.upstream(source)}

    def _before(self, query: Query) -> set[str]:
        return {node.name for node in self._declaration.upstream(query.trunk)} - {query.trunk}

    def _is_stateful(self, query: Query) -> bool:
        return isinstance(self._declaration.node(query.trunk), Step)

    def _reads_once(self, query: Query) -> bool:
        """Whether each source is read once: what a source read twice gives for dead letters would be written twice."""
        if not self._is_stateful(query):
            return True
        sources = {source.name for source in self._declaration.sources}
        rows = self._frames(judges=set()).raw(query.trunk)
        return stream_reads(rows) == len(sources & self._before(query))

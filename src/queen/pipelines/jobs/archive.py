"""`queen pipeline archive`: queues to Parquet files, a Delta or an Iceberg table, each message once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from queen.files import try_lock
from queen.pipelines.archive_files import PARTITION_BY, TABLE_PARTITION_BY
from queen.pipelines.declaration import Declaration, Sink, SinkKind, Source, SourceKind, Sql, Step
from queen.pipelines.errors import AlreadyRunning, ArchiveError, Where
from queen.pipelines.state import StateDirectory
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, format_at
from queen.wire.pipelines import read_status
from queen.wire.push import check_name

SINK: Final = "archive"
_LONGEST_NAME: Final = 64
_TABLE_QUERY: Final = "SELECT *, to_date(created_at) AS date FROM messages"
_QUERY: Final = (
    "SELECT *, date_format(created_at, 'yyyy-MM-dd') AS date, date_format(created_at, 'HH') AS hour FROM messages"
)


def archive_name(root: str | Path, states: StateDirectory | None = None) -> str:
    """The name under which an archive runs: that of its directory, with a hash where another archive has that name."""
    location = Location.parse(str(root))
    name = f"archive-{re.sub('[^A-Za-z0-9._-]', '-', location.name)}"[:_LONGEST_NAME]
    other = read_status(states.of(name)) if states is not None else None
    if other is None or other.file == location.url:
        return name
    ending = hashlib.sha256(location.url.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - len(ending) - 1]}-{ending}"


def archive_declaration(
    queues: Sequence[str],
    root: str | Path,
    trigger: str,
    rows_per_batch: int,
    group: str | None,
    kind: Format = Format.PARQUET,
    catalog: str | None = None,
    states: StateDirectory | None = None,
) -> Declaration:
    """The archive as a pipeline. `states` has the names of other archives of this machine."""
    for number, queue in enumerate(queues):
        check_name(queue, "the name of a queue", f"argument {number + 1}")
        if queue in queues[:number]:
            raise ArchiveError(f"queue '{queue}' is named twice")
    location = Location.parse(str(root))
    there = format_at(location)
    if there is not None and there is not kind:
        raise ArchiveError(
            f"{root} is an archive in the format {there.value}: --format {there.value}, or another directory"
        )
    if kind is Format.PARQUET and location.path is None:
        raise ArchiveError(f"{root}: archives of plain Parquet are directories; in an object store use --format delta")
    here = Where(Path(root), 0)
    query, names = (_QUERY, PARTITION_BY) if kind is Format.PARQUET else (_TABLE_QUERY, TABLE_PARTITION_BY)
    sink_options = {"partition_by": ",".join(names)} | ({"catalog": catalog} if catalog else {})
    options = {"rows_per_batch": str(rows_per_batch)} | ({"group": group} if group else {})
    return Declaration(
        name=archive_name(root, states),
        where=here,
        sources=(Source("messages", here, SourceKind.QUEUE, json.dumps(list(queues)), options=options),),
        steps=(Step("dated", here, Sql(query), ("messages",)),),
        sinks=(Sink(SINK, here, "dated", SinkKind(kind.value), location.url, sink_options),),
        trigger=trigger,
    )


@contextmanager
def sole_archiver(root: str | Path, elsewhere: Path | None = None) -> Iterator[Path]:
    """The checkpoints, which are kept in the archive: what it holds and how far it is belong together.

    Those of an archive in an object store are kept `elsewhere`, on this machine.
    """
    path = Location.parse(str(root)).path
    checkpoints = path / "_checkpoints" if path is not None else elsewhere
    if checkpoints is None:
        raise ArchiveError(f"{root}: an archive in an object store needs a directory for its checkpoints")
    checkpoints.mkdir(parents=True, exist_ok=True)
    with (checkpoints / "lock").open("a") as lock:
        if not try_lock(lock.fileno()):
            raise AlreadyRunning(f"another process archives to {root}: stop it first")
        yield checkpoints


def check_table(root: str | Path, checkpoints: Path) -> None:
    """Checkpoints that are kept elsewhere outlive a table that was removed, and know how far that one was."""
    location = Location.parse(str(root))
    if location.path is not None or format_at(location) is not None:
        return
    if any(checkpoints.glob("*/commits/[0-9]*")):
        raise ArchiveError(
            f"there is no table at {location}, though messages were archived to it according to {checkpoints}: with"
            " --fresh all that the queues hold is archived again"
        )

"""`queen pipeline archive`: queues to Parquet files, a Delta or an Iceberg table, each message once."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from queen.pipelines.archive_files import PARTITION_BY, TABLE_PARTITION_BY
from queen.pipelines.declaration import Declaration, Sink, SinkKind, Source, SourceKind, Sql, Step
from queen.pipelines.errors import AlreadyRunning, ArchiveError, Where
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, format_at
from queen.wire.push import check_name

SINK: Final = "archive"
_TABLE_QUERY: Final = "SELECT *, to_date(created_at) AS date FROM messages"
_QUERY: Final = (
    "SELECT *, date_format(created_at, 'yyyy-MM-dd') AS date, date_format(created_at, 'HH') AS hour FROM messages"
)


def archive_name(root: str | Path) -> str:
    """The name under which an archive runs."""
    return f"archive-{re.sub('[^A-Za-z0-9._-]', '-', Location.parse(str(root)).name)}"[:64]


def archive_declaration(
    queues: Sequence[str],
    root: str | Path,
    trigger: str,
    rows_per_batch: int,
    group: str | None,
    kind: Format = Format.PARQUET,
    catalog: str | None = None,
) -> Declaration:
    """The archive as a pipeline."""
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
        name=archive_name(root),
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"another process archives to {root}: stop it first") from None
        yield checkpoints

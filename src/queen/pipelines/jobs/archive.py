"""`queen pipeline archive`: queues to Parquet files by queue, date and hour, each message once."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from queen.pipelines.archive_files import PARTITION_BY
from queen.pipelines.declaration import Declaration, Sink, SinkKind, Source, SourceKind, Sql, Step
from queen.pipelines.errors import AlreadyRunning, Where

SINK: Final = "archive"
_QUERY: Final = (
    "SELECT *, date_format(created_at, 'yyyy-MM-dd') AS date, date_format(created_at, 'HH') AS hour FROM messages"
)


def archive_name(root: Path) -> str:
    """The name under which an archive runs."""
    return f"archive-{re.sub('[^A-Za-z0-9._-]', '-', root.absolute().name)}"[:64]


def archive_declaration(
    queues: Sequence[str], root: Path, trigger: str, rows_per_batch: int, group: str | None
) -> Declaration:
    """The archive as a pipeline."""
    here = Where(root, 0)
    options = {"rows_per_batch": str(rows_per_batch)} | ({"group": group} if group else {})
    return Declaration(
        name=archive_name(root),
        where=here,
        sources=(Source("messages", here, SourceKind.QUEUE, json.dumps(list(queues)), options=options),),
        steps=(Step("dated", here, Sql(_QUERY), ("messages",)),),
        sinks=(Sink(SINK, here, "dated", SinkKind.PARQUET, str(root), {"partition_by": ",".join(PARTITION_BY)}),),
        trigger=trigger,
    )


@contextmanager
def sole_archiver(root: Path) -> Iterator[Path]:
    """The checkpoints, which are kept in the archive: what it holds and how far it is belong together."""
    checkpoints = root.absolute() / "_checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with (checkpoints / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(f"another process archives to {root}: stop it first") from None
        yield checkpoints

"""An archive of queues: what its files hold, and how they are read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from queen.pipelines.errors import ArchiveError
from queen.pipelines.manifest import DataFile, Manifest
from queen.pipelines.sinks import local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_BY: Final = ("queue", "date", "hour")
MESSAGE_COLUMNS: Final = (
    "queue",
    "partition",
    "offset",
    "message_id",
    "transaction_id",
    "trace_id",
    "created_at",
    "producer_sub",
    "payload",
)
_SCHEMA: Final = (
    "partition string, offset long, message_id string, transaction_id string, trace_id string, created_at timestamp,"
    " producer_sub string, payload string, queue string, date string, hour string"
)


def open_archive(root: Path) -> Manifest:
    """Raises `ArchiveError` when there is none."""
    manifest = Manifest(root)
    if not manifest.exists:
        raise ArchiveError(f"{root} is no archive; make one with: queen pipeline archive QUEUE --to {root}")
    return manifest


def read_files(spark: SparkSession, manifest: Manifest, files: Sequence[DataFile]) -> DataFrame:
    """The rows of these files, with the columns of messages."""
    if not files:
        return spark.createDataFrame([], _SCHEMA).select(*MESSAGE_COLUMNS)
    reader = spark.read.schema(_SCHEMA).option("basePath", local(manifest.root))
    return reader.parquet(*(local(manifest.root / file.path) for file in files)).select(*MESSAGE_COLUMNS)


def files_of(
    files: Iterable[DataFile],
    queues: Sequence[str] = (),
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[DataFile]:
    """Those that may hold messages of the queues (all when none is named) and of the time."""
    chosen = []
    for file in files:
        queue, hour = place_of(file)
        if queues and queue not in queues:
            continue
        if (since is not None and hour + timedelta(hours=1) <= since) or (until is not None and hour >= until):
            continue
        chosen.append(file)
    return chosen


def check_queues(files: Iterable[DataFile], queues: Sequence[str]) -> None:
    """Raises `ArchiveError` for a queue of which the archive holds nothing."""
    known = sorted({place_of(file)[0] for file in files})
    for queue in queues:
        if queue not in known:
            near = difflib.get_close_matches(queue, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it holds {', '.join(known) or 'nothing'}"
            raise ArchiveError(f"the archive holds no messages of queue '{queue}'; {hint}")


def place_of(file: DataFile) -> tuple[str, datetime]:
    """The queue of a file, and the hour that its messages are of."""
    parts = dict(part.partition("=")[::2] for part in PurePosixPath(file.path).parent.parts)
    try:
        moment = datetime.strptime(f"{parts['date']} {parts['hour']}", "%Y-%m-%d %H").replace(tzinfo=UTC)
        return unquote(parts["queue"]), moment
    except (KeyError, ValueError) as error:
        raise ArchiveError(f"{file.path} is no file of an archive of queues") from error

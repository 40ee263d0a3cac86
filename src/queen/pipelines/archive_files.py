"""An archive of queues: what its files hold, and how they are read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote

from queen.pipelines.errors import ArchiveError
from queen.pipelines.manifest import DataFile, Manifest
from queen.pipelines.sinks import local
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, format_at, open_table
from queen.pipelines.tables.table import AsOf, StoredFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_BY: Final = ("queue", "date", "hour")
# Tables know the least and the largest time of every file, so that hours need no folders.
TABLE_PARTITION_BY: Final = ("queue", "date")
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
    " producer_sub string, payload string, queue string"
)
_FOLDERS: Final = ", date string, hour string"


def open_archive(root: Path) -> Manifest:
    """Raises `ArchiveError` when there is none."""
    manifest = Manifest(root)
    if not manifest.exists:
        raise ArchiveError(f"{root} is no archive; make one with: queen pipeline archive QUEUE --to {root}")
    return manifest


def read_files(spark: SparkSession, manifest: Manifest, files: Sequence[DataFile]) -> DataFrame:
    """The rows of these files, with the columns of messages."""
    if not files:
        return spark.createDataFrame([], _SCHEMA + _FOLDERS).select(*MESSAGE_COLUMNS)
    reader = spark.read.schema(_SCHEMA + _FOLDERS).option("basePath", local(manifest.root))
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


class ArchiveView(Protocol):
    """What an archive holds, while it is read."""

    def queues(self) -> list[str]:
        """Those of which it has messages."""

    def count_files(
        self, queues: Sequence[str] = (), since: datetime | None = None, until: datetime | None = None
    ) -> int:
        """How many files may hold messages of the queues (all when none is named) and of the time."""

    def rows(
        self,
        spark: SparkSession,
        queues: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> DataFrame:
        """The rows of these files, with the columns of messages."""


@contextmanager
def reading(root: str | Path, as_of: AsOf = None, catalog: str | None = None) -> Iterator[ArchiveView]:
    """The archive as it is now, or as it was. Raises `ArchiveError` when there is none."""
    location = Location.parse(str(root))
    kind = format_at(location)
    if kind in (Format.DELTA, Format.ICEBERG):
        yield _TableView(open_table(kind, location, catalog).files(as_of))
        return
    if as_of is not None:
        raise ArchiveError(f"{root} is no table, and has no versions: --as-of is for archives in delta and iceberg")
    manifest = open_archive(Path(root))
    with manifest.reading() as snapshot:
        yield _DirectoryView(manifest, snapshot.files)


class _DirectoryView:
    def __init__(self, manifest: Manifest, files: Sequence[DataFile]) -> None:
        self._manifest = manifest
        self._files = files

    def queues(self) -> list[str]:
        return sorted({place_of(file)[0] for file in self._files})

    def count_files(
        self, queues: Sequence[str] = (), since: datetime | None = None, until: datetime | None = None
    ) -> int:
        return len(files_of(self._files, queues, since, until))

    def rows(
        self,
        spark: SparkSession,
        queues: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> DataFrame:
        return read_files(spark, self._manifest, files_of(self._files, queues, since, until))


class _TableView:
    def __init__(self, files: Sequence[StoredFile]) -> None:
        self._files = files

    def queues(self) -> list[str]:
        return sorted({_queue_of(file) for file in self._files})

    def count_files(
        self, queues: Sequence[str] = (), since: datetime | None = None, until: datetime | None = None
    ) -> int:
        return len(self._chosen(queues, since, until))

    def rows(
        self,
        spark: SparkSession,
        queues: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> DataFrame:
        from queen.pipelines.tables.files import read_files as read_table_files

        files = [(file.url, {"queue": _queue_of(file)}) for file in self._chosen(queues, since, until)]
        return read_table_files(spark, files, _SCHEMA).select(*MESSAGE_COLUMNS)

    def _chosen(self, queues: Sequence[str], since: datetime | None, until: datetime | None) -> list[StoredFile]:
        chosen = []
        for file in self._files:
            day = file.values.get("date")
            if queues and _queue_of(file) not in queues:
                continue
            if day is not None and since is not None and day < f"{since.astimezone(UTC):%Y-%m-%d}":
                continue
            if day is not None and until is not None and day > f"{until.astimezone(UTC):%Y-%m-%d}":
                continue
            chosen.append(file)
        return chosen


def _queue_of(file: StoredFile) -> str:
    try:
        return file.values["queue"] or ""
    except KeyError:
        raise ArchiveError(f"{file.url} is no file of an archive of queues: its table is not by queue") from None


def check_queues(view: ArchiveView, queues: Sequence[str]) -> None:
    """Raises `ArchiveError` for a queue of which the archive holds nothing."""
    known = view.queues()
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

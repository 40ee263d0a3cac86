"""An archive of queues: what its files hold, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from queen.suggestions import did_you_mean

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


def open_archive(root: str | Path) -> Manifest:
    """Raises `ArchiveError` when there is none."""
    path = Location.parse(str(root)).path
    manifest = Manifest(path) if path is not None else None
    if manifest is None or not manifest.exists:
        raise ArchiveError(f"{root} is not an archive; make one with: queen pipeline archive QUEUE --to {root}")
    return manifest


def read_files(spark: SparkSession, manifest: Manifest, files: Sequence[DataFile]) -> DataFrame:
    """The rows of these files, with the columns of messages."""
    if not files:
        return spark.createDataFrame([], _SCHEMA + _FOLDERS).select(*MESSAGE_COLUMNS)
    reader = spark.read.schema(_SCHEMA + _FOLDERS).option("basePath", local(manifest.root))
    return reader.parquet(*(local(manifest.root / file.path) for file in files)).select(*MESSAGE_COLUMNS)


@dataclass(frozen=True, slots=True)
class Selection:
    """Messages of these queues (all when none is named), pushed at or after one time and before another."""

    queues: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None

    def has_queue(self, queue: str) -> bool:
        return not self.queues or queue in self.queues

    def meets(self, begin: datetime, end: datetime) -> bool:
        """Whether it may have messages of a stretch of time, whose end is not in it."""
        return (self.since is None or end > self.since) and (self.until is None or begin < self.until)


ALL: Final = Selection()


class ArchiveView(Protocol):
    """What an archive holds, while it is read."""

    def queues(self) -> list[str]:
        """The queues that the archive has messages of."""

    def count_files(self, selection: Selection = ALL) -> int:
        """How many files may hold selected messages."""

    def rows(self, spark: SparkSession, selection: Selection = ALL) -> DataFrame:
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
        raise ArchiveError(f"{root} is not a table, and has no versions: --as-of is for archives in delta and iceberg")
    manifest = open_archive(root)
    with manifest.reading() as snapshot:
        yield _DirectoryView(manifest, snapshot.files)


class _DirectoryView:
    def __init__(self, manifest: Manifest, files: Sequence[DataFile]) -> None:
        self._manifest = manifest
        self._files = files

    def queues(self) -> list[str]:
        return sorted({place_of(file)[0] for file in self._files})

    def count_files(self, selection: Selection = ALL) -> int:
        return len(self._chosen(selection))

    def rows(self, spark: SparkSession, selection: Selection = ALL) -> DataFrame:
        return read_files(spark, self._manifest, self._chosen(selection))

    def _chosen(self, selection: Selection) -> list[DataFile]:
        chosen = []
        for file in self._files:
            queue, hour = place_of(file)
            if selection.has_queue(queue) and selection.meets(hour, hour + timedelta(hours=1)):
                chosen.append(file)
        return chosen


class _TableView:
    def __init__(self, files: Sequence[StoredFile]) -> None:
        self._files = files

    def queues(self) -> list[str]:
        return sorted({_queue_of(file) for file in self._files})

    def count_files(self, selection: Selection = ALL) -> int:
        return len(self._chosen(selection))

    def rows(self, spark: SparkSession, selection: Selection = ALL) -> DataFrame:
        from queen.pipelines.tables.files import read_files as read_table_files

        files = [(file.url, {"queue": _queue_of(file)}) for file in self._chosen(selection)]
        return read_table_files(spark, files, _SCHEMA).select(*MESSAGE_COLUMNS)

    def _chosen(self, selection: Selection) -> list[StoredFile]:
        return [
            file for file in self._files if selection.has_queue(_queue_of(file)) and selection.meets(*_day_of(file))
        ]


def _day_of(file: StoredFile) -> tuple[datetime, datetime]:
    """When the day of a file begins and ends; one that has none may be of any time."""
    text = file.values.get("date")
    if text is None:
        return datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    day = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return day, day + timedelta(days=1)


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
            hint = did_you_mean(queue, known, f"it holds {', '.join(known) or 'nothing'}")
            raise ArchiveError(f"the archive holds no messages of queue '{queue}'; {hint}")


def place_of(file: DataFile) -> tuple[str, datetime]:
    """The queue of a file, and the hour that its messages are of."""
    parts = dict(part.partition("=")[::2] for part in PurePosixPath(file.path).parent.parts)
    try:
        moment = datetime.strptime(f"{parts['date']} {parts['hour']}", "%Y-%m-%d %H").replace(tzinfo=UTC)
        return unquote(parts["queue"]), moment
    except (KeyError, ValueError) as error:
        raise ArchiveError(f"{file.path} is no file of an archive of queues") from error

"""What a table format has to offer, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from queen.pipelines.errors import PipelineError
from queen.pipelines.tables.files import FilePlan, WrittenFile
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.schemas import Evolution

AsOf: TypeAlias = int | datetime | None
"""A version, a time, or now."""
DELETED: Final = "queen_deleted"
"""A column of rows that are merged: the row with this key is to go."""


class CommitConflict(PipelineError):
    """Another process has changed the table meanwhile, so that the commit has to be retried."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a version. `values` are those of the partition columns."""

    url: str
    rows: int
    bytes: int
    values: dict[str, str | None] = field(default_factory=dict)


class Version(msgspec.Struct, frozen=True):
    """A state of the table. `writer` and `batch` say which batch of which query made it."""

    id: int
    at: datetime
    operation: str
    writer: str | None = None
    batch: int | None = None


@dataclass(slots=True)
class Compacted:
    """What a compaction did."""

    files_before: int = 0
    files_after: int = 0


File = TypeVar("File")


def packed(files: Iterable[File], size_of: Callable[[File], int], target_bytes: int) -> Iterator[list[File]]:
    """Files that together are about one of the wanted size, in their order; one that is left alone stays."""
    group: list[File] = []
    size = 0
    for file in files:
        if group and size + size_of(file) > target_bytes:
            if len(group) > 1:
                yield group
            group, size = [], 0
        group.append(file)
        size += size_of(file)
    if len(group) > 1:
        yield group


class Table(ABC):
    """One table, as of when it was opened or refreshed. Commits raise `CommitConflict`, and then change nothing."""

    location: Location

    @property
    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def refresh(self) -> None: ...

    @abstractmethod
    def create(self, schema: Any, partition_by: Sequence[str]) -> None:
        """Make it, with columns that may all be null; one that is there stays as it is."""

    @property
    @abstractmethod
    def partition_by(self) -> tuple[str, ...]: ...

    @abstractmethod
    def last_batch(self, writer: str) -> int | None:
        """The last batch that a query committed. It is part of the commit itself."""

    @abstractmethod
    def evolved(self, rows: Any) -> Evolution:
        """The columns that the table needs for rows of this schema. Raises `SchemaChange`."""

    @abstractmethod
    def change(self, evolution: Evolution) -> None:
        """Add columns now, if the format cannot do it in the commit that brings the rows."""

    @abstractmethod
    def plan(self, evolution: Evolution) -> FilePlan: ...

    @abstractmethod
    def append(self, files: Sequence[WrittenFile], evolution: Evolution, writer: str, batch: int) -> None: ...

    @abstractmethod
    def merge(self, rows: Any, key: Sequence[str], evolution: Evolution, writer: str, batch: int) -> None:
        """Rows of an Arrow table, one for each key: they replace those with their key, or remove them (`DELETED`)."""

    @abstractmethod
    def versions(self) -> list[Version]:
        """The newest first."""

    @abstractmethod
    def files(self, as_of: AsOf = None) -> list[StoredFile]: ...

    @abstractmethod
    def compact(
        self, target_bytes: int, least_files: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Compacted:
        """Join small files of each partition that has enough of them."""

    @abstractmethod
    def vacuum(self, keep_hours: int, *, dry_run: bool) -> list[str]:
        """Remove files that no version of the last hours has, also what killed runs left; returns them."""

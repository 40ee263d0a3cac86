"""Delta Lake: commits by delta-rs, each with the number of the batch it stored as an application transaction."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow

from queen.pipelines.errors import ArchiveError, SchemaChange, TablesMissing
from queen.pipelines.tables.files import FilePlan, WrittenFile
from queen.pipelines.tables.locations import Location, list_files
from queen.pipelines.tables.schemas import Evolution, evolve, fitted
from queen.pipelines.tables.table import DELETED, AsOf, CommitConflict, Compacted, StoredFile, Table, Version

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.transaction import AddAction
except ImportError as error:
    raise TablesMissing("Delta Lake needs deltalake: pip install '.[tables]' in a clone") from error

if TYPE_CHECKING:
    from deltalake import DeltaTable

_APPEND: Final = "append"


class DeltaLake(Table):
    """One table, as of when it was opened."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._table: DeltaTable | None = None
        self.refresh()

    def refresh(self) -> None:
        with _commits(self.location):
            try:
                self._table = deltalake.DeltaTable(self.location.url)
            except TableNotFoundError:
                self._table = None

    @property
    def exists(self) -> bool:
        return self._table is not None

    def create(self, schema: Any, partition_by: Sequence[str]) -> None:
        for field in schema:
            _check_type(self.location.url, field)
        given = deltalake.Schema.from_arrow(schema)
        with _commits(self.location):
            # Another process may have made it meanwhile.
            self._table = deltalake.DeltaTable.create(
                self.location.url, given, mode="ignore", partition_by=list(partition_by)
            )

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self._opened.metadata().partition_columns)

    def last_batch(self, writer: str) -> int | None:
        return self._opened.transaction_version(writer)

    def evolved(self, rows: Any) -> Evolution:
        current = pyarrow.schema(self._opened.schema().to_arrow())
        found = evolve(self.location.url, current, rows, promotes=False)
        for field in found.added:
            if field.name in current.names:
                raise SchemaChange(
                    f"table {self.location}: column '{field.name}' would get more fields, and delta-rs adds none inside"
                    " of a column; write it as JSON, or to another column"
                )
            _check_type(self.location.url, field)
        return found

    def change(self, evolution: Evolution) -> None:
        """Columns are added in a commit of their own: they are null until there are rows that have them."""
        if evolution.added:
            with _commits(self.location):
                self._opened.alter.add_columns(
                    [deltalake.Field.from_arrow(field) for field in evolution.added],
                )
            self.refresh()

    def plan(self, evolution: Evolution) -> FilePlan:
        return FilePlan(self.location, "", evolution.schema, self.partition_by, keeps_values=False)

    def append(self, files: Sequence[WrittenFile], evolution: Evolution, writer: str, batch: int) -> None:
        now = int(time.time() * 1000)
        actions: list[Any] = [
            AddAction(
                file.path,
                file.bytes,
                file.values,
                now,
                True,
                json.dumps({"numRecords": file.rows, **file.bounds}),
            )
            for file in files
        ]
        with _commits(self.location):
            self._opened.create_write_transaction(
                actions,
                mode=_APPEND,
                schema=self._opened.schema(),
                partition_by=list(self.partition_by),
                commit_properties=_properties(writer, batch),
            )
            self._opened.update_incremental()

    def merge(self, rows: Any, key: Sequence[str], evolution: Evolution, writer: str, batch: int) -> None:
        deleted = rows.column(DELETED)
        source = fitted(rows, evolution.schema).append_column(DELETED, deleted)
        # Rows whose key is not known replace none.
        same = " AND ".join(f"t.{_quoted(name)} = s.{_quoted(name)}" for name in key)
        columns = {_quoted(name): f"s.{_quoted(name)}" for name in evolution.schema.names}
        with _commits(self.location):
            merger = self._opened.merge(
                source, same, source_alias="s", target_alias="t", commit_properties=_properties(writer, batch)
            )
            merger = merger.when_matched_delete(f"s.{DELETED}")
            merger = merger.when_matched_update(columns, predicate=f"NOT s.{DELETED}")
            merger.when_not_matched_insert(columns, predicate=f"NOT s.{DELETED}").execute()
            self._opened.update_incremental()

    def versions(self) -> list[Version]:
        return [_version(entry) for entry in self._opened.history()]

    def files(self, as_of: AsOf = None) -> list[StoredFile]:
        table = self._at(as_of)
        features = table.protocol().reader_features or []
        if "deletionVectors" in features and table.deletion_vectors().read_all().num_rows:
            raise ArchiveError(f"{self.location} has deletion vectors: purge them with the engine that wrote them")
        actions = pyarrow.table(table.get_add_actions(flatten=True)).to_pylist()
        names = table.metadata().partition_columns
        return [
            StoredFile(
                url=self.location.below(unquote(one["path"])),
                rows=one.get("num_records") or 0,
                bytes=one["size_bytes"],
                values={name: _value(one.get(f"partition.{name}")) for name in names},
            )
            for one in actions
        ]

    def compact(
        self, target_bytes: int, least_files: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Compacted:
        small: Counter[tuple[str | None, ...]] = Counter()
        names = self.partition_by
        for file in self.files():
            if file.bytes < target_bytes:
                small[tuple(file.values[name] for name in names)] += 1
        chosen = [values for values, count in small.items() if count >= max(2, least_files)]
        done = Compacted()
        for index, values in enumerate(chosen):
            on_progress(index, len(chosen))
            # Without partitions all of the table is one.
            filters = [(name, "=", "" if value is None else value) for name, value in zip(names, values, strict=True)]
            with _commits(self.location):
                metrics = self._opened.optimize.compact(
                    partition_filters=filters or None, target_size=target_bytes, max_concurrent_tasks=2
                )
            done.files_before += metrics["numFilesRemoved"]
            done.files_after += metrics["numFilesAdded"]
        on_progress(len(chosen), len(chosen))
        return done

    def vacuum(self, keep_hours: int, *, dry_run: bool) -> list[str]:
        # The log names files that an earlier vacuum removed, too.
        there = {path for path, _ in list_files(self.location.url)}
        with _commits(self.location):
            found = self._opened.vacuum(keep_hours, dry_run=dry_run, enforce_retention_duration=False, full=True)
        named = {self.location.below(unquote(path)): path for path in found}
        return sorted(url for url, path in named.items() if url in there or self.location.below(path) in there)

    @property
    def _opened(self) -> DeltaTable:
        if self._table is None:
            raise ArchiveError(f"{self.location} is no Delta table")
        return self._table

    def _at(self, as_of: AsOf) -> DeltaTable:
        if as_of is None:
            return self._opened
        table = deltalake.DeltaTable(self.location.url)
        last = table.version()
        if isinstance(as_of, int) and not 0 <= as_of <= last:
            raise ArchiveError(f"{self.location} has versions 0 to {last}, not {as_of}")
        if isinstance(as_of, datetime):
            first = min(version.at for version in self.versions())
            if as_of < first:
                raise ArchiveError(
                    f"{self.location} has no version of {as_of:%Y-%m-%d %H:%M:%S} UTC;"
                    f" the first is of {first:%Y-%m-%d %H:%M:%S} UTC"
                )
        try:
            table.load_as_version(as_of)
        except DeltaError as error:
            raise ArchiveError(f"{self.location}: version {as_of} cannot be read any more: {error}") from error
        return table


def _check_type(table: str, field: Any) -> None:
    try:
        deltalake.Field.from_arrow(field)
    except (DeltaError, ValueError, TypeError) as error:
        raise SchemaChange(
            f"table {table}: column '{field.name}' is {field.type}, which Delta Lake cannot hold"
        ) from error


def _properties(writer: str, batch: int) -> deltalake.CommitProperties:
    return deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction(writer, batch, int(time.time() * 1000))],
        custom_metadata={"queenWriter": writer, "queenBatch": batch},
    )


def _version(entry: dict[str, Any]) -> Version:
    batch = entry.get("queenBatch")
    return Version(
        id=entry["version"],
        at=datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
        operation=str(entry.get("operation", "")).lower(),
        writer=entry.get("queenWriter"),
        batch=int(batch) if batch is not None else None,
    )


def _value(value: Any) -> str | None:
    return None if value is None else str(value)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


_COLOUR: Final = re.compile("\x1b\\[[0-9;]*m")


@contextmanager
def _commits(location: Location) -> Iterator[None]:
    """Raises `CommitConflict` where another process was faster, and `ArchiveError` for the rest."""
    try:
        yield
    except CommitFailedError as error:
        raise CommitConflict(str(error)) from error
    except DeltaError as error:
        # Its first line says what is wrong, the others where in its own code.
        raise ArchiveError(f"table {location} cannot be used: {str(error).partition(chr(10))[0]}") from error
    except OSError as error:
        # Its lines are coloured, each the cause of the one before.
        why = ": ".join(line.strip(" ↳.") for line in _COLOUR.sub("", str(error)).splitlines() if line.strip())
        remedy = "Check its bucket, endpoint and credentials" if location.path is None else "Check its disk"
        raise ArchiveError(f"table {location} cannot be used: {why}. {remedy}") from error

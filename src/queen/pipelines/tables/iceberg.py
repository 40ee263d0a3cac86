"""Apache Iceberg: commits by PyIceberg, each with the number of the batch it stored, in its snapshot and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from queen.pipelines.errors import ArchiveError, PipelineError, SchemaChange, TablesMissing
from queen.pipelines.tables.files import FilePlan, WrittenFile, write_table
from queen.pipelines.tables.locations import Location, list_files, open_file, remove_files
from queen.pipelines.tables.schemas import Evolution, evolve, fitted, plain_type
from queen.pipelines.tables.table import DELETED, AsOf, CommitConflict, Compacted, StoredFile, Table, Version, packed

try:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import (
        CommitFailedException,
        NoSuchTableError,
        TableAlreadyExistsError,
        ValidationException,
    )
    from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual
    from pyiceberg.io.pyarrow import ArrowScan, parquet_file_to_data_file, schema_to_pyarrow
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.table import TableProperties
except ImportError as error:
    raise TablesMissing("Iceberg needs pyiceberg and SQLAlchemy: pip install '.[tables]' in a clone") from error

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import FileScanTask, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

CATALOG: Final = "queen"
NAMESPACE: Final = "queen"
_CATALOG_FILE: Final = "catalog.db"
_HINT: Final = "metadata/version-hint.text"
_WRITER: Final = "queen.writer"
_BATCH: Final = "queen.batch"
_LAST: Final = "queen.last-batch."
"""With the name of the writer, a property of the table: it stays when snapshots expire."""
_COMMIT_ATTEMPTS: Final = 5


class Iceberg(Table):
    """One table, as of when it was opened.

    Its catalog is a database: the one at the URL given, else a SQLite file beside the data of a local table.
    """

    def __init__(self, location: Location, catalog: str | None = None) -> None:
        self.location = location
        self._catalog = _open_catalog(location, catalog)
        self._name = (NAMESPACE, location.name)
        self._table: IcebergTable | None = None
        self.refresh()

    def refresh(self) -> None:
        try:
            table = self._catalog.load_table(self._name)
        except NoSuchTableError:
            self._table = None
            return
        if table.location().rstrip("/") != self.location.uri:
            raise ArchiveError(
                f"table {'.'.join(self._name)} of the catalog is at {table.location()}, not at {self.location};"
                " choose a directory of another name, or another catalog"
            )
        # A commit that lost a race is retried by the sink, which knows the batch, and not by PyIceberg.
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        self._table = table

    @property
    def exists(self) -> bool:
        return self._table is not None

    def create(self, schema: Any, partition_by: Sequence[str]) -> None:
        columns = _supported(self.location.url, schema)
        self._catalog.create_namespace_if_not_exists(NAMESPACE)
        try:
            transaction = self._catalog.create_table_transaction(self._name, columns, location=self.location.uri)
            with transaction.update_spec() as spec:
                for name in partition_by:
                    spec.add_identity(name)
            transaction.commit_transaction()
        except TableAlreadyExistsError:
            pass
        except CommitFailedException as error:
            raise CommitConflict(str(error)) from error
        self.refresh()
        self._write_hint()

    @property
    def partition_by(self) -> tuple[str, ...]:
        schema = self._opened.schema()
        return tuple(schema.find_column_name(field.source_id) or field.name for field in self._opened.spec().fields)

    def last_batch(self, writer: str) -> int | None:
        found = self._opened.properties.get(_LAST + writer)
        return None if found is None else int(found)

    def evolved(self, rows: Any) -> Evolution:
        current = schema_to_pyarrow(self._opened.schema(), include_field_ids=False)
        return evolve(self.location.url, current, _supported(self.location.url, rows), promotes=True)

    def change(self, evolution: Evolution) -> None:
        """Columns are added in the commit that brings the rows."""

    def plan(self, evolution: Evolution) -> FilePlan:
        # With the ids that new columns will have.
        schema = _arrow(self._changed(evolution).table_metadata)
        return FilePlan(self.location, "data", schema, self.partition_by, keeps_values=True)

    def append(self, files: Sequence[WrittenFile], evolution: Evolution, writer: str, batch: int) -> None:
        transaction = self._changed(evolution)
        with transaction.update_snapshot(_summary(writer, batch)).fast_append() as snapshot:
            for file in files:
                snapshot.append_data_file(self._data_file(transaction.table_metadata, file.path))
        self._commit(transaction, writer, batch)

    def merge(self, rows: Any, key: Sequence[str], evolution: Evolution, writer: str, batch: int) -> None:
        transaction = self._changed(evolution)
        metadata = transaction.table_metadata
        plan = FilePlan(self.location, "data", _arrow(metadata), self.partition_by, keeps_values=True)
        kept = rows.filter(pyarrow.compute.invert(rows.column(DELETED)))
        keys = rows.select(list(key))
        # Files are replaced as a whole: those that have rows with one of the keys.
        replaced: list[tuple[DataFile, Any]] = []
        for task in self._tasks(metadata, _range(keys)):
            there = self._rows_of(metadata, task)
            left = _without(there, keys, key)
            if left.num_rows < there.num_rows:
                replaced.append((task.file, left))
        written = [table for _, table in replaced if table.num_rows]
        if not replaced and not kept.num_rows:
            return
        with transaction.update_snapshot(_summary(writer, batch)).overwrite() as snapshot:
            for file, _ in replaced:
                snapshot.delete_data_file(file)
            for table in (*written, kept):
                for one in write_table(table, plan):
                    snapshot.append_data_file(self._data_file(metadata, one.path))
        self._commit(transaction, writer, batch)

    def versions(self) -> list[Version]:
        metadata = self._opened.metadata
        newest_first = sorted(metadata.snapshots, key=lambda one: one.sequence_number or 0, reverse=True)
        return [_version(snapshot) for snapshot in newest_first]

    def files(self, as_of: AsOf = None) -> list[StoredFile]:
        table, found = self._opened, self._snapshot(as_of)
        if found is None:
            return []
        files = []
        for task in table.scan(snapshot_id=found).plan_files():
            if task.delete_files:
                raise ArchiveError(f"{self.location} has delete files: rewrite them with the engine that wrote them")
            names = [field.name for field in table.specs()[task.file.spec_id].fields]
            values = {name: _value(table, name, task.file.partition[at]) for at, name in enumerate(names)}
            size = task.file.file_size_in_bytes
            files.append(StoredFile(_local(task.file.file_path), task.file.record_count, size, values))
        return files

    def compact(
        self, target_bytes: int, least_files: int, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Compacted:
        done = Compacted()
        groups = [group for group in self._small(target_bytes).values() if len(group) >= max(2, least_files)]
        for index, group in enumerate(groups):
            on_progress(index, len(groups))
            for part in packed(group, lambda task: task.file.file_size_in_bytes, target_bytes):
                self._join(part)
                done.files_before += len(part)
                done.files_after += 1
        on_progress(len(groups), len(groups))
        return done

    def vacuum(self, keep_hours: int, *, dry_run: bool) -> list[str]:
        limit = datetime.now(UTC) - timedelta(hours=keep_hours)
        table = self._opened
        kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
        expired = {one.snapshot_id for one in table.metadata.snapshots if _moment(one.timestamp_ms) < limit} - kept
        if expired and not dry_run:
            try:
                table.maintenance.expire_snapshots().by_ids(sorted(expired)).commit()
            except CommitFailedException as error:
                raise CommitConflict(str(error)) from error
            self.refresh()
            self._write_hint()
        used = _used_files(self._opened, without=expired)
        unused = [
            path
            for folder in ("data", "metadata")
            for path, written in list_files(self.location.below(folder))
            if path not in used and written < limit.timestamp() and not path.endswith(_HINT)
        ]
        if not dry_run:
            remove_files(unused)
        return sorted(unused)

    @property
    def _opened(self) -> IcebergTable:
        if self._table is None:
            raise ArchiveError(f"{self.location} is no Iceberg table, or is not in this catalog")
        return self._table

    def _changed(self, evolution: Evolution) -> Transaction:
        transaction = self._opened.transaction()
        if evolution.changes:
            with transaction.update_schema() as update:
                update.union_by_name(pyarrow.schema([*evolution.promoted, *evolution.added]))
        return transaction

    def _commit(self, transaction: Transaction, writer: str | None = None, batch: int = 0) -> None:
        if writer is not None:
            transaction.set_properties({_LAST + writer: str(batch)})
        with _commits():
            transaction.commit_transaction()
        self.refresh()
        self._write_hint()

    def _write_hint(self) -> None:
        """Names the newest metadata for readers without a catalog."""
        name = self._opened.metadata_location.rpartition("/")[2].removesuffix(".metadata.json")
        path = self.location.path
        if path is None:
            with open_file(self.location.below(_HINT), "wb") as file:
                file.write(name.encode())
            return
        aside = path / f"{_HINT}.new"
        aside.write_text(name)
        aside.replace(path / _HINT)

    def _data_file(self, metadata: TableMetadata, path: str) -> DataFile:
        return parquet_file_to_data_file(self._opened.io, metadata, f"{self.location.uri}/{path}")

    def _tasks(self, metadata: TableMetadata, condition: BooleanExpression) -> list[FileScanTask]:
        if metadata.current_snapshot() is None:
            return []
        return list(self._opened.scan(row_filter=condition).plan_files())

    def _rows_of(self, metadata: TableMetadata, task: FileScanTask) -> Any:
        """All rows of a file, with the columns that the table has by now."""
        if not task.delete_files:
            with self._opened.io.new_input(task.file.file_path).open() as file:
                there = pyarrow.parquet.read_table(file)
            try:
                # PyIceberg makes empty lists of structs of those that are null.
                return _projected(there, _arrow(metadata))
            except _OtherLayout:
                pass
        scan = ArrowScan(metadata, self._opened.io, metadata.schema(), AlwaysTrue())
        return scan.to_table([task])

    def _small(self, target_bytes: int) -> dict[Any, list[FileScanTask]]:
        groups: dict[Any, list[FileScanTask]] = {}
        for task in self._tasks(self._opened.metadata, AlwaysTrue()):
            if task.file.file_size_in_bytes < target_bytes:
                groups.setdefault((task.file.spec_id, repr(task.file.partition)), []).append(task)
        return groups

    def _join(self, tasks: Sequence[FileScanTask]) -> None:
        metadata = self._opened.metadata
        plan = FilePlan(self.location, "data", _arrow(metadata), self.partition_by, keeps_values=True)
        joined = pyarrow.concat_tables([self._rows_of(metadata, task) for task in tasks])
        written = write_table(joined, plan)
        for attempt in range(_COMMIT_ATTEMPTS):
            transaction = self._opened.transaction()
            with transaction.update_snapshot({"queen.operation": "compaction"}).overwrite() as snapshot:
                for task in tasks:
                    snapshot.delete_data_file(task.file)
                for file in written:
                    snapshot.append_data_file(self._data_file(metadata, file.path))
            try:
                self._commit(transaction)
                return
            except CommitConflict:
                if attempt + 1 == _COMMIT_ATTEMPTS:
                    raise
                self.refresh()
                here = {task.file.file_path for task in self._tasks(self._opened.metadata, AlwaysTrue())}
                if not all(task.file.file_path in here for task in tasks):
                    # Another process has replaced them; what was written here is removed by a vacuum.
                    raise

    def _snapshot(self, as_of: AsOf) -> int | None:
        table = self._opened
        if as_of is None:
            current = table.current_snapshot()
            return current.snapshot_id if current is not None else None
        if isinstance(as_of, datetime):
            found = table.snapshot_as_of_timestamp(int(as_of.timestamp() * 1000))
            if found is None:
                raise ArchiveError(f"{self.location} has no version of {as_of:%Y-%m-%d %H:%M:%S} UTC any more")
            return found.snapshot_id
        if table.snapshot_by_id(as_of) is None:
            known = ", ".join(str(version.id) for version in self.versions()[:5]) or "none"
            raise ArchiveError(f"{self.location} has no version {as_of}; the newest are {known}")
        return as_of


def default_catalog(location: Location) -> str | None:
    """The catalog of a table of this machine; one of an object store needs a database."""
    return None if location.path is None else f"sqlite:///{location.path / _CATALOG_FILE}"


def _open_catalog(location: Location, url: str | None) -> SqlCatalog:
    url = url or default_catalog(location)
    if url is None:
        raise PipelineError(f"{location}: a table in an object store needs a catalog, the URL of a PostgreSQL database")
    if location.path is not None:
        location.path.mkdir(parents=True, exist_ok=True)
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", "sqlite"):
        raise PipelineError(f"{location}: the URL of a catalog begins with postgresql:// or sqlite:///")
    if scheme != "sqlite":
        url = f"postgresql+psycopg://{rest}"
    properties = {"uri": url}
    if location.path is None:
        properties["py-io-impl"] = "pyiceberg.io.fsspec.FsspecFileIO"
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return SqlCatalog(CATALOG, **properties)
    except SQLAlchemyError as error:
        why = str(error).partition("\n")[0]
        raise PipelineError(f"the catalog of {location} cannot be opened: {why}") from error


def _supported(table: str, schema: Any) -> Any:
    """The columns with types that Iceberg has: bytes and shorts become integers."""
    return pyarrow.schema([pyarrow.field(one.name, _supported_type(table, one.name, one.type)) for one in schema])


def _supported_type(table: str, name: str, kind: Any) -> Any:
    types = pyarrow.types
    kind = plain_type(kind)
    if types.is_int8(kind) or types.is_int16(kind):
        return pyarrow.int32()
    if types.is_list(kind):
        return pyarrow.list_(_supported_type(table, name, kind.value_type))
    if types.is_map(kind):
        inner = (_supported_type(table, name, one) for one in (kind.key_type, kind.item_type))
        return pyarrow.map_(*inner)
    if types.is_struct(kind):
        return pyarrow.struct([(one.name, _supported_type(table, f"{name}.{one.name}", one.type)) for one in kind])
    if types.is_null(kind) or types.is_duration(kind) or types.is_interval(kind) or types.is_unsigned_integer(kind):
        raise SchemaChange(f"table {table}: column '{name}' is {kind}, which Iceberg cannot hold")
    return kind


def _arrow(metadata: TableMetadata) -> Any:
    return schema_to_pyarrow(metadata.schema(), include_field_ids=True)


class _OtherLayout(Exception):
    """A file of another engine, whose columns have no ids, or others inside of them."""


def _projected(rows: Any, schema: Any) -> Any:
    """The columns of a schema by their ids: null where there are none, widened where they were narrower."""
    places = {_id(field): index for index, field in enumerate(rows.schema)}
    columns = []
    for field in schema:
        if _id(field) not in places:
            columns.append(pyarrow.nulls(rows.num_rows, field.type))
            continue
        index = places[_id(field)]
        columns.append(_as(rows.column(index).combine_chunks(), rows.schema.field(index), field))
    return pyarrow.table(columns, schema=schema)


def _as(values: Any, have: Any, want: Any) -> Any:
    if have.type.equals(want.type, check_metadata=True) or not pyarrow.types.is_nested(want.type):
        return values.cast(want.type)
    if not pyarrow.types.is_struct(have.type) or not pyarrow.types.is_struct(want.type):
        if plain_type(have.type) == plain_type(want.type) and _ids(have) == _ids(want):
            return values.cast(want.type)
        raise _OtherLayout
    there = {_id(field): field for field in have.type}
    inner = [
        _as(values.field(there[_id(field)].name), there[_id(field)], field)
        if _id(field) in there
        else pyarrow.nulls(len(values), field.type)
        for field in want.type
    ]
    return pyarrow.StructArray.from_arrays(inner, fields=list(want.type), mask=values.is_null())


def _ids(field: Any) -> list[Any]:
    """The ids of a column and of all inside of it, in their order."""
    kind = field.type
    if pyarrow.types.is_map(kind):
        # Its rows are structs that have no id of their own.
        inner = [kind.key_field, kind.item_field]
    else:
        inner = [kind.field(index) for index in range(kind.num_fields)]
    return [_id(field), *(_ids(one) for one in inner)]


def _id(field: Any) -> bytes:
    found: bytes | None = (field.metadata or {}).get(b"PARQUET:field_id")
    if found is None:
        raise _OtherLayout
    return found


def _summary(writer: str, batch: int) -> dict[str, str]:
    return {_WRITER: writer, _BATCH: str(batch)}


def _version(snapshot: Snapshot) -> Version:
    summary = snapshot.summary
    batch = summary.get(_BATCH) if summary is not None else None
    return Version(
        id=snapshot.snapshot_id,
        at=_moment(snapshot.timestamp_ms),
        operation=str(summary.operation.value) if summary is not None else "",
        writer=summary.get(_WRITER) if summary is not None else None,
        batch=None if batch is None else int(batch),
    )


def _range(keys: Any) -> BooleanExpression:
    """What rows with one of the keys have in common: files without such rows need not be read."""
    # Their types leave out what their constructors take.
    at_least: Any = GreaterThanOrEqual
    at_most: Any = LessThanOrEqual
    condition: BooleanExpression = AlwaysTrue()
    for name in keys.column_names:
        bounds = pyarrow.compute.min_max(keys.column(name)).as_py()
        if bounds["min"] is not None:
            condition = And(condition, at_least(name, bounds["min"]), at_most(name, bounds["max"]))
    return condition


def _without(rows: Any, keys: Any, key: Sequence[str]) -> Any:
    """The rows that have none of the keys, in their order."""
    number = "queen_row"
    names = list(key)
    types = pyarrow.schema([rows.schema.field(name) for name in names])
    numbered = rows.select(names).append_column(number, pyarrow.array(range(rows.num_rows), pyarrow.int64()))
    left = numbered.join(fitted(keys, types), names, join_type="left anti")
    return rows.take(left.column(number).combine_chunks().sort())


def _used_files(table: IcebergTable, without: set[int]) -> set[str]:
    metadata = table.metadata
    used = {_local(table.metadata_location)} | {_local(entry.metadata_file) for entry in metadata.metadata_log}
    used |= {_local(one.statistics_path) for one in (*metadata.statistics, *metadata.partition_statistics)}
    seen: set[str] = set()
    for snapshot in metadata.snapshots:
        if snapshot.snapshot_id in without:
            continue
        used.add(_local(snapshot.manifest_list))
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            used.add(_local(manifest.manifest_path))
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            used |= {_local(entry.data_file.file_path) for entry in entries}
    return used


def _value(table: IcebergTable, name: str, value: Any) -> str | None:
    if value is None:
        return None
    kind = str(table.schema().find_field(name).field_type)
    # Dates are numbers of days inside of Iceberg.
    if kind == "date" and isinstance(value, int):
        return str(datetime.fromtimestamp(value * 86400, UTC).date())
    return str(value)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _local(url: str) -> str:
    return url.removeprefix("file://")


@contextmanager
def _commits() -> Iterator[None]:
    """Raises `CommitConflict` where another process was faster."""
    try:
        yield
    except (CommitFailedException, ValidationException) as error:
        raise CommitConflict(str(error)) from error

"""Parquet files of a table, written and read by Spark's Python workers: on object stores, too, and without a jar."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen.pipelines.errors import ArchiveError
from queen.pipelines.tables.locations import TARGET_BYTES, Location, open_file
from queen.pipelines.tables.schemas import fitted, plain_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# Longer texts say little of where a value is, and every reader has to load them.
_LONGEST_BOUND: Final = 64
_LAST: Final = "\U0010ffff"
_EXACT_DIGITS: Final = 15
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9._-]")


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that no version of the table has yet. `path` is within the table, `bounds` are as Delta has them."""

    path: str
    rows: int
    bytes: int
    values: dict[str, str | None]
    bounds: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """How files of a batch are to look, and in which folder; `keeps_values`: with the partition columns."""

    root: Location
    folder: str
    schema: Any
    partition_by: tuple[str, ...]
    keeps_values: bool

    @property
    def file_schema(self) -> Any:
        import pyarrow

        left_out = () if self.keeps_values else self.partition_by
        return pyarrow.schema([field for field in self.schema if field.name not in left_out])


def write_files(rows: DataFrame, plan: FilePlan) -> list[WrittenFile]:
    """Write the rows, each task its files. A task that is done again writes others: only what it reports is used."""
    if plan.partition_by:
        # A task has one file open at a time.
        rows = rows.sortWithinPartitions(*(f"`{name}`" for name in plan.partition_by))
    written = rows.mapInArrow(partial(_write, plan), "file binary").collect()
    return [msgspec.json.decode(row["file"], type=WrittenFile) for row in written]


def write_table(table: Any, plan: FilePlan) -> list[WrittenFile]:
    """Write rows that are in memory, from this process."""
    if plan.partition_by:
        table = table.sort_by([(name, "ascending") for name in plan.partition_by])
    batches = _write(plan, iter(table.combine_chunks().to_batches()))
    return [msgspec.json.decode(one.column(0)[0].as_py(), type=WrittenFile) for one in batches]


def read_files(spark: SparkSession, files: Sequence[tuple[str, dict[str, Any]]], schema: str) -> DataFrame:
    """The rows of files, each with the values of its partition columns where the file itself has none."""
    listed = [(path, json.dumps(values)) for path, values in files]
    frame = spark.createDataFrame(listed, "path string, given string")
    tasks = max(1, min(len(files), spark.sparkContext.defaultParallelism * 2))
    return frame.repartition(tasks).mapInArrow(partial(_read, arrow_schema(spark, schema)), schema)


def arrow_schema(spark: SparkSession, schema: str) -> Any:
    return rows_schema(spark.createDataFrame([], schema))


def rows_schema(rows: DataFrame) -> Any:
    """The columns of a frame, as Arrow has them; all may be null."""
    import pyarrow
    from pyspark.sql.pandas.types import to_arrow_schema

    found = to_arrow_schema(rows.schema, timezone="UTC")
    return pyarrow.schema([pyarrow.field(field.name, plain_type(field.type)) for field in found])


def _write(plan: FilePlan, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow

    open_now: _File | None = None
    for batch in batches:
        table = pyarrow.Table.from_batches([batch])
        for values, part in _parts(table, plan.partition_by):
            if open_now is not None and (open_now.values != values or open_now.size >= TARGET_BYTES):
                yield _reported(open_now.close())
                open_now = None
            if open_now is None:
                open_now = _File(plan, values)
            open_now.write(part)
    if open_now is not None:
        yield _reported(open_now.close())


def _reported(file: WrittenFile) -> Any:
    import pyarrow

    return pyarrow.RecordBatch.from_arrays([pyarrow.array([msgspec.json.encode(file)], pyarrow.binary())], ["file"])


def _parts(table: Any, names: Sequence[str]) -> Iterator[tuple[dict[str, str | None], Any]]:
    """Stretches of rows with the same values in these columns; rows are sorted by them."""
    if not names:
        if table.num_rows:
            yield {}, table
        return
    keys = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    begin = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[begin]:
            values = {name: _text(value) for name, value in zip(names, keys[begin], strict=True)}
            yield values, table.slice(begin, index - begin)
            begin = index


def _text(value: Any) -> str | None:
    """A value of a partition column, as Delta writes it down."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        # A time without a zone is none of this machine's.
        return (value.astimezone(UTC) if value.tzinfo else value).strftime("%Y-%m-%d %H:%M:%S.%f")
    return str(value)


def _plain(text: str) -> str:
    """For the name of a folder, from which no value is read. Readers do not agree on how to quote the rest."""
    return _UNUSUAL.sub("_", text)[:_LONGEST_BOUND]


class _File:
    """One file that is being written."""

    def __init__(self, plan: FilePlan, values: dict[str, str | None]) -> None:
        import pyarrow.parquet

        self.values = values
        folders = [f"{_plain(name)}={_plain(_NO_VALUE if value is None else value)}" for name, value in values.items()]
        self._path = "/".join(filter(None, (plan.folder, *folders, f"{uuid.uuid4().hex}.parquet")))
        self._schema = plan.file_schema
        self._out = open_file(plan.root.below(self._path), "wb")
        self._writer = pyarrow.parquet.ParquetWriter(self._out, self._schema, compression="zstd")
        self._rows = 0
        self._with_nan: set[str] = set()

    @property
    def size(self) -> int:
        return self._out.tell()

    def write(self, table: Any) -> None:
        rows = fitted(table, self._schema)
        self._writer.write_table(rows)
        self._rows += table.num_rows
        self._with_nan.update(_with_nan(rows))

    def close(self) -> WrittenFile:
        self._writer.close()
        size = self._out.tell()
        self._out.close()
        metadata = self._writer.writer.metadata
        return WrittenFile(self._path, self._rows, size, self.values, _bounds(metadata, self._schema, self._with_nan))


def _with_nan(table: Any) -> Iterator[str]:
    """The columns that hold one."""
    import pyarrow
    import pyarrow.compute

    for name in (field.name for field in table.schema if pyarrow.types.is_floating(field.type)):
        if pyarrow.compute.any(pyarrow.compute.is_nan(table.column(name))).as_py():
            yield name


def _bounds(metadata: Any, schema: Any, unordered: Container[str]) -> dict[str, Any]:
    """The bounds of all columns that readers compare, or of none: deltalake takes a missing one as met by no value.

    `unordered` columns hold a NaN, which is within no bounds.
    """
    found = _Statistics(metadata)
    compared = [field for field in schema if not _is_never_compared(field.type)]
    bounds = {}
    for field in compared:
        if found.nulls.get(field.name) == metadata.num_rows:
            continue
        both = None if field.name in unordered else _both_bounds(field.type, *found.of(field.name))
        if both is None:
            return {"nullCount": found.nulls}
        bounds[field.name] = both
    return {
        "minValues": {name: low for name, (low, _) in bounds.items()},
        "maxValues": {name: high for name, (_, high) in bounds.items()},
        "nullCount": found.nulls,
    }


class _Statistics:
    """What the Parquet file says of its columns, those inside of others left out."""

    def __init__(self, metadata: Any) -> None:
        self.nulls: dict[str, int] = {}
        self._bounds: dict[str, tuple[Any, Any]] = {}
        unknown = set()
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                name, about = column.path_in_schema, column.statistics
                # That of a nested column is named after its leaf as well.
                if metadata.schema.column(index).max_repetition_level or "." in name or about is None:
                    unknown.add(name)
                    continue
                self.nulls[name] = self.nulls.get(name, 0) + (about.null_count or 0)
                if about.has_min_max:
                    low, high = self._bounds.get(name, (about.min, about.max))
                    self._bounds[name] = min(low, about.min), max(high, about.max)
                elif about.null_count != column.num_values:
                    unknown.add(name)
        for name in unknown:
            self._bounds.pop(name, None)

    def of(self, name: str) -> tuple[Any, Any]:
        return self._bounds.get(name, (None, None))


def _is_never_compared(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_list(kind) or types.is_map(kind))


def _both_bounds(kind: Any, least: Any, most: Any) -> tuple[Any, Any] | None:
    """As Delta writes them down; None where they are not known, or not exactly."""
    from pyarrow import types

    if types.is_string(kind):
        # What is longer, or not known, is within what says less.
        if least is None or most[_LONGEST_BOUND : _LONGEST_BOUND + 1] == _LAST:
            return "", _LAST * _LONGEST_BOUND
        return least[:_LONGEST_BOUND], most[:_LONGEST_BOUND] + (_LAST if len(most) > _LONGEST_BOUND else "")
    if least is None:
        return None
    if types.is_timestamp(kind):
        return _time(least), _time(most)
    if types.is_date(kind):
        return least.isoformat(), most.isoformat()
    if types.is_decimal(kind):
        # Readers take numbers for doubles, which are exact up to here.
        return (float(least), float(most)) if kind.precision <= _EXACT_DIGITS else None
    if types.is_floating(kind):
        return (least, most) if math.isfinite(least) and math.isfinite(most) else None
    return (least, most) if types.is_integer(kind) or types.is_boolean(kind) else None


def _time(value: datetime) -> str:
    return value.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _read(schema: Any, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    for listed in batches:
        for path, given in zip(*(listed.column(index).to_pylist() for index in (0, 1)), strict=True):
            values = json.loads(given)
            try:
                with open_file(path, "rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
                    for batch in file.iter_batches():
                        for name in values.keys() - set(batch.schema.names):
                            constant = pyarrow.array([values[name]] * batch.num_rows, pyarrow.string())
                            batch = batch.append_column(name, constant)
                        yield fitted(batch, schema)
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise ArchiveError(
                    f"{path} cannot be read: {error}. Restore the file from a copy, or read a version without it"
                ) from error

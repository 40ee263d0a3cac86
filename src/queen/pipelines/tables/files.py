"""Parquet files of a table, written and read by Spark's Python workers: on object stores, too, and without a jar."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from queen.pipelines.tables.locations import TARGET_BYTES, Location, open_file
from queen.pipelines.tables.schemas import fitted, plain_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# Longer texts say little of where a value is, and every reader has to load them.
_LONGEST_BOUND: Final = 64
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
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    return str(value)


def _plain(text: str) -> str:
    """For the name of a folder, from which no value is read. Readers do not agree on how to quote the rest."""
    return _UNUSUAL.sub("_", text)[:_LONGEST_BOUND]


class _File:
    """One file in the making."""

    def __init__(self, plan: FilePlan, values: dict[str, str | None]) -> None:
        import pyarrow.parquet

        self.values = values
        folders = [f"{_plain(name)}={_plain(_NO_VALUE if value is None else value)}" for name, value in values.items()]
        self._path = "/".join(filter(None, (plan.folder, *folders, f"{uuid.uuid4().hex}.parquet")))
        self._schema = plan.file_schema
        self._out = open_file(plan.root.below(self._path), "wb")
        self._writer = pyarrow.parquet.ParquetWriter(self._out, self._schema, compression="zstd")
        self._rows = 0

    @property
    def size(self) -> int:
        return self._out.tell()

    def write(self, table: Any) -> None:
        self._writer.write_table(fitted(table, self._schema))
        self._rows += table.num_rows

    def close(self) -> WrittenFile:
        self._writer.close()
        size = self._out.tell()
        self._out.close()
        metadata = self._writer.writer.metadata
        return WrittenFile(self._path, self._rows, size, self.values, _bounds(metadata, self._schema))


def _bounds(metadata: Any, schema: Any) -> dict[str, Any]:
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    absent: dict[str, int] = {}
    unknown = set()
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, about = column.path_in_schema, column.statistics
            if schema.get_field_index(name) < 0 or about is None:
                continue
            absent[name] = absent.get(name, 0) + (about.null_count or 0)
            if not about.has_min_max:
                if about.null_count != column.num_values:
                    unknown.add(name)
                continue
            least[name] = min(about.min, least.get(name, about.min))
            most[name] = max(about.max, most.get(name, about.max))
    known = [name for name in least if name not in unknown and _is_bound(least[name]) and _is_bound(most[name])]
    return {
        "minValues": {name: _bound(least[name]) for name in known},
        "maxValues": {name: _bound(most[name]) for name in known},
        "nullCount": absent,
    }


def _is_bound(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_BOUND
    return isinstance(value, int | date | datetime) and not isinstance(value, bool)


def _bound(value: Any) -> Any:
    if isinstance(value, datetime):
        text = value.strftime("%Y-%m-%dT%H:%M:%S.%f")
        return f"{text}Z" if value.tzinfo is not None else text
    return value.isoformat() if isinstance(value, date) else value


def _read(schema: Any, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    for listed in batches:
        for path, given in zip(*(listed.column(index).to_pylist() for index in (0, 1)), strict=True):
            values = json.loads(given)
            with open_file(path, "rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
                for batch in file.iter_batches():
                    for name in values.keys() - set(batch.schema.names):
                        constant = pyarrow.array([values[name]] * batch.num_rows, pyarrow.string())
                        batch = batch.append_column(name, constant)
                    yield fitted(batch, schema)

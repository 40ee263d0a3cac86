"""Writes batches of a streaming query as Parquet files, each batch once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from queen.pipelines.manifest import Manifest, staged_files
from queen.pipelines.paths import local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ParquetSink:
    """A function for `foreachBatch`. `writer` names the query: it numbers its batches from 0 on."""

    def __init__(self, root: Path, writer: str, partition_by: Sequence[str] = ()) -> None:
        self.manifest = Manifest(root)
        self.manifest.create()
        self._writer = writer
        self._partition_by = list(partition_by)

    def __call__(self, rows: DataFrame, batch: int) -> None:
        last = self.manifest.last_batch(self._writer)
        if last is not None and batch <= last:
            return
        staged = self.manifest.staging()
        rows.write.partitionBy(*self._partition_by).parquet(local(staged))
        self.manifest.commit(self._writer, batch, staged, [count_rows(file) for file in staged_files(staged)])


def count_rows(file: Path) -> int:
    """As the file itself says."""
    import pyarrow.parquet

    count: int = pyarrow.parquet.read_metadata(file).num_rows
    return count

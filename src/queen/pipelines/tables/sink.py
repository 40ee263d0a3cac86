"""Batches of a query into a table, each once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow
import pyarrow.compute
from pyspark.sql import functions

from queen.pipelines.declaration import WINDOW_TIME
from queen.pipelines.tables.files import rows_schema, write_files
from queen.pipelines.tables.table import DELETED, CommitConflict, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 10
_PAUSE_SECONDS: Final = 0.1
_NUMBER: Final = "queen_row"
# The order of messages, where rows still know the messages they came from.
_MESSAGE_ORDER: Final = ("_created_at", "_offset")


class LakeSink:
    """A function for `foreachBatch`. `writer` names the query: it numbers its batches from 0 on.

    Files are written first, and become part of the table by one commit, which carries the number of the batch. Files
    of a run that was killed in between belong to no version, and a vacuum removes them.
    """

    def __init__(
        self,
        table: Table,
        writer: str,
        partition_by: Sequence[str] = (),
        key: Sequence[str] = (),
        order_by: Sequence[str] = (),
        delete_when: str | None = None,
    ) -> None:
        self._table = table
        self._writer = writer
        self._partition_by = tuple(partition_by)
        self._key = tuple(key)
        self._order_by = tuple(order_by)
        self._delete_when = delete_when

    def __call__(self, rows: DataFrame, batch: int) -> int:
        """Returns how many rows were written: none when the batch was written before."""
        own = [f"`{name}`" for name in rows.columns if not name.startswith("_")]
        schema = rows_schema(rows.select(*own))
        self._table.refresh()
        if not self._table.exists:
            self._table.create(schema, self._partition_by)
        if self._is_done(batch):
            return 0
        if self._key:
            return self._merge(self._collected(rows, own), schema, batch)
        return self._append(rows.select(*own), schema, batch)

    def _append(self, rows: DataFrame, schema: Any, batch: int) -> int:
        evolution = self._table.evolved(schema)
        self._table.change(evolution)
        plan = self._table.plan(evolution)
        files = write_files(rows, plan)
        if not files:
            return 0

        def commit() -> bool:
            """False when the columns of the table are others by now, so that the files have to be written again."""
            evolution = self._table.evolved(schema)
            if not self._table.plan(evolution).schema.equals(plan.schema, check_metadata=True):
                return False
            self._table.append(files, evolution, self._writer, batch)
            return True

        if not self._tried(commit, batch):
            return self._append(rows, schema, batch)
        return sum(file.rows for file in files)

    def _merge(self, given: Any, schema: Any, batch: int) -> int:
        if not given.num_rows:
            return 0
        rows = newest(given, self._key)

        def commit() -> bool:
            evolution = self._table.evolved(schema)
            self._table.change(evolution)
            self._table.merge(rows, self._key, evolution, self._writer, batch)
            return True

        self._tried(commit, batch)
        return int(given.num_rows)

    def _tried(self, commit: Callable[[], bool], batch: int) -> bool:
        """Commit, again where another process was faster; not when that one has stored this very batch."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return commit()
            except CommitConflict as error:
                if attempt == _ATTEMPTS:
                    raise
                log.info("table %s: batch %d is committed again: %s", self._table.location, batch, error)
                time.sleep(_PAUSE_SECONDS * attempt)
                self._table.refresh()
                if self._is_done(batch):
                    return True
        return True

    def _is_done(self, batch: int) -> bool:
        last = self._table.last_batch(self._writer)
        return last is not None and batch <= last

    def _collected(self, rows: DataFrame, own: list[str]) -> Any:
        """The rows in memory, the newest of each key last, and whether they are to be deleted."""
        rows = newest_last(rows, self._order_by)
        deleted = functions.expr(self._delete_when) if self._delete_when else functions.lit(False)
        return rows.select(*own, functions.coalesce(deleted, functions.lit(False)).alias(DELETED)).toArrow()


def newest_last(rows: DataFrame, order_by: Sequence[str]) -> DataFrame:
    """In the order of these columns, then of the messages that they came from, else as Spark gives them."""
    order = [*order_by, *(name for name in (*_MESSAGE_ORDER, WINDOW_TIME) if name in rows.columns)]
    return rows.orderBy(*order) if order else rows


def newest(table: Any, key: Sequence[str]) -> Any:
    """The last row of each key; rows that lack a part of it have none, and all stay."""
    numbered = table.select(list(key)).append_column(_NUMBER, pyarrow.array(range(table.num_rows), pyarrow.int64()))
    keyless = pyarrow.array([False] * table.num_rows)
    for name in key:
        keyless = pyarrow.compute.or_(keyless, table.column(name).is_null())
    last = numbered.filter(pyarrow.compute.invert(keyless)).group_by(list(key)).aggregate([(_NUMBER, "max")])
    kept = pyarrow.concat_arrays(
        [
            last.column(f"{_NUMBER}_max").combine_chunks(),
            numbered.filter(keyless).column(_NUMBER).combine_chunks(),
        ]
    )
    return table.take(kept.sort())

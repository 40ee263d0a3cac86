"""Rows that leave a streaming query beside its results: those that cannot be used, and those that come too late.

A step that keeps state gives its results alone: what was left out before it is gone by then. So the tasks put such rows
into files beside the checkpoint, by the run of the query and the number of the batch, and the driver takes them up when
the batch was computed. A task that is done again replaces its file.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow
import pyarrow.compute
import pyarrow.ipc
from pyspark import TaskContext
from pyspark.sql import functions
from pyspark.sql.types import StringType, StructField, StructType

from queen.errors import QueenError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

REASON: Final = "_reason"
_DIRECTORY: Final = "side"
_TIME: Final = "_late_time"
_FIRST_END: Final = "_late_first"
_LAST_END: Final = "_late_last"
_RUN: Final = "spark.jobGroup.id"
_BATCH: Final = "streaming.sql.batchId"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Tap:
    """A place in a query where rows leave it."""

    name: str
    node: str
    """The source or step that does not take them."""
    schema: StructType
    late: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """When a row is too late: the event time, and the ends of the first and the last window that it is of.

    All in microseconds. What is no window ends at once.
    """

    time: Column
    first_end: Column
    last_end: Column


class SideOutput:
    """The taps of one query, whose checkpoint this is."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.taps: list[Tap] = []

    def divert(self, node: str, judged: DataFrame) -> DataFrame:
        """Rows that have a reason leave; the others go on."""
        tap = Tap(f"{node}-{len(self.taps)}", node, judged.schema)
        self.taps.append(tap)
        return judged.mapInArrow(partial(_divert, str(self._checkpoint), tap.name), judged.schema)

    def divert_late(self, node: str, rows: DataFrame, times: Times) -> DataFrame:
        """Rows whose windows are closed leave.

        A row that is in some windows still goes on, too: Spark leaves it out of those that are closed.
        """
        tap = Tap(
            f"{node}-{len(self.taps)}", node, StructType([*rows.schema, StructField(REASON, StringType())]), late=True
        )
        self.taps.append(tap)
        timed = rows.withColumns({_TIME: times.time, _FIRST_END: times.first_end, _LAST_END: times.last_end})
        # The schema says which column has the watermark, which has to be known behind this as well.
        return timed.mapInArrow(partial(_divert_late, str(self._checkpoint), tap.name), rows.schema)

    def taken(self, spark: SparkSession, batch: int) -> list[tuple[Tap, Any]]:
        """The rows that left a batch which was computed in this run, as Arrow has them."""
        run = str(spark.sparkContext.getLocalProperty(_RUN))
        found: list[tuple[Tap, Any]] = []
        for tap in self.taps:
            tables = [
                pyarrow.ipc.open_file(path).read_all()
                for path in sorted((self._checkpoint / _DIRECTORY / run / str(batch) / tap.name).glob("*.arrow"))
            ]
            if tables:
                found.append((tap, pyarrow.concat_tables(tables)))
        return found

    def clear(self) -> None:
        """Before a batch is computed: remove what belongs to batches that are done, and to runs that have ended."""
        shutil.rmtree(self._checkpoint / _DIRECTORY, ignore_errors=True)


def window_times(time: str, size: int, slide: int) -> Times:
    """Of windows that begin at multiples of `slide`. Lengths are in milliseconds."""
    length, step = size * 1000, slide * 1000
    at = _micros(time)
    first = at - functions.pmod(at - length, functions.lit(step)) + step
    return Times(at, first, at - functions.pmod(at, functions.lit(step)) + length)


def row_times(time: str, gap: int = 0) -> Times:
    """Of rows that are a session of their own until they are joined with others, or no window at all."""
    end = _micros(time) + gap * 1000
    return Times(_micros(time), end, end)


def _micros(time: str) -> Column:
    return functions.unix_micros(functions.col(f"`{time}`").cast("timestamp"))


def _divert(checkpoint: str, tap: str, batches: Iterator[Any]) -> Iterator[Any]:
    left: list[Any] = []
    for rows in batches:
        bad = pyarrow.compute.is_valid(rows.column(REASON))
        if pyarrow.compute.any(bad).as_py():
            left.append(rows.filter(bad))
            rows = rows.filter(pyarrow.compute.invert(bad))
        yield rows
    _keep(Path(checkpoint), tap, left)


def _divert_late(checkpoint: str, tap: str, batches: Iterator[Any]) -> Iterator[Any]:
    left: list[Any] = []
    watermark = _watermark(Path(checkpoint))
    for rows in batches:
        own = rows.select([name for name in rows.schema.names if name not in (_TIME, _FIRST_END, _LAST_END)])
        late = _not_after(rows.column(_FIRST_END), watermark)
        if pyarrow.compute.any(late).as_py():
            reasons = [_reason(time.as_py(), watermark) for time in rows.column(_TIME).filter(late)]
            left.append(own.filter(late).append_column(REASON, pyarrow.array(reasons, pyarrow.string())))
            own = own.filter(pyarrow.compute.invert(_not_after(rows.column(_LAST_END), watermark)))
        yield own
    _keep(Path(checkpoint), tap, left)


def _not_after(times: Any, watermark: int) -> Any:
    return pyarrow.compute.fill_null(pyarrow.compute.less_equal(times, watermark), False)


def _reason(time: int, watermark: int) -> str:
    return f"late: its time {_shown(time)} came after the watermark {_shown(watermark)}"


def _shown(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).isoformat().replace("+00:00", "Z")


def _keep(checkpoint: Path, tap: str, left: list[Any]) -> None:
    if not left:
        return
    context, run, batch = _place()
    directory = checkpoint / _DIRECTORY / run / str(batch) / tap
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f"{uuid.uuid4().hex}.tmp"
    table = pyarrow.Table.from_batches(left)
    with pyarrow.ipc.new_file(fresh, table.schema) as file:
        file.write_table(table)
    fresh.replace(directory / f"{context.partitionId()}.arrow")


def _watermark(checkpoint: Path) -> int:
    """By which Spark tells what is late in this batch: that of the batch before, in microseconds."""
    _, _, batch = _place()
    if batch == 0:
        return 0
    lines = (checkpoint / "offsets" / str(batch - 1)).read_text("utf-8").splitlines()
    return int(json.loads(lines[1])["batchWatermarkMs"]) * 1000


def _place() -> tuple[TaskContext, str, int]:
    context = TaskContext.get()
    run = context.getLocalProperty(_RUN) if context is not None else None
    batch = context.getLocalProperty(_BATCH) if context is not None else None
    if context is None or run is None or batch is None:
        raise QueenError("this Spark gives tasks no id of their query and batch: use PySpark 4.2 or newer")
    return context, run, int(batch)

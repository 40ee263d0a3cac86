"""Writes from `foreachBatch`: for output modes that Spark does not offer to sinks written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from queen.errors import QueenError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY: Final = "sql.streaming.queryId"


class BatchSink:
    """A function for `foreachBatch`: every micro-batch is written once, under the id of its query and its number.

    stream.writeStream.outputMode("update").foreachBatch(BatchSink(queue="totals"))
    """

    def __init__(self, name: str | None = None, /, **options: str) -> None:
        """The options of a write. A function that writes to several of them gives each a name."""
        self._name = name
        self._options = options

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty(_QUERY)
        if query is None:
            raise QueenError("a BatchSink is called by foreachBatch of a streaming query, and this is none")
        run = query if self._name is None else f"{query}-{self._name}"
        writer = rows.write.format("queen").mode("append").options(**self._options)
        writer.options(run=run, batch=str(batch)).save()

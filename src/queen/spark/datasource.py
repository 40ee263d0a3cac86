"""The data source `format("queen")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from queen.spark.options import ReadOptions


class QueenDataSource(DataSource):
    """Queues as DataFrames. Spark imports this module to find it, so the rest is imported when it is used."""

    @classmethod
    def name(cls) -> str:
        return "queen"

    def schema(self) -> StructType | str:
        from queen.spark.schemas import schema_of

        return schema_of(self._read_options())

    def reader(self, schema: StructType) -> DataSourceReader:
        from queen.spark.options import Table
        from queen.spark.source.batch import QueenReader
        from queen.spark.source.tables import TableReader

        options = self._read_options()
        if options.table is not Table.MESSAGES:
            return TableReader(options, schema)
        return QueenReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from queen.spark.source.stream import QueenStreamReader

        return QueenStreamReader(self._read_options(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from queen.spark.sink.writers import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from queen.spark.sink.writers import stream_writer

        return stream_writer(self.options, schema, overwrite=overwrite)

    def _read_options(self) -> ReadOptions:
        from queen.spark.options import parse_read_options

        return parse_read_options(self.options)

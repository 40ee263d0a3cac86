"""Writing to queues."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from queen.errors import SettingsError


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> DataSourceWriter:
    raise SettingsError("format queen cannot write yet")


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> DataSourceStreamWriter:
    raise SettingsError("format queen cannot write yet")

"""Opens a table by its format, or by what is at its location. Imports the packages of a format when it is used."""

from __future__ import annotations

import enum

from queen.pipelines.tables.locations import Location, exists
from queen.pipelines.tables.table import Table


class Format(enum.Enum):
    """How an archive or a sink keeps rows."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


def open_table(kind: Format, location: Location, catalog: str | None = None) -> Table:
    """Raises `TablesMissing` when the packages of the format are not installed."""
    if kind is Format.DELTA:
        from queen.pipelines.tables.delta import DeltaLake

        return DeltaLake(location)
    from queen.pipelines.tables.iceberg import Iceberg

    return Iceberg(location, catalog)


def format_at(location: Location) -> Format | None:
    """What is there; None when it is nothing of ours."""
    if exists(location.below("_delta_log")):
        return Format.DELTA
    if exists(location.below("metadata/version-hint.text")):
        return Format.ICEBERG
    path = location.path
    return Format.PARQUET if path is not None and (path / "_manifest").is_dir() else None

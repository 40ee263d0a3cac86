"""The columns of what can be read."""

from __future__ import annotations

import json
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from queen.errors import SettingsError
from queen.spark.options import ParseMode, ReadOptions, Table

CORRUPT_RECORD: Final = "_corrupt_record"

_TEXT, _NUMBER, _TIME = StringType(), LongType(), TimestampType()


def _columns(*fields: tuple[str, StringType | LongType | TimestampType, bool]) -> StructType:
    return StructType([StructField(name, kind, nullable) for name, kind, nullable in fields])


MESSAGES: Final = _columns(
    ("queue", _TEXT, True),
    ("partition", _TEXT, True),
    ("offset", _NUMBER, True),
    ("message_id", _TEXT, True),
    ("transaction_id", _TEXT, True),
    ("trace_id", _TEXT, True),
    ("created_at", _TIME, True),
    ("producer_sub", _TEXT, True),
    ("payload", _TEXT, True),
)

_TABLES: Final = {Table.MESSAGES: MESSAGES}


def schema_of(options: ReadOptions) -> StructType | str:
    """The columns that a read gives: those of its table, and those that the payload is parsed into."""
    table = _TABLES[options.table]
    names = options.columns or tuple(table.fieldNames())
    unknown = [name for name in names if name not in table.fieldNames()]
    if unknown:
        raise SettingsError(
            f"option columns names {', '.join(unknown)}; {options.table} has {', '.join(table.fieldNames())}"
        )
    chosen = StructType([table[name] for name in names])
    if options.schema is None:
        return chosen
    if options.table is not Table.MESSAGES:
        raise SettingsError(f"option schema parses the payload of messages; {options.table} has none to parse")
    return _with_payload(chosen, options.schema.strip(), options.mode)


def _with_payload(columns: StructType, schema: str, mode: ParseMode) -> StructType | str:
    """Spark reads a schema as DDL itself, on the other side: here it is put behind the columns as text."""
    if schema.startswith("{"):
        payload = _from_json(schema)
        if mode is ParseMode.PERMISSIVE and CORRUPT_RECORD not in payload.fieldNames():
            payload = payload.add(CORRUPT_RECORD, _TEXT)
        return StructType([*columns.fields, *payload.fields])
    if schema.lower().startswith("struct<") and schema.endswith(">"):
        schema = schema[len("struct<") : -1]
    ddl = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in columns.fields)
    corrupt = f", {CORRUPT_RECORD} STRING" if mode is ParseMode.PERMISSIVE and CORRUPT_RECORD not in schema else ""
    return f"{ddl}, {schema}{corrupt}"


def _from_json(schema: str) -> StructType:
    try:
        return StructType.fromJson(json.loads(schema))
    except (ValueError, KeyError, TypeError, PySparkException) as error:
        raise SettingsError(
            "option schema is neither DDL such as 'id LONG, name STRING' nor the JSON of a StructType"
            f" ({type(error).__name__}: {error})"
        ) from error

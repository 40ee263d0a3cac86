"""The columns of the tables that can be read."""

from __future__ import annotations

import json
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from queen.errors import SettingsError
from queen.spark.options import ParseMode, ReadOptions, Table

CORRUPT_RECORD: Final = "_corrupt_record"

_TEXT, _NUMBER, _TIME, _FLAG = StringType(), LongType(), TimestampType(), BooleanType()


def _columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


MESSAGES: Final = _columns(
    queue=_TEXT,
    partition=_TEXT,
    offset=_NUMBER,
    message_id=_TEXT,
    transaction_id=_TEXT,
    trace_id=_TEXT,
    created_at=_TIME,
    producer_sub=_TEXT,
    payload=_TEXT,
)
_TABLES: Final = {
    Table.MESSAGES: MESSAGES,
    Table.DLQ: _columns(
        queue=_TEXT,
        partition=_TEXT,
        offset=_NUMBER,
        message_id=_TEXT,
        transaction_id=_TEXT,
        trace_id=_TEXT,
        producer_sub=_TEXT,
        group=_TEXT,
        error=_TEXT,
        retries=_NUMBER,
        created_at=_TIME,
        failed_at=_TIME,
        payload=_TEXT,
    ),
    Table.TRACES: _columns(
        queue=_TEXT,
        partition=_TEXT,
        offset=_NUMBER,
        transaction_id=_TEXT,
        trace=_TEXT,
        group=_TEXT,
        event_type=_TEXT,
        names=ArrayType(_TEXT),
        worker_id=_TEXT,
        created_at=_TIME,
        data=_TEXT,
    ),
    Table.TOPIC: _columns(
        namespace=_TEXT,
        topic=_TEXT,
        id=_NUMBER,
        status=_TEXT,
        priority=_NUMBER,
        retries=_NUMBER,
        deliver_after=_TIME,
        lease_expires_at=_TIME,
        lease_owner=_TEXT,
        expires_at=_TIME,
        created_at=_TIME,
        first_failed_at=_TIME,
        idempotency_key=_TEXT,
        last_error=_TEXT,
        metadata=_TEXT,
        is_json=_FLAG,
        payload=_TEXT,
    ),
    Table.LAG: _columns(
        group=_TEXT,
        queue=_TEXT,
        partition=_TEXT,
        lag=_NUMBER,
        seconds_behind=DoubleType(),
        oldest_unconsumed_at=_TIME,
        leased=_FLAG,
        total_consumed=_NUMBER,
        last_consumed_at=_TIME,
    ),
}


def columns_of(table: Table) -> StructType:
    """All columns of a table."""
    return _TABLES[table]


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
    return _with_payload(chosen, options.schema.strip(), options.mode, options.parsed_column)


def _with_payload(columns: StructType, schema: str, mode: ParseMode, struct: str | None) -> StructType | str:
    """Spark parses DDL in the JVM: here it is appended to the columns as text."""
    if schema.startswith("{"):
        payload = _from_json(schema)
        if struct is not None:
            payload = StructType([StructField(struct, payload)])
        if mode is ParseMode.PERMISSIVE and CORRUPT_RECORD not in payload.fieldNames():
            payload = payload.add(CORRUPT_RECORD, _TEXT)
        return StructType([*columns.fields, *payload.fields])
    if schema.lower().startswith("struct<") and schema.endswith(">"):
        schema = schema[len("struct<") : -1]
    ddl = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in columns.fields)
    corrupt = f", {CORRUPT_RECORD} STRING" if mode is ParseMode.PERMISSIVE and CORRUPT_RECORD not in schema else ""
    if struct is not None:
        schema = f"`{struct}` STRUCT<{schema}>"
    # As one type: of a list of columns, Spark reports the first as the place of any error.
    return f"STRUCT<{ddl}, {schema}{corrupt}>"


def _from_json(schema: str) -> StructType:
    try:
        return StructType.fromJson(json.loads(schema))
    except (ValueError, KeyError, TypeError, PySparkException) as error:
        raise SettingsError(
            "option schema is neither DDL such as 'id LONG, name STRING' nor the JSON of a StructType"
            f" ({type(error).__name__}: {error})"
        ) from error

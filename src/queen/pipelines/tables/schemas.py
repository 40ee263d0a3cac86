"""How the columns of a table follow those of the rows that are written to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow

from queen.pipelines.errors import SchemaChange


@dataclass(frozen=True, slots=True)
class Evolution:
    """The columns that a table is to have, and what of them is not so yet."""

    schema: Any
    added: list[Any]
    """Fields; also a struct of the table that gets more fields."""
    promoted: list[Any]
    """Fields with a wider type than they have now."""

    @property
    def changes(self) -> bool:
        return bool(self.added or self.promoted)


def evolve(table: str, current: Any, rows: Any, *, promotes: bool) -> Evolution:
    """Columns that are new are added, and may be null; `promotes`: the format can widen the type of a column.

    Raises `SchemaChange` where the rows do not fit.
    """
    added: list[Any] = []
    promoted: list[Any] = []
    fields = []
    for old in current:
        index = rows.get_field_index(old.name)
        if index < 0:
            if not old.nullable:
                raise SchemaChange(
                    f"table {table}: column '{old.name}' may not be null, and the rows have no such column"
                )
            fields.append(old)
            continue
        found = _merged(table, old.name, old.type, rows.field(index).type, promotes)
        fields.append(old.with_type(found))
        if not same(found, old.type):
            (added if pyarrow.types.is_nested(found) else promoted).append(fields[-1])
    known = set(current.names)
    for new in rows:
        if new.name not in known:
            fields.append(pyarrow.field(new.name, new.type))
            added.append(fields[-1])
    return Evolution(pyarrow.schema(fields), added, promoted)


def same(one: Any, other: Any) -> bool:
    """Whether two types hold the same values, whatever the width of their offsets in memory."""
    return bool(plain_type(one) == plain_type(other))


def plain_type(kind: Any) -> Any:
    """The type without what only matters in memory: large offsets, views, names of list items, metadata."""
    types = pyarrow.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pyarrow.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pyarrow.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pyarrow.list_(plain_type(kind.value_type))
    if types.is_map(kind):
        return pyarrow.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_struct(kind):
        return pyarrow.struct([pyarrow.field(field.name, plain_type(field.type)) for field in kind])
    if types.is_timestamp(kind):
        return pyarrow.timestamp("us", "UTC" if kind.tz else None)
    return kind


def fitted(batch: Any, schema: Any) -> Any:
    """The rows with the columns of a schema: those they lack are null."""
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pyarrow.nulls(batch.num_rows, field.type))
        else:
            columns.append(batch.column(index).cast(field.type))
    return type(batch).from_arrays(columns, schema=schema)


def _merged(table: str, name: str, old: Any, new: Any, promotes: bool) -> Any:
    types = pyarrow.types
    if same(old, new) or (_widens(new, old) and not types.is_nested(old)):
        return old
    if types.is_struct(old) and types.is_struct(new):
        there = {field.name: field for field in old}
        fields = []
        given = {field.name: field for field in new}
        for field in old:
            other = given.get(field.name)
            inner = field.type
            if other is not None:
                inner = _merged(table, f"{name}.{field.name}", field.type, other.type, promotes)
            fields.append(field.with_type(inner))
        fields += [pyarrow.field(field.name, field.type) for field in new if field.name not in there]
        return pyarrow.struct(fields)
    if promotes and _widens(old, new):
        return new
    hint = "; cast it, or write to another column"
    if _widens(old, new):
        hint = f": delta-rs cannot widen a column; write it as {plain_type(old)}, or to another column"
    raise SchemaChange(
        f"table {table}: column '{name}' is {plain_type(old)} there and {plain_type(new)} in the rows{hint}"
    )


def _widens(narrow: Any, wide: Any) -> bool:
    """Whether every value of a type is one of another, in the ways that Iceberg lets a column change."""
    types = pyarrow.types
    if types.is_signed_integer(narrow) and types.is_signed_integer(wide):
        return bool(narrow.bit_width < wide.bit_width)
    if types.is_float32(narrow) and types.is_float64(wide):
        return True
    if types.is_decimal(narrow) and types.is_decimal(wide):
        return bool(narrow.scale == wide.scale and narrow.precision < wide.precision)
    return False

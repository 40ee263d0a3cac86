"""Payloads into columns: JSON that is parsed by Arrow, many messages at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from queen.errors import BadRequest, SettingsError

_BRACE: Final = ord("{")
_raw = msgspec.Raw
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

Broken = Callable[[int, str], None]
"""Called with the number of a payload that does not fit the schema, and why. It may raise."""


class PayloadParser:
    """Parses payloads into the fields of a schema: missing fields are null, unknown ones are ignored.

    A value that is not text becomes its JSON in a field of text, as in Spark's from_json.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        # Times are parsed to the microsecond, of which Arrow knows more years, else to the nanosecond. What fits most
        # payloads is tried first.
        self._parsed = [_parsed_schema(schema, "us")]
        if (finer := _parsed_schema(schema, "ns")) != self._parsed[0]:
            self._parsed.append(finer)

    def parse(self, payloads: pa.Array, broken: Broken) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
        """The fields, and which payloads do not fit: all fields of those are null."""
        unfit = np.zeros(len(payloads), np.bool_)
        if not self._schema.names:
            return self._nothing(len(payloads)), unfit
        objects = _objects(payloads)
        if not objects.all():
            payloads = pc.utf8_trim_whitespace(payloads)
            objects = _objects(payloads)
        for index in np.flatnonzero(~objects):
            broken(int(index), "it is not a JSON object")
            unfit[index] = True
        if not objects.any():
            return self._nothing(len(payloads)), unfit
        if objects.all():
            return self._parse_some(payloads, 0, unfit, broken), unfit
        places = np.flatnonzero(objects)
        some = np.zeros(len(places), np.bool_)
        chosen = payloads.take(pa.array(places))
        good = self._parse_some(chosen, 0, some, lambda index, why: broken(int(places[index]), why))
        unfit[places] = some
        # Every payload finds its row again, those that are no objects find none.
        rows = np.full(len(payloads), -1)
        rows[places] = np.arange(len(places))
        return good.take(pa.array(rows, mask=rows < 0)), unfit

    def _parse_some(self, payloads: pa.Array, first: int, unfit: npt.NDArray[np.bool_], broken: Broken) -> pa.Table:
        """All at once; if that fails, each half for itself, until the guilty ones are alone."""
        try:
            return self._parse_all(payloads)
        except pa.ArrowInvalid as error:
            if len(payloads) == 1:
                return self._parse_leniently(payloads, first, unfit, broken, str(error))
        half = len(payloads) // 2
        return pa.concat_tables(
            [
                self._parse_some(payloads.slice(0, half), first, unfit, broken),
                self._parse_some(payloads.slice(half), first + half, unfit, broken),
            ]
        )

    def _parse_leniently(
        self, payloads: pa.Array, index: int, unfit: npt.NDArray[np.bool_], broken: Broken, why: str
    ) -> pa.Table:
        """One payload that Arrow does not take as it is."""
        try:
            changed = _with_texts(payloads[0].as_py().encode(), pa.struct(list(self._parsed[0])))
            return self._parse_all(pa.array([changed], pa.binary()).cast(pa.string()))
        except (pa.ArrowInvalid, msgspec.DecodeError, ValueError, RecursionError):
            broken(index, why)
            unfit[index] = True
            return self._nothing(1)

    def _parse_all(self, payloads: pa.Array) -> pa.Table:
        lines = pc.binary_join_element_wise(payloads, "", "\n").buffers()[2]
        first, *finer = self._parsed
        try:
            return self._parse_as(first, lines, len(payloads))
        except pa.ArrowInvalid:
            if not finer:
                raise
        table = self._parse_as(finer[0], lines, len(payloads))
        self._parsed = [*finer, first]
        return table

    def _parse_as(self, parsed: pa.Schema, lines: pa.Buffer, count: int) -> pa.Table:
        table = pj.read_json(
            pa.BufferReader(lines),
            read_options=pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=parsed, newlines_in_values=True, unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != count:
            raise pa.ArrowInvalid(f"{count} payloads are {table.num_rows} JSON values")
        columns = [
            pc.cast(table.column(field.name), options=pc.CastOptions(field.type, allow_time_truncate=True))
            for field in self._schema
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _nothing(self, rows: int) -> pa.Table:
        return pa.table([pa.nulls(rows, field.type) for field in self._schema], schema=self._schema)


def whole_column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one array."""
    chunks = table[name].combine_chunks()
    return pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks


def as_struct(table: pa.Table) -> pa.Array:
    """The columns of a table as an array of structs."""
    return pa.StructArray.from_arrays(
        [whole_column(table, name) for name in table.schema.names], fields=list(table.schema)
    )


def check_payload_schema(schema: pa.Schema) -> None:
    """Raises `SettingsError` for what payloads cannot be parsed into."""
    for field in schema:
        _parsed_type(field.name, field.type, "us")
        if not field.nullable:
            raise SettingsError(
                f"the schema says that {field.name} is NOT NULL, but a payload may lack it: leave it out"
            )


def raise_broken(place: str, why: str) -> None:
    raise BadRequest(
        f"the payload at {place} does not fit the schema: {why}. With mode PERMISSIVE such payloads are put in"
        " _corrupt_record instead"
    )


def _objects(payloads: pa.Array) -> npt.NDArray[np.bool_]:
    """Which payloads begin as a JSON object does: Arrow's parser takes nothing else."""
    _, offsets, content = payloads.buffers()
    ends = np.frombuffer(offsets, np.int32)[payloads.offset : payloads.offset + len(payloads) + 1]
    text = np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8)
    found = np.zeros(len(payloads), np.bool_)
    some = ends[:-1] < ends[1:]
    found[some] = text[ends[:-1][some]] == _BRACE
    return found


def _with_texts(value: bytes, kind: pa.DataType) -> bytes:
    """JSON with everything that is to be text, and is not, as the text of its JSON: digits stay as they were."""
    first = value.lstrip()[:1]
    if first == b"n":
        return value
    if pa.types.is_string(kind):
        return value if first == b'"' else msgspec.json.encode(msgspec.json.format(value, indent=-1).decode())
    if pa.types.is_struct(kind) and first == b"{":
        known = {field.name: field.type for field in kind}
        found = _fields(value).items()
        return msgspec.json.encode(
            {key: _raw(_with_texts(bytes(one), known[key])) for key, one in found if key in known}
        )
    if pa.types.is_list(kind) and first == b"[":
        return msgspec.json.encode([_raw(_with_texts(bytes(one), kind.value_type)) for one in _items(value)])
    return value


def _parsed_schema(schema: pa.Schema, unit: str) -> pa.Schema:
    return pa.schema([pa.field(field.name, _parsed_type(field.name, field.type, unit)) for field in schema])


def _parsed_type(name: str, kind: pa.DataType, unit: str) -> pa.DataType:
    """What the parser is asked for, times in this unit; the result is cast, which fails for what does not fit."""
    if pa.types.is_date32(kind):
        return pa.string()
    if pa.types.is_decimal128(kind):
        # The parser multiplies by the scale without a check: 38 digits and a scale of 38 fit into 256 bits.
        return pa.decimal256(38, kind.scale)
    if pa.types.is_struct(kind):
        inner = [(field.name, _parsed_type(f"{name}.{field.name}", field.type, unit)) for field in kind]
        return pa.struct(inner)
    if pa.types.is_list(kind):
        return pa.list_(_parsed_type(f"{name}[]", kind.value_type, unit))
    if pa.types.is_timestamp(kind):
        return pa.timestamp(unit, kind.tz)
    simple = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_string,
        pa.types.is_binary,
    )
    if any(is_one(kind) for is_one in simple):
        return kind
    raise SettingsError(
        f"the schema has {name} as {kind}, which payloads are not parsed into; use from_json(payload, …) for it"
    )

"""Parsing queries into the structs that routes declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import inspect

from queen.errors import BadRequest
from queen.wire.decode import check_known
from queen.wire.fields import CHECKED, CLAMPED, LARGEST_BIGINT
from queen.wire.push import check_name
from queen.wire.times import parse_time

Parse: TypeAlias = Callable[[Mapping[str, str]], Any]
_Read: TypeAlias = Callable[[str], Any]

_KINDS: Final = {"group": "ConsumerGroup", "ns": "Namespace"}
_LONGEST_QUOTE: Final = 80


@functools.cache
def query_parser(kind: Any) -> Parse:
    """Parses a query into a `kind`, a struct of strings, numbers, flags and times; None: there are no parameters."""
    if kind is None:
        return _no_parameters
    fields = _fields(kind)
    readers = {field.encode_name: (field.name, _reader(field.encode_name, field.type)) for field in fields}
    needed = [(field.encode_name, field.name) for field in fields if field.required]

    def parse(query: Mapping[str, str]) -> Any:
        values: dict[str, Any] = {}
        for name, text in query.items():
            reader = readers.get(name)
            if reader is None:
                check_known([name], tuple(readers), what="query parameter")
                continue
            if text:
                field, read = reader
                value = read(text)
                if value is not msgspec.UNSET:
                    values[field] = value
        for name, field in needed:
            if field not in values:
                raise BadRequest(f"{name} is required (in the query)")
        return kind(**values)

    return parse


def check_names(kind: Any) -> Callable[[Any], None]:
    """Checks the names in a decoded body that is a `kind`."""
    info = inspect.type_info(kind)
    fields = info.fields if isinstance(info, inspect.StructType) else ()
    checks = [(field.name, _name(field.encode_name)) for field in fields if _is_name(field.type)]

    def check(body: Any) -> None:
        for field, read in checks:
            value = getattr(body, field)
            if value and isinstance(value, str):
                read(value)

    return check


def _is_name(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(_is_name, kind.types))
    return isinstance(kind, inspect.Metadata) and CHECKED in (kind.extra or {})


class Parameter(NamedTuple):
    """A parameter of a query, for its documentation."""

    name: str
    schema: Mapping[str, Any]
    default: Any
    required: bool


def parameters_of(kind: Any) -> list[Parameter]:
    """The parameters that a struct of a query has, with their JSON schemas."""
    if kind is None:
        return []
    properties = _properties(kind)
    return [
        Parameter(
            field.encode_name,
            _with_format(_without_null(properties[field.encode_name]), field.type),
            None if field.required else field.default,
            field.required,
        )
        for field in _fields(kind)
    ]


def _properties(kind: Any) -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    properties: dict[str, Any] = components[schema["$ref"]]["properties"]
    return {name: _resolved(schema, components) for name, schema in properties.items()}


def _resolved(schema: dict[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with its reference, such as to an enumeration, replaced by the schema it names."""
    if "$ref" in schema:
        schema = {**components[schema["$ref"]], **{key: value for key, value in schema.items() if key != "$ref"}}
    if "anyOf" in schema:
        schema = {**schema, "anyOf": [_resolved(one, components) for one in schema["anyOf"]]}
    return {key: value for key, value in schema.items() if key != "default"}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query has no null: a parameter is absent instead."""
    kinds = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {**kinds[0], **{key: value for key, value in schema.items() if key != "anyOf"}}


def _with_format(schema: dict[str, Any], kind: inspect.Type) -> dict[str, Any]:
    return schema | {"format": "date-time"} if isinstance(_plain(kind, {}), inspect.DateTimeType) else schema


def _fields(kind: Any) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def read_time(text: str, name: str) -> datetime:
    """A time given as text, in UTC."""
    moment = parse_time(text)
    try:
        in_utc = moment.astimezone(UTC) if moment is not None else None
    except OverflowError:
        in_utc = None
    if in_utc is None:
        raise BadRequest(f"{name} must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not {text[:_LONGEST_QUOTE]!r}")
    return in_utc


def _no_parameters(query: Mapping[str, str]) -> None:
    check_known(query.keys(), (), what="query parameter")


def _reader(name: str, kind: inspect.Type) -> _Read:
    """Reads one parameter; UNSET from it means that the default holds."""
    extra: dict[str, Any] = {}
    kind = _plain(kind, extra)
    if isinstance(kind, inspect.IntType):
        return _clamped(kind) if CLAMPED in extra else _whole(name, kind)
    if isinstance(kind, inspect.BoolType):
        return lambda text: text in ("true", "1")
    if isinstance(kind, inspect.FloatType):
        return _number(name, kind)
    if isinstance(kind, inspect.DateTimeType):
        return lambda text: read_time(text, name)
    if isinstance(kind, inspect.LiteralType):
        return _choice(name, {str(value): value for value in kind.values})
    if isinstance(kind, inspect.EnumType):
        return _choice(name, {str(value.value): value for value in kind.cls})
    assert isinstance(kind, inspect.StrType), f"{name} is a {kind}, which no query can hold"
    return _name(name) if CHECKED in extra else str


def _plain(kind: inspect.Type, extra: dict[str, Any]) -> inspect.Type:
    while True:
        if isinstance(kind, inspect.Metadata):
            extra |= kind.extra or {}
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            (kind,) = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        else:
            return kind


def _clamped(kind: inspect.IntType) -> _Read:
    """A number out of range becomes the nearest that is in it; what is no number counts as absent."""

    def read(text: str) -> Any:
        if not _is_whole(text):
            return msgspec.UNSET
        value = int(text)
        if kind.ge is not None:
            value = max(kind.ge, value)
        return value if kind.le is None else min(kind.le, value)

    return read


def _whole(name: str, kind: inspect.IntType) -> _Read:
    least, most = kind.ge if kind.ge is not None else -LARGEST_BIGINT, min(kind.le or LARGEST_BIGINT, LARGEST_BIGINT)

    def read(text: str) -> int:
        value = int(text) if _is_whole(text) else None
        if value is None or not least <= value <= most:
            raise BadRequest(f"{name} must be a whole number{_range(kind)}, not {text[:_LONGEST_QUOTE]!r}")
        return value

    return read


def _number(name: str, kind: inspect.FloatType) -> _Read:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (kind.gt is None or value > kind.gt) or not (kind.le is None or value <= kind.le):
            raise BadRequest(f"{name} must be a number{_range(kind)}, not {text[:_LONGEST_QUOTE]!r}")
        return value

    return read


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    limits = [f"above {kind.gt:g}"] if kind.gt is not None else []
    limits += [f"from {kind.ge}"] if kind.ge is not None else []
    limits += [f"up to {kind.le}"] if kind.le is not None else []
    return f" {' '.join(limits)}" if limits else ""


def _choice(name: str, values: Mapping[str, Any]) -> _Read:
    def read(text: str) -> Any:
        if text not in values:
            raise BadRequest(f"{name} must be one of {', '.join(values)}, not {text[:_LONGEST_QUOTE]!r}")
        return values[text]

    return read


def _name(name: str) -> _Read:
    kind = _KINDS.get(name, name[0].upper() + name[1:])

    def read(text: str) -> str:
        check_name(text, kind, name)
        return text

    return read


def _is_whole(text: str) -> bool:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return digits.isascii() and digits.isdigit() and len(digits) < 20

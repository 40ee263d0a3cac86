"""Options of queues and topics as clients send them: numbers and flags may come as text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from queen.errors import BadRequest
from queen.wire.decode import check_known, field_names

OptionValue: TypeAlias = int | bool | None
Options = TypeVar("Options", bound=msgspec.Struct)

_LONGEST_QUOTE: Final = 80
_WHOLE: Final = re.compile(r"\s*[+-]?[0-9]{1,30}\s*", re.ASCII)
_FLAGS: Final = {"true": True, "false": False}


def read_options(kind: type[Options], sent: object, current: Options | None = None) -> Options:
    """The options that are sent, null for the default; those that are not, as `current` has them, else the default.

    Raises `BadRequest` for the first that is unknown or out of range.
    """
    if sent is None:
        sent = {}
    if not isinstance(sent, dict):
        raise BadRequest(f"options must be an object, not {_quoted(sent)} (at options)")
    check_known(sent, field_names(kind), "options")
    values = {field.name: _read(field, sent[field.encode_name]) for field in _fields(kind) if field.encode_name in sent}
    return kind(**values) if current is None else msgspec.structs.replace(current, **values)


def _read(option: inspect.Field, value: object) -> OptionValue:
    default: OptionValue = option.default
    if value is None:
        return default
    is_flag = isinstance(default, bool)
    found = _flag(value) if is_flag else _whole(value)
    smallest, largest, unit = _limits(option)
    if found is None or not smallest <= found <= largest:
        expected = (
            "true or false" if is_flag else f"a whole number{unit and f' of {unit}'} from {smallest} to {largest}"
        )
        name = option.encode_name
        raise BadRequest(f"option {name} must be {expected}, not {_quoted(value)} (at options.{name})")
    return found


def _limits(option: inspect.Field) -> tuple[int, int, str]:
    """The smallest and largest value, and the unit of an option."""
    kinds = option.type.types if isinstance(option.type, inspect.UnionType) else (option.type,)
    for kind in kinds:
        unit = ""
        if isinstance(kind, inspect.Metadata):
            unit = (kind.extra_json_schema or {}).get("description", "").lower()
            kind = kind.type
        if isinstance(kind, inspect.IntType) and kind.le is not None:
            return kind.ge or 0, kind.le, unit
    return 0, 1, ""


@lru_cache(maxsize=8)
def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return None


def _flag(value: object) -> bool | None:
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _quoted(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"

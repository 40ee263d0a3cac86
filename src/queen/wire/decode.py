"""Decoding request bodies: unknown fields are refused, errors name the field, its place and the nearest known one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from queen.errors import BadRequest

T = TypeVar("T")
Decode = Callable[[bytes], T]

_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$?(?P<place>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_NO_CHOICE: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(?:\d+|\.\.\.)\]")
_LAST_STEP: Final = re.compile(r"[^.\[]+(?:\[(?:\d+|\.\.\.)\])*$")
_EXPECTED: Final = re.compile(r"Expected (`[^`]*`[^,]*)(?:, got `([^`]*)`)?")
_KINDS: Final = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "an array",
    "null": "null",
}


def decoder(kind: Any) -> Decode[Any]:
    """A decoder of JSON bodies that are a `kind`."""
    inner = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> Any:
        if not body:
            raise BadRequest("Empty request body")
        try:
            return inner.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise refusal(error, kind) from error

    return decode


def decode_fields(body: bytes, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A JSON object with no field that `kind` does not have; what the fields hold is for the caller to check."""
    if not body:
        raise BadRequest("Empty request body")
    try:
        value = _any.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from error
    if not isinstance(value, dict):
        raise BadRequest("request body must be a JSON object")
    check_known(value, field_names(kind))
    return value


def check_known(given: Collection[str], known: Collection[str], where: str = "", what: str = "field") -> None:
    """Raises `BadRequest` for the first name that is not among the known ones."""
    for name in given:
        if name not in known:
            raise unknown(name, known, where, what)


def unknown(name: str, known: Collection[str], where: str = "", what: str = "field") -> BadRequest:
    """The error for an unknown name."""
    text = f"unknown {what} {name[:80]!r}"
    if where:
        text += f" (at {where})"
    close = difflib.get_close_matches(name.lower(), {one.lower(): None for one in known}, n=1, cutoff=0.6)
    nearest = next((one for one in known if close and one.lower() == close[0]), None)
    return BadRequest(f"{text}; did you mean {nearest!r}?" if nearest is not None else text)


def malformed(error: Exception, where: str = "") -> BadRequest:
    """The error for a body, or a part of a request, that is not JSON."""
    what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return BadRequest(f"Invalid JSON: {what} (at {where})" if where else f"Invalid JSON: {what}")


def refusal(error: Exception, kind: Any, where: str = "") -> BadRequest:
    """The decoder's error about a body that should have been a `kind`, in words for the client."""
    if not isinstance(error, msgspec.ValidationError):
        return malformed(error, where)
    parsed = _PLACE.match(str(error))
    assert parsed is not None
    what, place = parsed["what"], parsed["place"] or ""
    at = f"{where}{place}".lstrip(".")
    if found := _UNKNOWN.fullmatch(what):
        return unknown(found[1], _names_at(kind, place), at)
    if found := _MISSING.fullmatch(what):
        return BadRequest(f"{found[1]} is required" + (f" (at {at})" if at else ""))
    if found := _EXPECTED.match(what):
        got = f", not {_KINDS.get(found[2], found[2])}" if found[2] else ""
        expected = " or ".join(map(_expected, found[1].replace("`", "").split(" | ")))
        if not at:
            return BadRequest(f"request body must be {'a JSON object' if expected == 'an object' else expected}")
        return BadRequest(f"{_last(at)} must be {expected}{got} (at {at})")
    if (found := _NO_CHOICE.fullmatch(what)) and (choices := _choices_at(kind, place)):
        return BadRequest(f"{_last(at)} must be one of {', '.join(choices)}, not {found[1]} (at {at})")
    return BadRequest(
        f"{_last(at)} is invalid: {what[:1].lower()}{what[1:]} (at {at})" if at else f"Invalid request: {what}"
    )


@lru_cache(maxsize=256)
def field_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names that the fields of a struct have in JSON."""
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def _expected(what: str) -> str:
    kind, _, limit = what.strip().partition(" ")
    return f"{_KINDS.get(kind, kind)} {limit}".strip()


def _last(at: str) -> str:
    last = _LAST_STEP.search(at)
    return last[0] if last is not None else at


def _names_at(kind: Any, place: str) -> list[str]:
    """The fields that may stand at a place of a body."""
    return [field.encode_name for one in _types_at(kind, place) for field in _fields(one)]


def _choices_at(kind: Any, place: str) -> list[str]:
    """The values that may stand at a place of a body, where there are some few: of an enumeration, or of a tag."""
    choices: list[str] = []
    for one in _types_at(kind, place):
        for inner in one.types if isinstance(one, msgspec.inspect.UnionType) else (one,):
            if isinstance(inner, msgspec.inspect.EnumType):
                choices += [str(member.value) for member in inner.cls]
            elif isinstance(inner, msgspec.inspect.LiteralType):
                choices += map(str, inner.values)
    outer, _, field = place.rpartition(".")
    for one in _types_at(kind, outer) if not choices else ():
        for inner in one.types if isinstance(one, msgspec.inspect.UnionType) else (one,):
            if isinstance(inner, msgspec.inspect.StructType) and inner.tag_field == field:
                choices.append(str(inner.tag))
    return choices


def _types_at(kind: Any, place: str) -> list[msgspec.inspect.Type]:
    types = [msgspec.inspect.type_info(kind)]
    for step in _STEP.finditer(place):
        types = [inner for outer in types for inner in _inside(outer, step[1])]
    return types


def _inside(outer: msgspec.inspect.Type, name: str | None) -> Iterator[msgspec.inspect.Type]:
    if isinstance(outer, msgspec.inspect.UnionType):
        for one in outer.types:
            yield from _inside(one, name)
    elif name is not None:
        yield from (field.type for field in _fields(outer) if field.encode_name == name)
    elif isinstance(outer, msgspec.inspect.CollectionType):
        yield outer.item_type
    elif isinstance(outer, msgspec.inspect.DictType):
        yield outer.value_type


def _fields(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Field]:
    if isinstance(kind, msgspec.inspect.UnionType):
        for one in kind.types:
            yield from _fields(one)
    elif isinstance(kind, msgspec.inspect.StructType):
        yield from kind.fields


_any: Final = msgspec.json.Decoder()

"""Which messages are meant: by text, by a regular expression, by what is at a path of their data."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from queen.cli.common.exits import UserError
from queen.cli.common.output import lookup

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", help="Only if this holds of the data: path=value, path!=value, path>5, path<5, path~regex."
    ),
]
Grep = Annotated[str | None, typer.Option("--grep", help="Only if this regular expression is found in the JSON.")]

_CONDITION = re.compile(r"([^=!<>~]+?)\s*(!=|>=|<=|=|>|<|~)\s*(.*)", re.DOTALL)
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}

Matches = Callable[[Mapping[str, Any]], bool]


def message_filter(where: Sequence[str] | None, grep: str | None, text: str | None = None) -> Matches:
    """Whether a message, with its `data`, is one of those that are meant. Raises `UserError` for a bad condition."""
    tests = [_condition(one) for one in where or []]
    if grep is not None:
        pattern = _pattern(grep)
        tests.append(lambda message: pattern.search(_text(message)) is not None)
    if text is not None:
        tests.append(lambda message: text in _text(message))
    return lambda message: all(test(message) for test in tests)


def _condition(text: str) -> Matches:
    parsed = _CONDITION.fullmatch(text)
    if parsed is None:
        raise UserError(f"the condition {text!r} is none of path=value, path!=value, path>5, path<5, path~regex")
    path, sign, wanted = parsed.groups()
    if sign == "~":
        pattern = _pattern(wanted)
        return lambda message: pattern.search(_plain(lookup(message["data"], path))) is not None
    value = _value(wanted)
    if sign in _ORDERS:
        return lambda message: _ordered(_ORDERS[sign], lookup(message["data"], path), value)
    equal = sign == "="
    return lambda message: ((found := lookup(message["data"], path)) == value or _plain(found) == wanted) is equal


def _ordered(compare: Callable[[Any, Any], bool], found: Any, wanted: Any) -> bool:
    try:
        return found is not None and compare(found, wanted)
    except TypeError:
        return False


def _value(text: str) -> Any:
    """A number, true, false or null where the text is one; else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _text(message: Mapping[str, Any]) -> str:
    return msgspec.json.encode(message["data"]).decode()


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"{text!r} is no regular expression: {error}") from error

"""Filters of messages: by text, by a regular expression, by the value at a path of their data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from queen.cli.common.exits import UserError
from queen.wire.conditions import CONDITION, Condition, as_value, lookup, plain_text

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", help="Only if this holds of the data: path=value, path!=value, path>5, path<5, path~regex."
    ),
]
Grep = Annotated[str | None, typer.Option("--grep", help="Only if this regular expression is found in the JSON.")]

Matches = Callable[[Mapping[str, Any]], bool]


def message_filter(where: Sequence[str] | None, grep: str | None) -> Matches:
    """Whether a message, with its `data`, matches. Raises `UserError` for a bad condition."""
    tests = [_condition(one) for one in where or []]
    if grep is not None:
        pattern = _pattern(grep)
        tests.append(lambda message: pattern.search(_text(message)) is not None)
    return lambda message: all(test(message) for test in tests)


def is_pattern(condition: str) -> bool:
    """Whether it is a regular expression that has to be found at a path."""
    parsed = CONDITION.fullmatch(condition)
    return parsed is not None and parsed[2] == "~"


def _condition(text: str) -> Matches:
    parsed = CONDITION.fullmatch(text)
    if parsed is None:
        raise UserError(f"the condition {text!r} is none of path=value, path!=value, path>5, path<5, path~regex")
    path, sign, wanted = parsed.groups()
    if sign == "~":
        pattern = _pattern(wanted)
        return lambda message: pattern.search(plain_text(lookup(message["data"], path))) is not None
    condition = Condition(path, sign, wanted, as_value(wanted))
    return lambda message: condition.holds(message["data"])


def _text(message: Mapping[str, Any]) -> str:
    return msgspec.json.encode(message["data"]).decode()


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"{text!r} is not a regular expression: {error}") from error

"""Conditions on payloads, as people write them: `customer.id=42`, `total>100`."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from queen.errors import BadRequest

CONDITION: Final = re.compile(r"([^=!<>~]+?)\s*(!=|>=|<=|=|>|<|~)\s*(.*)", re.DOTALL)
"""Path, sign, value; `~` is a regular expression, which not everything that takes conditions takes."""
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_MOST_CONDITIONS: Final = 20
_LONGEST: Final = 1000


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison with the value at a path."""

    path: str
    sign: str
    text: str
    value: Any
    """The text as JSON, if it is; else the text."""

    def holds(self, data: Any) -> bool:
        found = lookup(data, self.path)
        compare = _ORDERS.get(self.sign)
        if compare is None:
            return (found == self.value or plain_text(found) == self.text) is (self.sign == "=")
        try:
            return found is not None and bool(compare(found, self.value))
        except TypeError:
            return False


@dataclass(frozen=True, slots=True)
class PayloadFilter:
    """Which payloads are meant: with a text somewhere in their JSON, and of which all conditions hold."""

    texts: tuple[bytes, ...] = ()
    """The text as it may stand in a payload: as it is, or with its characters escaped."""
    conditions: tuple[Condition, ...] = ()

    @classmethod
    def of(cls, text: str, conditions: Sequence[Condition]) -> PayloadFilter:
        if not text:
            return cls((), tuple(conditions))
        # A payload is stored as it was sent: clients differ in which characters they escape.
        spellings = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        return cls(tuple(dict.fromkeys(one.encode() for one in spellings)), tuple(conditions))

    @property
    def is_empty(self) -> bool:
        return not self.texts and not self.conditions

    def admits(self, payload: bytes) -> bool:
        if self.texts and not any(text in payload for text in self.texts):
            return False
        if not self.conditions:
            return True
        try:
            data = msgspec.json.decode(payload)
        except RecursionError:
            # Nested so deeply that no path leads into it.
            return False
        return all(condition.holds(data) for condition in self.conditions)


def parse_condition(text: str) -> Condition:
    """Raises `BadRequest` for what is no condition."""
    parsed = CONDITION.fullmatch(text) if len(text) <= _LONGEST else None
    if parsed is None or parsed[2] == "~":
        raise BadRequest(
            f"where must be path=value, with =, !=, >, <, >= or <=, such as customer.id=42, not {text[:80]!r}"
        )
    path, sign, value = parsed.groups()
    return Condition(path.strip(), sign, value, as_value(value))


def parse_conditions(texts: Sequence[str]) -> list[Condition]:
    if len(texts) > _MOST_CONDITIONS:
        raise BadRequest(f"where must be at most {_MOST_CONDITIONS} conditions, not {len(texts)}")
    return [parse_condition(text) for text in texts]


def decode_conditions(text: str) -> list[Condition]:
    """One condition, or a JSON array of them."""
    if not text:
        return []
    if not text.startswith("["):
        return [parse_condition(text)]
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"where must be a condition or a JSON array of them: {error}") from error
    return parse_conditions(texts)


def lookup(value: Any, path: str) -> Any:
    """What is at a path such as `order.items.0.price`; None where something on the way is absent."""
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def as_value(text: str) -> Any:
    """A number, true, false or null where the text is one; else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def plain_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()

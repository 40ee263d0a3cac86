"""The kinds of value a setting can have: how its text is read, written and explained."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How the text of a variable becomes a value and back.

    `parse` raises ValueError for a text that is not what `expected` says.
    """

    name: str
    expected: str
    parse: Callable[[str], object]
    format: Callable[[Any], str] = str
    empty_is_unset: bool = True


def whole(low: int, high: int) -> Kind:
    """A whole number in a range, both ends included."""

    def parse(text: str) -> int:
        # int() alone would also take "1_000" and digits of other scripts.
        if not (text.isascii() and text.removeprefix("-").isdigit()):
            raise ValueError
        number = int(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return Kind("whole number", f"a whole number from {low} to {high}", parse)


def choice(*options: str) -> Kind:
    """One of a few words; the empty word may be one of them."""

    def parse(text: str) -> str:
        if text not in options:
            raise ValueError
        return text

    words = ", ".join(option or "(empty)" for option in options)
    return Kind(words, f"one of {words}", parse)


def _parse_flag(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "": False}
    if text not in known:
        raise ValueError
    return known[text]


def _parse_database_urls(text: str) -> tuple[str, ...]:
    # One URL may itself name several hosts with commas, so only a comma before the next URL separates.
    urls = tuple(url.strip() for url in re.split(r",(?=\s*postgres(?:ql)?://)", text))
    if not all(url.startswith(("postgresql://", "postgres://")) for url in urls):
        raise ValueError
    return urls


def _parse_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    # The length of the text counts too: fromhex() skips spaces.
    if any(len(key) != 64 or len(bytes.fromhex(key)) != 32 for key in keys):
        raise ValueError
    return keys


def _parse_origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip().lower().removesuffix("/") for origin in text.split(","))
    if not all(origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in origins):
        raise ValueError
    return origins


def _parse_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


TEXT = Kind("text", "text", str)
FLAG = Kind(
    "true, false",
    "true, 1, false, 0 or nothing",
    _parse_flag,
    format=lambda value: "true" if value else "false",
    empty_is_unset=False,
)
PATH = Kind("path", "a path", _parse_path)
DATABASE_URLS = Kind(
    "URLs, by comma",
    "URLs that begin with postgresql://, separated by commas",
    _parse_database_urls,
    format=",".join,
)
KEYS = Kind(
    "keys, by comma",
    "keys of 64 hexadecimal digits, separated by commas",
    _parse_keys,
    format=",".join,
)
ORIGINS = Kind(
    "origins, by comma",
    "origins such as https://app.example.com, separated by commas, or *",
    _parse_origins,
    format=",".join,
)
# 2^31 - 1 is the most that PostgreSQL takes for a timeout.
DURATION_MS = whole(0, 2**31 - 1)
INTERVAL_MS = whole(1, 2**31 - 1)

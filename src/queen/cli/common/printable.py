"""Text without control sequences, which names, errors and payloads may contain, for terminals."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_CONTROLS: Final = (*range(32), *range(127, 160))
_ESCAPED: Final = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in "\t\n"}
_ON_ONE_LINE: Final = _ESCAPED | {ord(sign): " " for sign in "\t\n\r"}
_IN_JSON: Final = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 127}
"""JSON has the others escaped already."""


def printable(text: str) -> str:
    """The text with its control characters written out; lines and tabs stay."""
    return text.translate(_ESCAPED)


def on_one_line(text: str) -> str:
    """The same, without lines and tabs."""
    return text.translate(_ON_ONE_LINE)


def json_text(value: Any, indent: int = 0) -> str:
    """The value as JSON, in which control characters are escaped."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode().translate(_IN_JSON)

"""Text that PostgreSQL can hold: any but with a NUL character, which JSON and URLs may bring."""

from __future__ import annotations


def can_be_stored(text: str) -> bool:
    """Whether anything in the database can be called like this."""
    return "\x00" not in text


def storable(text: str) -> str:
    """The text as it is stored: a NUL becomes the mark for what cannot be shown."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")

"""Lists in parts of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def chunks(values: Sequence[T], size: int) -> Iterator[list[T]]:
    """The values in order, `size` at a time; the last list may be shorter."""
    for start in range(0, len(values), size):
        yield list(values[start : start + size])

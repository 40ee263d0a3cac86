"""Making long lists without keeping everybody else waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE: Final = 500


async def gently(make: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """`make` of every row; others have their turn in between."""
    made: list[R] = []
    for start in range(0, len(rows), _AT_ONCE):
        if start:
            await asyncio.sleep(0)
        made += map(make, rows[start : start + _AT_ONCE])
    return made

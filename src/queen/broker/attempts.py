"""Attempts at what happens as a whole or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from queen.broker.push import QueueMoved

_MOST_ATTEMPTS = 5

T = TypeVar("T")


class Refused(Exception):
    """It cannot be carried out; nothing of it is."""


async def persist(attempt: Callable[[], Awaitable[T]]) -> T:
    """Nothing of an attempt that met others at their work is left: it is made again."""
    for _ in range(_MOST_ATTEMPTS - 1):
        try:
            return await attempt()
        except (QueueMoved, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
            continue
    return await attempt()

"""What a background job is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from queen.broker.janitor.election import Session


@dataclass(frozen=True, slots=True)
class Job:
    """Work that is due every `interval` seconds, and at once when the janitor is nudged if it is `prompt`.

    `run` does a bounded piece in short statements, and says whether more is waiting.
    """

    name: str
    interval: float
    run: Callable[[Session], Awaitable[bool]]
    prompt: bool = False

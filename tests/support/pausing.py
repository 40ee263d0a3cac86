"""Pausing a call between its answer and what its caller makes of it, so that something else comes in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

Pause = tuple[asyncio.Event, asyncio.Event]


def pause_after(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, statement: str | None = None) -> Pause:
    """The first call that returns something (or of a statement) has ended, and its caller waits: set when that is so,
    and to be set for it to go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    call = getattr(owner, method)

    async def paused(*arguments: Any, **options: Any) -> Any:
        result = await call(*arguments, **options)
        awaited = result if statement is None else arguments[0] == statement
        if awaited and not reached.is_set():
            reached.set()
            await go_on.wait()
        return result

    monkeypatch.setattr(owner, method, paused)
    return reached, go_on

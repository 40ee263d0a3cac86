"""Consuming for programs without `await`: handlers run in threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from queen.client.background import BackgroundLoop

_LOOK_SECONDS = 0.1

Begin: TypeAlias = Callable[[Callable[[Any], Awaitable[None]], asyncio.Event], Awaitable[None]]
"""Consumes with a handler that is awaited, until the event."""


def consume_in_threads(
    background: BackgroundLoop,
    handler: Callable[[Any], object],
    concurrency: int,
    signal: threading.Event | None,
    begin: Begin,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Wait until a consumer has ended; on Ctrl-C the handlers that have begun finish.

    `prepare` is told of each message before a handler in a thread gets it.
    """
    ended = asyncio.Event()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="queen-handler") as threads:

        async def call(given: Any) -> None:
            if inspect.iscoroutinefunction(handler):
                await handler(given)
                return
            if prepare is not None:
                for message in given if isinstance(given, list) else [given]:
                    prepare(message)
            await asyncio.get_running_loop().run_in_executor(threads, handler, given)

        async def consume() -> None:
            async with watched(signal, ended):
                await begin(call, ended)

        background.run(consume(), stop=ended.set)


@asynccontextmanager
async def watched(signal: threading.Event | None, ended: asyncio.Event) -> AsyncIterator[None]:
    """Set `ended` when another thread sets `signal`, while a block runs."""

    async def watch(signal: threading.Event) -> None:
        # In short waits, because a thread cannot be cancelled.
        while not await asyncio.to_thread(signal.wait, _LOOK_SECONDS):
            pass
        ended.set()

    watching = asyncio.create_task(watch(signal)) if signal is not None else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()

"""The event loop thread of `QueenSync`, and handlers in a thread pool."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a background thread; works beside another running loop, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon thread: a program that does not close the client still exits.
        self._thread = threading.Thread(target=self._loop.run_forever, name="queen-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], stop: Callable[[], object] | None = None) -> T:
        """Run a coroutine and return its result. On Ctrl-C call `stop` for a graceful end, or cancel it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("QueenSync called from its own event loop, which would deadlock; use Queen")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            if stop is None:
                future.cancel()
            else:
                self._loop.call_soon_threadsafe(stop)
                future.result()
            raise

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Blocking(Generic[T]):
    """The synchronous form of an object; its methods are those of the object, made `blocking`."""

    def __init__(self, background: BackgroundLoop, wrapped: T) -> None:
        self._background = background
        self._wrapped = wrapped


def blocking(method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Blocking[T], P], R]:
    """A method that runs a coroutine method of the wrapped object, and returns its result."""

    @functools.wraps(method)
    def call(self: Blocking[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._background.run(method(self._wrapped, *args, **kwargs))

    return call


_POLL_SECONDS = 0.1

StartConsumer: TypeAlias = Callable[[Callable[[Any], Awaitable[None]], asyncio.Event], Awaitable[None]]
"""Consumes with an asynchronous handler until the event is set."""


def consume_in_threads(
    background: BackgroundLoop,
    handler: Callable[[Any], object],
    concurrency: int,
    signal: threading.Event | None,
    start: StartConsumer,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Run a consumer whose handlers run in threads; on Ctrl-C running handlers finish first.

    `prepare` is called with each message before its handler.
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
            async with stop_when_set(signal, ended):
                await start(call, ended)

        background.run(consume(), stop=ended.set)


@asynccontextmanager
async def stop_when_set(signal: threading.Event | None, ended: asyncio.Event) -> AsyncIterator[None]:
    """While a block runs, set `ended` when another thread sets `signal`."""

    async def watch(signal: threading.Event) -> None:
        # Short waits, because a thread cannot be cancelled.
        while not await asyncio.to_thread(signal.wait, _POLL_SECONDS):
            pass
        ended.set()

    watcher = asyncio.create_task(watch(signal)) if signal is not None else None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.cancel()

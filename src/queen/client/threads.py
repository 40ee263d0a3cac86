"""Consuming for programs without `await`: handlers run in threads."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for threads that wait for them; works where another loop runs, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="queen-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], stop: Callable[[], object] | None = None) -> T:
        """The outcome of a coroutine. When the wait is interrupted, `stop` may end it gently; else it is cancelled."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("QueenSync was called from its own event loop, which would wait for itself; use Queen")
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
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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


_WATCHED = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopSignals:
    """Watches while somebody consumes or buffers, where the program has no handlers of its own."""

    def __init__(self, stop: Callable[[], bool], last: Callable[[], Awaitable[None]]) -> None:
        """`stop` ends consumers, and says whether there were any. If not, `last` comes before the usual end."""
        self._stop = stop
        self._last = last
        self._before: dict[signal.Signals, _Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin, unless it has begun; only the main thread can."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        for number in _WATCHED:
            handler = signal.getsignal(number)
            if not _is_default(handler):
                continue
            try:
                self._loop.add_signal_handler(number, self._received, number)
            except NotImplementedError:
                # Event loops on Windows cannot.
                return
            self._before[number] = handler

    def leave(self) -> None:
        """Put back what was there."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            assert self._loop is not None
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _received(self, number: signal.Signals) -> None:
        # The next one takes its usual course: whoever sends it twice means it.
        self.leave()
        if not self._stop():
            self._ending = asyncio.ensure_future(self._end(number))

    async def _end(self, number: signal.Signals) -> None:
        await self._last()
        signal.raise_signal(number)


def _is_default(handler: _Handler) -> bool:
    """Whether nobody has asked for the signal; `asyncio.run` takes SIGINT for itself, by a partial of its own."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return getattr(getattr(handler, "func", None), "__module__", "") == "asyncio.runners"

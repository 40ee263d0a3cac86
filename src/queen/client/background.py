"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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

"""`queue(...).consume(handler)`: a consumer that runs when it is awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from typing import Any

from queen.client.consumer import ConsumeOptions
from queen.client.engine import Engine
from queen.client.messages import ErrorCallback, Handler, SuccessCallback
from queen.client.subscription import Subscription


class Consume:
    """Callbacks may be hung on before it is awaited; with any of them, acknowledging is theirs to do."""

    def __init__(
        self,
        engine: Engine,
        handler: Handler,
        subscription: Subscription,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
        transport: str,
    ) -> None:
        if not callable(handler):
            raise TypeError(f"consume takes a function of a message, not {type(handler).__name__}")
        self._engine = engine
        self._handler: Callable[[Any], Awaitable[object] | object] = handler
        self._subscription = subscription
        self._options = options
        self._signal = signal
        self._transport = transport
        self._on_success: SuccessCallback | None = None
        self._on_error: ErrorCallback | None = None

    def on_success(self, callback: SuccessCallback) -> Consume:
        """Await `callback(message, result)` after the handler; it acknowledges."""
        self._on_success = callback
        return self

    def on_error(self, callback: ErrorCallback) -> Consume:
        """Await `callback(message, error)` when the handler raises; it acknowledges."""
        self._on_error = callback
        return self

    def __await__(self) -> Generator[Any, None, None]:
        """Consume until the limit, the idle time, the signal, SIGTERM, or `close()` of the client."""
        return self._run().__await__()

    async def _run(self) -> None:
        handler, options = self._handler, self._options
        if self._on_success is not None or self._on_error is not None:
            handler, options = self._with_callbacks, replace(options, auto_ack=False)
        await self._engine.consume(handler, self._subscription, options, self._signal, self._transport)

    async def _with_callbacks(self, given: Any) -> None:
        try:
            result = self._handler(given)
            if inspect.isawaitable(result):
                result = await result
            if self._on_success is not None:
                await self._on_success(given, result)
        except Exception as error:
            if self._on_error is None:
                raise
            await self._on_error(given, error)

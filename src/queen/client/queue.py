"""`queen.queue(name)`: the builder for queues and its operations."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, Self

from queen.client.admin import DlqQuery
from queen.client.config import QUEUE_DEFAULTS
from queen.client.consume.consumer import ConsumeOptions
from queen.client.engine import Engine
from queen.client.errors import BadRequestError, QueenError
from queen.client.http import HttpClient
from queen.client.push import Push
from queen.client.types import (
    DEFAULT_PARTITION,
    BufferOptions,
    Deferred,
    ErrorCallback,
    Handler,
    Items,
    Message,
    Subscription,
    SuccessCallback,
)
from queen.wire.paths import path_of


class FetchOptions:
    """Builder options for fetching messages of queues or items of topics."""

    # Defaults are class attributes: a builder is created for every push, and sets only what differs.
    _concurrency = 1
    _batch = 1
    _limit: int | None = None
    _idle_millis: int | None = None
    _wait = True
    _timeout_millis = 30_000
    _each = False

    def concurrency(self, count: int) -> Self:
        """Number of workers that fetch and handle in parallel."""
        self._concurrency = max(1, count)
        return self

    def batch(self, size: int) -> Self:
        """Maximum number of messages per fetch; above 1, the handler is called with a list."""
        self._batch = max(1, size)
        return self

    def limit(self, count: int | None) -> Self:
        """Stop after this many messages (per worker)."""
        self._limit = count
        return self

    def idle_millis(self, millis: int | None) -> Self:
        """Stop when no message has arrived for this long."""
        self._idle_millis = millis
        return self

    def timeout_millis(self, millis: int) -> Self:
        """Long-poll timeout of one fetch."""
        self._timeout_millis = millis
        return self

    def wait(self, enabled: bool = True) -> Self:
        """Whether fetches are long polls."""
        self._wait = enabled
        return self

    def each(self) -> Self:
        """Call the handler with one message at a time, whatever the batch size."""
        self._each = True
        return self


class QueueOptions(FetchOptions):
    """Builder options of a queue."""

    # Defaults are class attributes: a builder is created for every push, and sets only what differs.
    _name: str | None = None
    _partition = DEFAULT_PARTITION
    _namespace: str | None = None
    _task: str | None = None
    _group: str | None = None
    _config: Mapping[str, Any] = QUEUE_DEFAULTS
    _buffer: BufferOptions | None = None
    _partitions = 1
    _auto_ack: bool | None = None
    _renew_lease = False
    _renew_interval_millis: int | None = None
    _mode: str | None = None
    _start: str | None = None
    _conflation: bool = False

    @property
    def name(self) -> str | None:
        """The name of the queue; None if queues are selected by namespace or task."""
        return self._name

    def namespace(self, name: str) -> Self:
        """Namespace of the queue to create; without a queue name, pop from its queues."""
        self._namespace = name
        return self

    def task(self, name: str) -> Self:
        """Task of the queue to create; without a queue name, pop from its queues."""
        self._task = name
        return self

    def config(self, options: Mapping[str, Any]) -> Self:
        """Options for `create()`, in snake_case or camelCase; defaults are `QUEUE_DEFAULTS`."""
        self._config = {**QUEUE_DEFAULTS, **{_snake(name): value for name, value in options.items()}}
        return self

    def partition(self, name: str) -> Self:
        """The partition to push to or pop from; messages of a partition are ordered."""
        self._partition = name
        return self

    def buffer(self, options: BufferOptions | None = None) -> Self:
        """Buffer pushes and send them in batches; see `BUFFER_DEFAULTS`."""
        self._buffer = options or {}
        return self

    def group(self, name: str) -> Self:
        """The consumer group: its consumers share the messages, every group receives all."""
        self._group = name
        return self

    def partitions(self, count: int) -> Self:
        """Maximum number of partitions per pop; they share the batch and one lease."""
        self._partitions = max(1, count)
        return self

    def auto_ack(self, enabled: bool = True) -> Self:
        """For `consume`, whether messages are acknowledged after the handler (default True).

        For `pop`, whether the server acknowledges on delivery (default False).
        """
        self._auto_ack = enabled
        return self

    def renew_lease(self, enabled: bool = True, interval_millis: int | None = None) -> Self:
        """Renew leases while the handler runs."""
        self._renew_lease = enabled
        self._renew_interval_millis = interval_millis or self._renew_interval_millis
        return self

    def subscription_mode(self, mode: str) -> Self:
        """Start position of a new group: `new` for messages from now on, `all` for all messages."""
        self._mode = mode
        return self

    def subscription_from(self, start: str) -> Self:
        """Start position of a new group: a timestamp (ISO 8601), or `now`."""
        self._start = start
        return self

    def conflation(self, enabled: bool = True) -> Self:
        """The group gets only the newest message of each partition; its first pop decides. Needs a group."""
        self._conflation = enabled
        return self

    def _subscription(self) -> Subscription:
        return Subscription(
            queue=self._name,
            partition=None if self._partition == DEFAULT_PARTITION else self._partition,
            namespace=self._namespace,
            task=self._task,
            group=self._group,
            batch=self._batch,
            partitions=self._partitions,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            mode=self._mode,
            start=self._start,
            conflation=self._conflation,
        )

    def _consume_options(self) -> ConsumeOptions:
        return ConsumeOptions(
            batch=self._batch,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            concurrency=self._concurrency,
            limit=self._limit,
            idle_millis=self._idle_millis,
            auto_ack=self._auto_ack is not False,
            each=self._each,
            renew_lease=self._renew_lease,
            renew_interval_millis=self._renew_interval_millis,
        )

    def _configuration(self) -> dict[str, Any]:
        """The request body that creates the queue."""
        options = {_camel(name): value for name, value in self._config.items()}
        return {"queue": self._name, "namespace": self._namespace, "task": self._task, "options": options}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


class Operation(Deferred[Any]):
    """Callbacks may be hung on before it is awaited; with `on_error` it does not raise."""

    def __init__(self, http: HttpClient, method: str, path: str, body: Any = None) -> None:
        self._http = http
        self._method = method
        self._path = path
        self._body = body
        self._on_success: Callable[[Any], Awaitable[object]] | None = None
        self._on_error: Callable[[Exception], Awaitable[object]] | None = None

    def on_success(self, callback: Callable[[Any], Awaitable[object]]) -> Operation:
        """Await `callback(response)` on success."""
        self._on_success = callback
        return self

    def on_error(self, callback: Callable[[Exception], Awaitable[object]]) -> Operation:
        """Await `callback(error)` on failure, instead of raising."""
        self._on_error = callback
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        """The decoded response of the server."""
        return self._run().__await__()

    async def _run(self) -> Any:
        try:
            response = await self._http.request(self._method, self._path, self._body)
            if isinstance(response, dict) and response.get("error"):
                raise BadRequestError(str(response["error"]), self._method, self._path)
        except QueenError as error:
            if self._on_error is None:
                raise
            await self._on_error(error)
            return {"success": False, "error": str(error)}
        if self._on_success is not None:
            await self._on_success(response)
        return response


class Consume(Deferred[None]):
    """A consumer, run when it is awaited. With callbacks, acknowledging is their responsibility."""

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
            raise TypeError(f"handler must be a function of a message, not {type(handler).__name__}")
        self._engine = engine
        self._handler: Callable[[Any], Awaitable[object] | object] = handler
        self._subscription = subscription
        self._options = options
        self._signal = signal
        self._transport = transport
        self._on_success: SuccessCallback | None = None
        self._on_error: ErrorCallback | None = None

    def on_success(self, callback: SuccessCallback) -> Consume:
        """Await `callback(message, result)` after the handler; the callback has to acknowledge."""
        self._on_success = callback
        return self

    def on_error(self, callback: ErrorCallback) -> Consume:
        """Await `callback(message, error)` when the handler raises; the callback has to acknowledge."""
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


class QueueBuilder(QueueOptions):
    """Builder for a queue; its methods change it and return it."""

    def __init__(self, engine: Engine, name: str | None = None) -> None:
        self._engine = engine
        if name is not None:
            self._name = name

    def create(self) -> Operation:
        """Create the queue, or change its options; its messages stay."""
        self._required("create")
        return Operation(self._engine.http, "POST", "/api/v1/configure", self._configuration())

    def delete(self) -> Operation:
        """Delete the queue with its messages."""
        path = path_of("/api/v1/resources/queues", self._required("delete"))
        return Operation(self._engine.http, "DELETE", path)

    def push(self, items: Items) -> Push:
        """Push `{"data": …}` or a list of such; when awaited, returns the server's result for each.

        A `transactionId` deduplicates: a second message with the same id is not stored. The default is a new id.
        """
        return Push(self._engine.pusher, self._required("push"), self._partition, items, self._buffer)

    async def pop(self) -> list[Message]:
        """Pop up to `batch` messages, with a long poll unless `wait(False)`; they are leased until acknowledged."""
        return await self._engine.pop(self._subscription(), auto_ack=self._auto_ack is True)

    def consume(self, handler: Handler, *, signal: asyncio.Event | None = None, transport: str = "http") -> Consume:
        """Call the handler with each message, or with lists if `batch` is above 1; runs when awaited.

        Messages are acknowledged when the handler returns, and redelivered when it raises. Set `signal` to stop.
        """
        return Consume(self._engine, handler, self._subscription(), self._consume_options(), signal, transport)

    async def flush_buffer(self) -> None:
        """Flush the buffer of this partition; on failure raises, and keeps the messages."""
        await self._engine.buffers.flush(self._required("flush_buffer"), self._partition)

    def dlq(self, consumer_group: str | None = None) -> DlqQuery:
        """Query the dead letters of this queue, or of the selected partition."""
        return self._engine.dead_letters(self._required("dlq"), consumer_group, self._partition)

    def _required(self, operation: str) -> str:
        if not self._name:
            raise ValueError(f"Queue name is required for {operation}: queen.queue('name').{operation}(...)")
        return self._name

"""`QueenSync`: the client for code without `await`, with the same grammar."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from queen.client.admin import AdminCalls, DlqOptions
from queen.client.client import Queen
from queen.client.queue import QueueBuilder, QueueOptions
from queen.client.threads import BackgroundLoop, consume_in_threads
from queen.client.topics.sync import TopicSync
from queen.client.transaction import TransactionOperations
from queen.client.types import (
    AckResponse,
    BufferStats,
    DLQResponse,
    Given,
    GivenMany,
    Items,
    Message,
    TransactionResponse,
)

T = TypeVar("T")


class AdminSync(AdminCalls[Any]):
    """`queen.admin` of `QueenSync`: every call returns its answer."""


class QueenSync:
    """The client for scripts and notebooks: what is awaited with `Queen` is returned here.

        with QueenSync("http://localhost:6632") as queen:
            queen.queue("tasks").push([{"data": {"job": 1}}])
            for message in queen.queue("tasks").batch(10).pop():
                queen.ack(message)

    It may be used from several threads. What it buffered is sent by `close()`, or when the program ends.
    """

    def __init__(self, config: str | Sequence[str] | Mapping[str, Any] | None = None, **options: Any) -> None:
        """Takes what `Queen` takes."""
        self._background = BackgroundLoop()
        self._queen = self._background.run(_made(config, options))
        self._closed = False
        atexit.register(self.close)

    def queue(self, name: str | None = None) -> QueueSync:
        """Begin a sentence of the fluent grammar; without a name, go on with `namespace` or `task`."""
        return QueueSync(self._background, self._queen, name)

    def topic(self, namespace: str, *names: str) -> TopicSync:
        """Begin a sentence about a topic; of several, or (without a name) of all topics of a namespace to consume."""
        return TopicSync(self._background, self._queen, namespace, names)

    def topics(self, namespace: str) -> list[str]:
        """The names of the topics of a namespace that have ready or leased items."""
        return self._background.run(self._queen.topics(namespace))

    @property
    def admin(self) -> AdminSync:
        """Administration and observation."""
        return AdminSync(self.request)

    def transaction(self) -> TransactionSync:
        """Begin a transaction: acknowledgments and pushes that happen together or not at all."""
        return TransactionSync(self._background, self._queen)

    def ack(
        self, message: Given | GivenMany, status: bool | str = True, context: Mapping[str, Any] | None = None
    ) -> AckResponse:
        """Acknowledge a message or a list of messages; see `Queen.ack`."""
        return self._background.run(self._queen.ack(message, status, context))

    def renew(self, message_or_lease_id: Given | GivenMany, seconds: float | None = None) -> Any:
        """Let the leases of messages live for at least `seconds` (60) from now."""
        return self._background.run(self._queen.engine.acker.renew(message_or_lease_id, seconds))

    def flush_all_buffers(self) -> None:
        """Send everything that is buffered; raises when that cannot be done, and keeps it."""
        self._background.run(self._queen.flush_all_buffers())

    def get_buffer_stats(self) -> BufferStats:
        """What the buffers hold and have done."""
        return self._queen.get_buffer_stats()

    def delete_consumer_group(self, consumer_group: str, delete_metadata: bool = True) -> Any:
        """Forget where a group is, everywhere; with its metadata, also where it once began."""
        return self._background.run(self._queen.delete_consumer_group(consumer_group, delete_metadata))

    def update_consumer_group_timestamp(self, consumer_group: str, timestamp: str) -> Any:
        """Move the time from which a group gets messages of partitions it has not begun."""
        return self._background.run(self._queen.update_consumer_group_timestamp(consumer_group, timestamp))

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Any request to the HTTP API; see `Queen.request`."""
        return self._background.run(self._queen.request(method, path, body))

    def fetch(self, path: str) -> bytes:
        """The body of a GET as it comes, for answers that are not JSON."""
        return self._background.run(self._queen.engine.http.send("GET", path)).body

    def close(self) -> None:
        """End the consumers, send what is buffered, close the connections; see `Queen.close`."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._background.run(self._queen.close())
        finally:
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class QueueSync(QueueOptions):
    """One queue and what has been said about it."""

    def __init__(self, background: BackgroundLoop, queen: Queen, name: str | None) -> None:
        self._background = background
        self._queen = queen
        self._name = name

    def create(self) -> Any:
        """Create the queue, or give it these options; what it holds stays."""
        return self._awaited(lambda builder: builder.create())

    def delete(self) -> Any:
        """Remove the queue with everything in it."""
        return self._awaited(lambda builder: builder.delete())

    def push(self, items: Items) -> Any:
        """Push `{"data": …}` or a list of such; the server's result for each."""
        return self._awaited(lambda builder: builder.push(items))

    def pop(self) -> list[Message]:
        """Take messages now, or as soon as there are any; they are leased until they are acknowledged."""
        return self._awaited(lambda builder: builder.pop())

    def flush_buffer(self) -> None:
        """Send what is buffered for this partition; raises when that cannot be done, and keeps it."""
        self._awaited(lambda builder: builder.flush_buffer())

    def consume(
        self, handler: Callable[[Any], object], *, signal: threading.Event | None = None, transport: str = "http"
    ) -> None:
        """Call the handler with each message (or list, when `batch` is above 1) until the limit or the idle time.

        The handler runs in a thread, `concurrency` of them at a time. Ctrl-C lets those that have begun finish.
        """

        def prepare(message: Any) -> None:
            message["trace"] = self._without_await(message["trace"])

        consume_in_threads(
            self._background,
            handler,
            self._concurrency,
            signal,
            lambda call, ended: self._builder().consume(call, signal=ended, transport=transport),
            prepare,
        )

    def dlq(self, consumer_group: str | None = None) -> DlqSync:
        """Query the dead letters of this queue, and of one partition if one was chosen."""
        query = self._builder().dlq(consumer_group)
        return DlqSync(self._background, query)

    def _without_await(self, trace: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda config: self._background.run(trace(config))

    def _builder(self) -> QueueBuilder:
        """The same sentence for the client that is awaited."""
        builder = self._queen.queue()
        said = {name: value for name, value in vars(self).items() if name not in ("_background", "_queen")}
        vars(builder).update(said)
        return builder

    def _awaited(self, begin: Callable[[QueueBuilder], Awaitable[T]]) -> T:
        builder = self._builder()

        async def work() -> T:
            return await begin(builder)

        return self._background.run(work())


class TransactionSync(TransactionOperations):
    """`queen.transaction()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, queen: Queen) -> None:
        super().__init__(queen.engine.http, queen.engine.ids)
        self._background = background

    def commit(self) -> TransactionResponse:
        """Apply everything; raises `TransactionError` or `LeaseLostError` when nothing was applied."""
        return self._background.run(self._commit())


class DlqSync(DlqOptions):
    """`queue(...).dlq()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, query: DlqOptions) -> None:
        vars(self).update(vars(query))
        self._background = background

    def get(self) -> DLQResponse:
        """The dead letters, the latest first."""
        return self._background.run(self._get())


async def _made(config: str | Sequence[str] | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Queen:
    return Queen(config, **options)

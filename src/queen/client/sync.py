"""`QueenSync`: the synchronous client, with the methods of `Queen`."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from queen.client.admin import AdminCalls, DlqOptions
from queen.client.client import Queen
from queen.client.queue import QueueBuilder, QueueOptions
from queen.client.state import EphemeralQueue, KeyValues, Lock, Timers
from queen.client.threads import BackgroundLoop, Blocking, blocking, consume_in_threads
from queen.client.topics.sync import TopicSync
from queen.client.transaction import TransactionOperations
from queen.client.types import (
    DEFAULT_PARTITION,
    AckResponse,
    BufferStats,
    DLQResponse,
    Items,
    Message,
    MessageRef,
    MessageRefs,
    TransactionResponse,
)

T = TypeVar("T")


class AdminSync(AdminCalls[Any]):
    """`queen.admin` of `QueenSync`: calls return the response."""


class QueenSync:
    """The synchronous client, for scripts, notebooks and threads.

        with QueenSync("http://localhost:6632") as queen:
            queen.queue("tasks").push([{"data": {"job": 1}}])
            for message in queen.queue("tasks").batch(10).pop():
                queen.ack(message)

    Thread-safe. Buffers are flushed by `close()` and at exit of the program.
    """

    def __init__(self, config: str | Sequence[str] | Mapping[str, Any] | None = None, **options: Any) -> None:
        """Takes the options of `Queen`."""
        self._background = BackgroundLoop()
        self._queen = self._background.run(_create(config, options))
        self._closed = False
        atexit.register(self.close)

    def queue(self, name: str | None = None) -> QueueSync:
        """A builder for a queue; without a name, select queues with `namespace` or `task`."""
        return QueueSync(self._background, self._queen, name)

    def topic(self, namespace: str, *names: str) -> TopicSync:
        """A builder for a topic; with several names, or none for all topics of the namespace, for consuming."""
        return TopicSync(self._background, partial(self._queen.topic, namespace, *names))

    def topics(self, namespace: str) -> list[str]:
        """The names of the topics of a namespace that have ready or leased items."""
        return self._background.run(self._queen.topics(namespace))

    @property
    def admin(self) -> AdminSync:
        """Administrative calls."""
        return AdminSync(self.request)

    def transaction(self) -> TransactionSync:
        """A new transaction: acknowledgments and pushes that are applied atomically."""
        return TransactionSync(self._background, self._queen)

    def kv(self, namespace: str) -> KeyValuesSync:
        """The keys of a namespace."""
        return KeyValuesSync(self._background, self._queen.kv(namespace))

    def lock(self, name: str, *, ttl: int = 30, limit: int = 1, poll_seconds: float = 1.0) -> LockSync:
        """A lock, or one of `limit` permits, that expires `ttl` seconds after its last renewal."""
        return LockSync(self._background, self._queen.lock(name, ttl=ttl, limit=limit, poll_seconds=poll_seconds))

    def timers(self, queue: str) -> TimersSync:
        """The timers of a queue."""
        return TimersSync(self._background, self._queen.timers(queue))

    def ephemeral(self, name: str) -> EphemeralQueueSync:
        """An ephemeral queue."""
        return EphemeralQueueSync(self._background, self._queen.ephemeral(name))

    def fetch(
        self, queue: str, *, partition: str = DEFAULT_PARTITION, offset: int = 0, max_bytes: int | None = None
    ) -> dict[str, Any]:
        """Read a partition from an offset on, consuming nothing; see `Queen.fetch`."""
        found = self._queen.fetch(queue, partition=partition, offset=offset, max_bytes=max_bytes)
        return self._background.run(found)

    def ack(
        self, message: MessageRef | MessageRefs, status: bool | str = True, context: Mapping[str, Any] | None = None
    ) -> AckResponse:
        """Acknowledge a message or a list of messages; see `Queen.ack`."""
        return self._background.run(self._queen.ack(message, status, context))

    def renew(self, message_or_lease_id: MessageRef | MessageRefs, seconds: float | None = None) -> Any:
        """Extend the leases of messages to at least `seconds` (60) from now."""
        return self._background.run(self._queen.engine.acker.renew(message_or_lease_id, seconds))

    def flush_all_buffers(self) -> None:
        """Flush all buffers; on failure raises, and keeps the messages."""
        self._background.run(self._queen.flush_all_buffers())

    def get_buffer_stats(self) -> BufferStats:
        """Statistics of the buffers."""
        return self._queen.get_buffer_stats()

    def delete_consumer_group(self, consumer_group: str, delete_metadata: bool = True) -> Any:
        """Delete the offsets of a consumer group in all queues; with its metadata, also its start position."""
        return self._background.run(self._queen.delete_consumer_group(consumer_group, delete_metadata))

    def update_consumer_group_timestamp(self, consumer_group: str, timestamp: str) -> Any:
        """Change the start position of a group in partitions it has not read yet."""
        return self._background.run(self._queen.update_consumer_group_timestamp(consumer_group, timestamp))

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send any request to the HTTP API; see `Queen.request`."""
        return self._background.run(self._queen.request(method, path, body))

    def download(self, path: str) -> bytes:
        """The body of a GET as it comes, for answers that are not JSON."""
        return self._background.run(self._queen.engine.http.send("GET", path)).body

    def close(self) -> None:
        """Stop the consumers, flush the buffers, close the connections; see `Queen.close`."""
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
    """Builder for a queue."""

    def __init__(self, background: BackgroundLoop, queen: Queen, name: str | None) -> None:
        self._background = background
        self._queen = queen
        self._name = name

    def create(self) -> Any:
        """Create the queue, or change its options; its messages stay."""
        return self._run(lambda builder: builder.create())

    def delete(self) -> Any:
        """Delete the queue with its messages."""
        return self._run(lambda builder: builder.delete())

    def push(self, items: Items) -> Any:
        """Push `{"data": …}` or a list of such; returns the server's result for each."""
        return self._run(lambda builder: builder.push(items))

    def pop(self) -> list[Message]:
        """Pop up to `batch` messages, with a long poll unless `wait(False)`; they are leased until acknowledged."""
        return self._run(lambda builder: builder.pop())

    def flush_buffer(self) -> None:
        """Flush the buffer of this partition; on failure raises, and keeps the messages."""
        self._run(lambda builder: builder.flush_buffer())

    def consume(
        self, handler: Callable[[Any], object], *, signal: threading.Event | None = None, transport: str = "http"
    ) -> None:
        """Call the handler with each message (or list, if `batch` is above 1) until the limit or the idle time.

        Handlers run in a pool of `concurrency` threads. On Ctrl-C running handlers finish first.
        """

        def prepare(message: Any) -> None:
            message["trace"] = self._blocking(message["trace"])

        consume_in_threads(
            self._background,
            handler,
            self._concurrency,
            signal,
            lambda call, ended: self._builder().consume(call, signal=ended, transport=transport),
            prepare,
        )

    def dlq(self, consumer_group: str | None = None) -> DlqSync:
        """Query the dead letters of this queue, or of the selected partition."""
        query = self._builder().dlq(consumer_group)
        return DlqSync(self._background, query)

    def _blocking(self, trace: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda config: self._background.run(trace(config))

    def _builder(self) -> QueueBuilder:
        """The asynchronous builder with the same options."""
        builder = self._queen.queue()
        options = {name: value for name, value in vars(self).items() if name not in ("_background", "_queen")}
        vars(builder).update(options)
        return builder

    def _run(self, start: Callable[[QueueBuilder], Awaitable[T]]) -> T:
        builder = self._builder()

        async def work() -> T:
            return await start(builder)

        return self._background.run(work())


class KeyValuesSync(Blocking[KeyValues]):
    """`queen.kv(...)` of `QueenSync`."""

    get = blocking(KeyValues.get)
    entry = blocking(KeyValues.entry)
    get_many = blocking(KeyValues.get_many)
    scan = blocking(KeyValues.scan)
    put = blocking(KeyValues.put)
    put_if_absent = blocking(KeyValues.put_if_absent)
    incr = blocking(KeyValues.incr)
    delete = blocking(KeyValues.delete)


class LockSync(Blocking[Lock]):
    """`queen.lock(...)` of `QueenSync`, renewed in the background while it is held."""

    acquire = blocking(Lock.acquire)
    release = blocking(Lock.release)

    @property
    def lost(self) -> bool:
        """Whether it is not held (any more); see `Lock.lost`."""
        return self._wrapped.lost

    @property
    def guard(self) -> dict[str, Any]:
        """The operation on keys for the `kv` of a transaction; see `Lock.guard`."""
        return self._wrapped.guard

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class TimersSync(Blocking[Timers]):
    """`queen.timers(...)` of `QueenSync`."""

    schedule = blocking(Timers.schedule)
    cancel = blocking(Timers.cancel)
    pending = blocking(Timers.pending)


class EphemeralQueueSync(Blocking[EphemeralQueue]):
    """`queen.ephemeral(...)` of `QueenSync`."""

    configure = blocking(EphemeralQueue.configure)
    push = blocking(EphemeralQueue.push)
    pop = blocking(EphemeralQueue.pop)
    ack = blocking(EphemeralQueue.ack)
    depth = blocking(EphemeralQueue.depth)
    reset = blocking(EphemeralQueue.reset)
    delete = blocking(EphemeralQueue.delete)


class TransactionSync(TransactionOperations):
    """`queen.transaction()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, queen: Queen) -> None:
        super().__init__(queen.engine.http, queen.engine.ids)
        self._background = background

    def commit(self) -> TransactionResponse:
        """Apply the operations atomically; raises `TransactionError` or `LeaseLostError` if rejected."""
        return self._background.run(self._commit())


class DlqSync(DlqOptions):
    """`queue(...).dlq()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, query: DlqOptions) -> None:
        vars(self).update(vars(query))
        self._background = background

    def get(self) -> DLQResponse:
        """The dead letters, latest first."""
        return self._background.run(self._get())


async def _create(config: str | Sequence[str] | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Queen:
    return Queen(config, **options)

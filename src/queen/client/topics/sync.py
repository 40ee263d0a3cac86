"""`QueenSync.topic(...)`: the synchronous builder for topics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from queen.client.threads import BackgroundLoop, consume_in_threads, stop_when_set
from queen.client.topics.items import EnqueueItems, ItemRefs, TopicCounts, TopicItem
from queen.client.topics.topic import TopicBuilder, TopicDlqOptions, TopicOptions

T = TypeVar("T")


class TopicSync(TopicOptions):
    """Builder for one topic, several, or all topics of a namespace."""

    def __init__(self, background: BackgroundLoop, make_builder: Callable[[], TopicBuilder]) -> None:
        self._background = background
        self._make_builder = make_builder

    def enqueue(self, items: EnqueueItems) -> list[int]:
        """Enqueue an item or a list of items atomically; returns their ids in order. See `TopicBuilder.enqueue`."""
        return self._run(lambda builder: builder.enqueue(items))

    def dequeue(self) -> list[TopicItem]:
        """Lease up to `batch` items, with a long poll unless `wait(False)`."""
        return self._run(lambda builder: builder.dequeue())

    def consume(self, handler: Callable[[Any], object], *, signal: threading.Event | None = None) -> None:
        """Call the handler with each item (or list, if `batch` is above 1) until the limit or the idle time.

        Handlers run in a pool of `concurrency` threads. On Ctrl-C running handlers finish first.
        """
        consume_in_threads(
            self._background,
            handler,
            self._concurrency,
            signal,
            lambda call, ended: self._builder().consume(call, signal=ended),
        )

    def schedule(
        self,
        cron: str,
        data: Any = None,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        catch_up: float = 0,
        signal: threading.Event | None = None,
    ) -> None:
        """Enqueue an item at every tick until the signal is set or Ctrl-C; see `TopicBuilder.schedule`."""
        ended = asyncio.Event()
        builder = self._builder()
        running = builder.schedule(cron, data, name=name, timezone=timezone, catch_up=catch_up, signal=ended)

        async def work() -> None:
            async with stop_when_set(signal, ended):
                await running

        self._background.run(work(), stop=ended.set)

    def ack(self, items: ItemRefs) -> None:
        """Acknowledge one or several items, which removes them. Raises `LeaseLostError` if a lease has expired."""
        self._run(lambda builder: builder.ack(items))

    def nack(self, items: ItemRefs, error: str | None = None, *, dlq: bool = False) -> Any:
        """Report one or several items as failed; see `TopicBuilder.nack`."""
        return self._run(lambda builder: builder.nack(items, error, dlq=dlq))

    def extend(self, items: ItemRefs, seconds: float | None = None) -> Any:
        """Extend the leases to at least `seconds` from now; returns their expiry."""
        return self._run(lambda builder: builder.extend(items, seconds))

    def release(self, items: ItemRefs) -> None:
        """Release the leases: the items are ready again, and no retry is counted."""
        self._run(lambda builder: builder.release(items))

    def peek(self, limit: int = 10, *, delayed: bool = False, leased: bool = False) -> list[TopicItem]:
        """The next items, with `delayed` also those that are not due; with `leased` those that are leased instead."""
        return self._run(lambda builder: builder.peek(limit, delayed=delayed, leased=leased))

    def counts(self) -> TopicCounts | None:
        """Number of ready, delayed, leased and dead items, and the topic's options; None if it does not exist."""
        return self._run(lambda builder: builder.counts())

    def configure(self, **options: Any) -> dict[str, Any]:
        """Set options of the topic; see `TopicBuilder.configure`."""
        return self._run(lambda builder: builder.configure(**options))

    def purge(self) -> int:
        """Remove all items, including leased ones, but no dead letters; returns their number."""
        return self._run(lambda builder: builder.purge())

    def delete(self) -> bool:
        """Delete the topic with its items and options; False if it does not exist."""
        return self._run(lambda builder: builder.delete())

    def dlq(self) -> TopicDlqSync:
        """The dead letters of the topic."""
        return TopicDlqSync(self._background, self._builder().dlq())

    def _builder(self) -> TopicBuilder:
        """The asynchronous builder with the same options."""
        builder = self._make_builder()
        own = ("_background", "_make_builder")
        vars(builder).update({name: value for name, value in vars(self).items() if name not in own})
        return builder

    def _run(self, start: Callable[[TopicBuilder], Awaitable[T]]) -> T:
        builder = self._builder()

        async def work() -> T:
            return await start(builder)

        return self._background.run(work())


class TopicDlqSync(TopicDlqOptions):
    """`topic(...).dlq()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, query: TopicDlqOptions) -> None:
        vars(self).update(vars(query))
        self._background = background

    def get(self) -> list[TopicItem]:
        """The dead letters, oldest first."""
        return self._background.run(self._get())

    def retry(self, letters: ItemRefs | None = None) -> int:
        """Redeliver these dead letters, or all that `get()` returns; returns their number."""
        return self._background.run(self._retry(letters))

    def delete(self, letters: ItemRefs | None = None) -> int:
        """Delete these dead letters, or all that `get()` returns; returns their number."""
        return self._background.run(self._delete(letters))

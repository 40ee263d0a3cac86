"""`QueenSync.topic(...)`: the grammar of topics without `await`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from queen.client.threads import BackgroundLoop, consume_in_threads, watched
from queen.client.topics.items import Enqueued, GivenItems, TopicCounts, TopicItem
from queen.client.topics.topic import TopicBuilder, TopicDlqOptions, TopicOptions

if TYPE_CHECKING:
    from queen.client.client import Queen

T = TypeVar("T")


class TopicSync(TopicOptions):
    """One topic of a namespace, several, or all; and what has been said about it."""

    def __init__(self, background: BackgroundLoop, queen: Queen, namespace: str, names: Sequence[str]) -> None:
        self._background = background
        self._queen = queen
        self._namespace = namespace
        self._names = names

    def enqueue(self, items: Enqueued) -> list[int]:
        """Store an item or a list of them, all or none; their ids in order. See `TopicBuilder.enqueue`."""
        return self._awaited(lambda builder: builder.enqueue(items))

    def dequeue(self) -> list[TopicItem]:
        """Lease up to `batch` items, now or as soon as there are any; nobody else gets them until the lease ends."""
        return self._awaited(lambda builder: builder.dequeue())

    def consume(self, handler: Callable[[Any], object], *, signal: threading.Event | None = None) -> None:
        """Call the handler with each item (or list, when `batch` is above 1) until the limit or the idle time.

        The handler runs in a thread, `concurrency` of them at a time. Ctrl-C lets those that have begun finish.
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
        """Enqueue an item at every tick, until the signal or Ctrl-C; see `TopicBuilder.schedule`."""
        ended = asyncio.Event()
        builder = self._builder()
        running = builder.schedule(cron, data, name=name, timezone=timezone, catch_up=catch_up, signal=ended)

        async def work() -> None:
            async with watched(signal, ended):
                await running

        self._background.run(work(), stop=ended.set)

    def ack(self, items: GivenItems) -> None:
        """An item or many are done, and gone for good. Raises `LeaseLostError` where a lease was lost."""
        self._awaited(lambda builder: builder.ack(items))

    def nack(self, items: GivenItems, error: str | None = None) -> Any:
        """An item or many failed: they are retried later, or become dead letters; what became of each."""
        return self._awaited(lambda builder: builder.nack(items, error))

    def extend(self, items: GivenItems, seconds: float | None = None) -> Any:
        """Let leases live for at least so many seconds from now; until when."""
        return self._awaited(lambda builder: builder.extend(items, seconds))

    def release(self, items: GivenItems) -> None:
        """End leases: the items are ready as before, for anybody, and have not failed."""
        self._awaited(lambda builder: builder.release(items))

    def peek(self, limit: int = 10, *, delayed: bool = False) -> list[TopicItem]:
        """The next items, which stay where they are; with `delayed` also those that are not due."""
        return self._awaited(lambda builder: builder.peek(limit, delayed=delayed))

    def counts(self) -> TopicCounts | None:
        """How many items are ready, delayed, leased and dead, and the topic's options; None when there is no topic."""
        return self._awaited(lambda builder: builder.counts())

    def configure(self, **options: Any) -> dict[str, Any]:
        """Set options; what is not named stays, None is the default. See `TopicBuilder.configure`."""
        return self._awaited(lambda builder: builder.configure(**options))

    def purge(self) -> int:
        """Remove all items, leased ones too; dead letters and options stay. How many they were."""
        return self._awaited(lambda builder: builder.purge())

    def delete(self) -> bool:
        """Delete the topic with all that is in it; False when there is none."""
        return self._awaited(lambda builder: builder.delete())

    def dlq(self) -> TopicDlqSync:
        """The dead letters of the topic."""
        return TopicDlqSync(self._background, self._builder().dlq())

    def _builder(self) -> TopicBuilder:
        """The same sentence for the client that is awaited."""
        builder = self._queen.topic(self._namespace, *self._names)
        own = ("_background", "_queen", "_namespace", "_names")
        vars(builder).update({name: value for name, value in vars(self).items() if name not in own})
        return builder

    def _awaited(self, begin: Callable[[TopicBuilder], Awaitable[T]]) -> T:
        builder = self._builder()

        async def work() -> T:
            return await begin(builder)

        return self._background.run(work())


class TopicDlqSync(TopicDlqOptions):
    """`topic(...).dlq()` of `QueenSync`."""

    def __init__(self, background: BackgroundLoop, query: TopicDlqOptions) -> None:
        vars(self).update(vars(query))
        self._background = background

    def get(self) -> list[TopicItem]:
        """The dead letters, the oldest first."""
        return self._background.run(self._get())

    def retry(self, letters: GivenItems | None = None) -> int:
        """Make these, or those that `get()` would give, ready items again; how many."""
        return self._background.run(self._retry(letters))

    def delete(self, letters: GivenItems | None = None) -> int:
        """Throw these, or those that `get()` would give, away; how many."""
        return self._background.run(self._delete(letters))

"""`queen.topic(namespace, name)`: the fluent grammar of topics ends in one of these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any, Self, TypeVar, overload

import msgspec

from queen.client.acks import AckResult
from queen.client.config import ClientLog
from queen.client.consumer import ConsumeOptions, Consumer
from queen.client.engine import Engine
from queen.client.errors import QueenError
from queen.client.http import decode_as
from queen.client.queue import ConsumeWords
from queen.client.topics.calls import PATH, TopicCalls, TopicSource, refs_of
from queen.client.topics.items import (
    Enqueued,
    GivenItem,
    GivenItems,
    NackResponse,
    TopicCounts,
    TopicHandler,
    TopicItem,
    checked_time,
    decode_items,
    wire_items,
)
from queen.client.topics.schedule import Schedule
from queen.client.types import Deferred


class ItemOptions:
    """What has been said about items to enqueue."""

    # Defaults live on the class: a builder is made for every enqueue, and sets only what is said.
    _item: Mapping[str, Any] = {}
    _make_keys = True

    def priority(self, number: int) -> Self:
        """The urgency of items: lower is served first, 0 by default."""
        return self._say(priority=number)

    def deliver_after(self, moment: datetime | str | None) -> Self:
        """Nobody gets the items before this time; a datetime needs its time zone. The last word on time counts."""
        return self._say(deliver_after=checked_time(moment), delay=None)

    def delay(self, seconds: float) -> Self:
        """Nobody gets the items for so many seconds."""
        return self._say(delay=seconds, deliver_after=None)

    def ttl(self, seconds: float) -> Self:
        """Items that nobody took so many seconds after they were due are removed."""
        return self._say(ttl=seconds)

    def metadata(self, values: Mapping[str, Any]) -> Self:
        """A JSON object that goes along with items."""
        return self._say(metadata=dict(values))

    def idempotency_key(self, key: str | None) -> Self:
        """However often an item with this key is enqueued to the namespace, it is one item.

        Where nothing is said, the client makes a key, and an enqueue whose answer was lost is repeated without harm.
        None: there is to be no key, which costs the server less, and such an enqueue is not repeated.
        """
        self._make_keys = key is not None
        return self._say(idempotency_key=key)

    def _say(self, **words: Any) -> Self:
        said = {**self._item, **words}
        self._item = {name: value for name, value in said.items() if value is not None}
        return self


class TopicOptions(ConsumeWords, ItemOptions):
    """What has been said about a topic, or about several."""

    _lease: float | None = None
    _auto_ack = True
    _renew_lease = True

    def lease(self, seconds: float) -> Self:
        """How long dequeued items are leased; where nothing is said, the topic's `lease_seconds` (30)."""
        self._lease = seconds
        return self

    def auto_ack(self, enabled: bool = True) -> Self:
        """Whether `consume` settles items as the handler turns out; topics that deliver at most once need it off."""
        self._auto_ack = enabled
        return self

    def renew_lease(self, enabled: bool = True) -> Self:
        """Whether leases are extended while the handler works; they are."""
        self._renew_lease = enabled
        return self

    def _consume_options(self) -> ConsumeOptions:
        return ConsumeOptions(
            batch=self._batch,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            concurrency=self._concurrency,
            limit=self._limit,
            idle_millis=self._idle_millis,
            auto_ack=self._auto_ack,
            each=self._each,
            renew_lease=self._renew_lease,
        )


_SHORTEST_PAUSE = 0.05


class TopicDeliveries:
    """What a consumer of topics fetches and settles."""

    def __init__(
        self, calls: TopicCalls, source: TopicSource, lease: float | None, wait: bool, renew: bool, log: ClientLog
    ) -> None:
        self._calls = calls
        self._source = source
        self._lease = lease
        self._wait = wait
        self._renew = renew
        self._log = log

    async def fetch(self, batch: int, timeout_millis: int) -> list[TopicItem]:
        return await self._calls.dequeue(
            self._source, batch, timeout_millis if self._wait else None, self._lease, attempts=1
        )

    async def settle(self, delivered: Sequence[TopicItem], error: str | None) -> list[AckResult]:
        refs = refs_of(delivered, self._source)
        if error is None:
            return [*await self._calls.settle("ack", refs, attempts=1)]
        return [*await self._calls.settle("nack", [{**ref, "error": error} for ref in refs], attempts=1)]

    async def give_back(self, delivered: Sequence[TopicItem]) -> None:
        await self._calls.settle("release", refs_of(delivered, self._source), attempts=1)

    def keeping(self, delivered: Sequence[TopicItem]) -> AbstractAsyncContextManager[None]:
        return self._keeping(delivered) if self._renew else nullcontext()

    def lane(self, delivered: TopicItem) -> str | None:
        return None

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def _keeping(self, delivered: Sequence[TopicItem]) -> AsyncIterator[None]:
        task = asyncio.create_task(self._extend(delivered))
        try:
            yield
        finally:
            task.cancel()

    async def _extend(self, delivered: Sequence[TopicItem]) -> None:
        """Three times in a lease, so that one extension may fail and the next still comes in time."""
        refs = refs_of(delivered, self._source)
        pause = max(_SHORTEST_PAUSE, min(map(lease_seconds, delivered)) / 3)
        while refs:
            await asyncio.sleep(pause)
            try:
                results = await self._calls.settle("extend", [self._extension(ref) for ref in refs])
            except QueenError as error:
                self._log.warning("Consumer.renew", f"the leases of {len(refs)} items were not extended: {error}")
                continue
            kept = [ref for ref, result in zip(refs, results, strict=True) if result.success]
            if len(kept) < len(refs):
                # Some may be settled by now; for a lease that is lost, the ack that will be refused is what counts.
                self._log.info("Consumer.renew", settled_or_lost=len(refs) - len(kept))
            refs = kept

    def _extension(self, ref: dict[str, Any]) -> dict[str, Any]:
        return ref if self._lease is None else {**ref, "seconds": self._lease}


def lease_seconds(item: TopicItem) -> float:
    """How long an item was leased for, by the clock of the server."""
    until, since = item["lease_expires_at"], item["updated_at"]
    assert until is not None
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()


class TopicDlqOptions:
    """Which dead letters of a topic, the oldest first."""

    def __init__(self, calls: TopicCalls, source: TopicSource) -> None:
        self._calls = calls
        self._source = source
        self._limit = 100
        self._offset = 0

    def limit(self, count: int) -> Self:
        """At most so many."""
        self._limit = max(1, count)
        return self

    def offset(self, count: int) -> Self:
        """Leave out the first."""
        self._offset = max(0, count)
        return self

    async def _get(self) -> list[TopicItem]:
        answer = await self._calls.get_raw(
            "/dlq",
            namespace=self._source.namespace,
            topic=self._source.names[0],
            limit=self._limit,
            offset=self._offset,
        )
        return decode_items(answer.body)

    async def _retry(self, letters: GivenItems | None) -> int:
        return await self._each("dlq/retry", letters)

    async def _delete(self, letters: GivenItems | None) -> int:
        return await self._each("dlq/delete", letters)

    async def _each(self, verb: str, letters: GivenItems | None) -> int:
        chosen = await self._get() if letters is None else letters
        return len(await self._calls.settle_all(verb, refs_of(chosen, self._source)))


class TopicDlq(TopicDlqOptions):
    """`topic(...).dlq()`: look at dead letters, send them round again, or throw them away."""

    async def get(self) -> list[TopicItem]:
        """The dead letters."""
        return await self._get()

    async def retry(self, letters: GivenItems | None = None) -> int:
        """Make these, or those that `get()` would give, ready items again, as if they had never failed; how many.

        Raises `NotFoundError` when one of them is no dead letter; the others are ready then.
        """
        return await self._retry(letters)

    async def delete(self, letters: GivenItems | None = None) -> int:
        """Throw these, or those that `get()` would give, away; how many. Raises as `retry` does."""
        return await self._delete(letters)


R = TypeVar("R")

_counts = msgspec.json.Decoder(list[TopicCounts])


class TopicBuilder(TopicOptions):
    """One topic of a namespace, several, or (without a name) all; and what has been said about it.

    Words change the builder itself. Everything raises `RequestError` or one of its kinds when it fails.
    """

    def __init__(self, engine: Engine, namespace: str, names: Sequence[str]) -> None:
        self._engine = engine
        self._source = TopicSource(namespace, tuple(names))
        self._calls = TopicCalls(engine.http)

    async def enqueue(self, items: Enqueued) -> list[int]:
        """Store an item or a list of them, all or none; their ids in order.

        An item is any JSON value, or bytes, or a dict with `data` (or `payload`, bytes) and perhaps its own `priority`,
        `deliver_after`, `delay`, `ttl`, `metadata` and `idempotency_key`. A duplicate has the id of the first.
        """
        return await self._calls.enqueue(self._wire_items(items, "enqueue"))

    async def dequeue(self) -> list[TopicItem]:
        """Lease up to `batch` items, now or as soon as there are any; nobody else gets them until the lease ends."""
        millis = self._timeout_millis if self._wait else None
        return await self._calls.dequeue(self._source, self._batch, millis, self._lease)

    def consume(self, handler: TopicHandler, *, signal: asyncio.Event | None = None) -> ConsumeTopic:
        """Call the handler with each item, or each list of them when `batch` is above 1; awaited, it runs.

        A handler that returns has its items acknowledged; those of one that raises are retried, and become dead letters
        when the retries are used up. Leases are extended while it works. Set `signal` to end.
        """
        return ConsumeTopic(self._engine, handler, self._deliveries(), self._consume_options(), signal)

    def schedule(
        self,
        cron: str,
        data: Any = None,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        catch_up: float = 0,
        signal: asyncio.Event | None = None,
    ) -> Schedule:
        """Enqueue an item at every tick of a cron expression; awaited, it runs.

        Clients that run a schedule of the same `name` (the topic and the expression, where none is given) enqueue each
        tick once between them. Ticks while none of them ran are missed, save those of the last `catch_up` seconds.
        """
        topic = self._one("schedule")
        (item,) = wire_items([data], self._item, self._where("schedule"), None)
        if any(item.get(word) for word in ("deliver_after", "delay", "idempotency_key")):
            raise ValueError("the ticks of a schedule say when items are due and what their keys are: leave that out")
        called = name if name is not None else f"{topic} {cron} {timezone}"
        return Schedule(self._calls, self._engine.log, cron, item, called, timezone, catch_up, signal)

    async def ack(self, items: GivenItems) -> None:
        """An item or many are done, and gone for good. Raises `LeaseLostError` where a lease was lost."""
        await self._calls.settle_all("ack", refs_of(items, self._source))

    @overload
    async def nack(self, items: GivenItem, error: str | None = None) -> NackResponse: ...

    @overload
    async def nack(self, items: GivenItems, error: str | None = None) -> NackResponse | list[NackResponse]: ...

    async def nack(self, items: GivenItems, error: str | None = None) -> NackResponse | list[NackResponse]:
        """An item or many failed: they are retried later, or become dead letters; what became of each."""
        refs = [{**ref, "error": error} for ref in refs_of(items, self._source)]
        answers: list[NackResponse] = [
            {"dlq": one.dlq, "retry_in_seconds": one.retry_in_seconds}
            for one in await self._calls.settle_all("nack", refs)
        ]
        return _as_given(items, answers)

    @overload
    async def extend(self, items: GivenItem, seconds: float | None = None) -> str: ...

    @overload
    async def extend(self, items: GivenItems, seconds: float | None = None) -> str | list[str]: ...

    async def extend(self, items: GivenItems, seconds: float | None = None) -> str | list[str]:
        """Let leases live for at least so many seconds from now (or what was said, or the topic has); until when."""
        seconds = self._lease if seconds is None else seconds
        refs = [{**ref, "seconds": seconds} for ref in refs_of(items, self._source)]
        ends = [one.lease_expires_at for one in await self._calls.settle_all("extend", refs)]
        return _as_given(items, ends)

    async def release(self, items: GivenItems) -> None:
        """End leases: the items are ready as before, for anybody, and have not failed."""
        await self._calls.settle_all("release", refs_of(items, self._source))

    async def peek(self, limit: int = 10, *, delayed: bool = False) -> list[TopicItem]:
        """The next items, which stay where they are; with `delayed` also those that are not due."""
        answer = await self._calls.get_raw(
            "/peek", **self._where("peek"), limit=limit, delayed="true" if delayed else None
        )
        return decode_items(answer.body)

    async def counts(self) -> TopicCounts | None:
        """How many items are ready, delayed, leased and dead, and the topic's options; None when there is no topic."""
        found = decode_as(_counts, (await self._calls.get_raw("/counts", **self._where("counts"))).body)
        return found[0] if found else None

    async def configure(self, **options: Any) -> dict[str, Any]:
        """Set `max_retries`, `backoff_base_ms`, `backoff_cap_ms`, `lease_seconds`, `at_most_once`, `ttl_seconds`.

        What is not named stays, None is the default; all options come back. The topic is made if need be.
        """
        body = {**self._where("configure"), "options": options}
        answer: dict[str, Any] = (await self._engine.http.request("POST", f"{PATH}/configure", body))["options"]
        return answer

    async def purge(self) -> int:
        """Remove all items, leased ones too; dead letters and options stay. How many they were."""
        body = self._where("purge")
        removed: int = (await self._engine.http.request("POST", f"{PATH}/purge", body))["removed"]
        return removed

    async def delete(self) -> bool:
        """Delete the topic with all that is in it; False when there is none."""
        path = TopicSource(self._source.namespace, (self._one("delete"),)).address
        deleted: bool = (await self._engine.http.request("DELETE", f"{PATH}?{path}"))["deleted"]
        return deleted

    def dlq(self) -> TopicDlq:
        """The dead letters of the topic."""
        self._one("dlq")
        return TopicDlq(self._calls, self._source)

    def _wire_items(self, items: Enqueued, operation: str) -> list[dict[str, Any]]:
        ids = self._engine.ids if self._make_keys else None
        return wire_items(items, self._item, self._where(operation), ids)

    def _deliveries(self) -> TopicDeliveries:
        return TopicDeliveries(self._calls, self._source, self._lease, self._wait, self._renew_lease, self._engine.log)

    def _where(self, operation: str) -> dict[str, str]:
        return {"namespace": self._source.namespace, "topic": self._one(operation)}

    def _one(self, operation: str) -> str:
        if len(self._source.names) != 1:
            raise ValueError(f"{operation} is about one topic: queen.topic('namespace', 'topic').{operation}(...)")
        return self._source.names[0]


class ConsumeTopic(Deferred[None]):
    """A consumer that runs when it is awaited."""

    def __init__(
        self,
        engine: Engine,
        handler: TopicHandler,
        deliveries: TopicDeliveries,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
    ) -> None:
        if not callable(handler):
            raise TypeError(f"consume takes a function of an item, not {type(handler).__name__}")
        self._engine = engine
        self._handler = handler
        self._deliveries = deliveries
        self._options = options
        self._signal = signal

    def __await__(self) -> Generator[Any, None, None]:
        """Consume until the limit, the idle time, the signal, SIGTERM, or `close()` of the client."""
        consumer = Consumer(self._deliveries, self._handler, self._options, self._engine.http, self._engine.log)
        return self._engine.run(consumer, self._signal).__await__()


def _as_given(items: GivenItems, answers: list[R]) -> R | list[R]:
    """One answer for one item, a list for many."""
    return answers[0] if isinstance(items, int | Mapping) else answers

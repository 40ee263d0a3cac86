"""`queen.topic(namespace, name)`: the fluent grammar of topics ends in one of these."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec

from queen.client.consumer import ConsumeOptions, Consumer
from queen.client.engine import Engine
from queen.client.http import decode_as
from queen.client.topics.calls import PATH, TopicCalls, TopicSource, refs_of
from queen.client.topics.deliveries import TopicDeliveries
from queen.client.topics.dlq import TopicDlq
from queen.client.topics.items import (
    Enqueued,
    GivenItem,
    GivenItems,
    NackResponse,
    TopicCounts,
    TopicHandler,
    TopicItem,
    decode_items,
    wire_items,
)
from queen.client.topics.options import TopicOptions
from queen.client.topics.schedule import Schedule

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


class ConsumeTopic:
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

"""`queen.topic(namespace, name)`: the builder for topics and its operations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any, Self, TypeVar, overload

import msgspec

from queen.client.config import ClientLog
from queen.client.consume.acks import AckResult
from queen.client.consume.consumer import ConsumeOptions, Consumer
from queen.client.engine import Engine
from queen.client.errors import QueenError
from queen.client.http import decode_as
from queen.client.queue import FetchOptions
from queen.client.topics.calls import PATH, TopicCalls, TopicSource, refs_of
from queen.client.topics.items import (
    EnqueueItems,
    ItemRef,
    ItemRefs,
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
    """Builder options of items to enqueue."""

    # Defaults are class attributes: a builder is created for every enqueue, and sets only what differs.
    _item: Mapping[str, Any] = {}
    _make_keys = True

    def priority(self, number: int) -> Self:
        """Priority of items: lower values are delivered first; default 0."""
        return self._set(priority=number)

    def deliver_after(self, moment: datetime | str | None) -> Self:
        """Deliver the items no sooner than this time; a datetime needs a time zone. Replaces `delay`."""
        return self._set(deliver_after=checked_time(moment), delay=None)

    def delay(self, seconds: float) -> Self:
        """Deliver the items no sooner than in this many seconds. Replaces `deliver_after`."""
        return self._set(delay=seconds, deliver_after=None)

    def ttl(self, seconds: float) -> Self:
        """Items expire this many seconds after they are due, if they have not been dequeued."""
        return self._set(ttl=seconds)

    def metadata(self, values: Mapping[str, Any]) -> Self:
        """A JSON object stored with the items."""
        return self._set(metadata=dict(values))

    def idempotency_key(self, key: str | None) -> Self:
        """Deduplicate: a second item with this key in the namespace is not stored.

        By default the client generates a key, so that an enqueue whose response was lost can be retried. None: no key,
        which costs the server less; such an enqueue is not retried.
        """
        self._make_keys = key is not None
        return self._set(idempotency_key=key)

    def _set(self, **options: Any) -> Self:
        merged = {**self._item, **options}
        self._item = {name: value for name, value in merged.items() if value is not None}
        return self


class TopicOptions(FetchOptions, ItemOptions):
    """Builder options of topics."""

    _lease: float | None = None
    _auto_ack = True
    _renew_lease = True

    def lease(self, seconds: float) -> Self:
        """Lease time of dequeued items; the default is the topic's `lease_seconds` (30)."""
        self._lease = seconds
        return self

    def auto_ack(self, enabled: bool = True) -> Self:
        """Whether `consume` acks or nacks items after the handler; must be off for at-most-once topics."""
        self._auto_ack = enabled
        return self

    def renew_lease(self, enabled: bool = True) -> Self:
        """Whether leases are renewed while the handler runs; default True."""
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


_MIN_INTERVAL_SECONDS = 0.05


class TopicDeliveries:
    """Topics as the source of a consumer."""

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

    async def settle(self, delivered: Sequence[TopicItem], error: str | None, *, dead: bool = False) -> list[AckResult]:
        refs = refs_of(delivered, self._source)
        if error is None:
            return [*await self._calls.settle("ack", refs, attempts=1)]
        return [*await self._calls.settle("nack", _failed(refs, error, dead), attempts=1)]

    async def release_leases(self, delivered: Sequence[TopicItem]) -> None:
        await self._calls.settle("release", refs_of(delivered, self._source), attempts=1)

    def renewing(self, delivered: Sequence[TopicItem]) -> AbstractAsyncContextManager[None]:
        return self._renewing(delivered) if self._renew else nullcontext()

    def order_key(self, delivered: TopicItem) -> str | None:
        return None

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def _renewing(self, delivered: Sequence[TopicItem]) -> AsyncIterator[None]:
        task = asyncio.create_task(self._extend(delivered))
        try:
            yield
        finally:
            task.cancel()

    async def _extend(self, delivered: Sequence[TopicItem]) -> None:
        """Renew three times per lease time, so that a single failure does not lose the lease."""
        refs = refs_of(delivered, self._source)
        pause = max(_MIN_INTERVAL_SECONDS, min(map(lease_seconds, delivered)) / 3)
        while refs:
            await asyncio.sleep(pause)
            try:
                results = await self._calls.settle("extend", [self._extension(ref) for ref in refs])
            except QueenError as error:
                self._log.warning("Consumer.renew", f"lease renewal of {len(refs)} items failed: {error}")
                continue
            kept = [ref for ref, result in zip(refs, results, strict=True) if result.success]
            if len(kept) < len(refs):
                # Some may be settled by now; a lost lease is reported by the ack.
                self._log.info("Consumer.renew", settled_or_lost=len(refs) - len(kept))
            refs = kept

    def _extension(self, ref: dict[str, Any]) -> dict[str, Any]:
        return ref if self._lease is None else {**ref, "seconds": self._lease}


def lease_seconds(item: TopicItem) -> float:
    """Lease time of an item, by the server's clock."""
    until, since = item["lease_expires_at"], item["updated_at"]
    assert until is not None
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()


class TopicDlqOptions:
    """Options of a query of dead letters, oldest first."""

    def __init__(self, calls: TopicCalls, source: TopicSource) -> None:
        self._calls = calls
        self._source = source
        self._limit = 100
        self._offset = 0

    def limit(self, count: int) -> Self:
        """Maximum number of dead letters; default 100."""
        self._limit = max(1, count)
        return self

    def offset(self, count: int) -> Self:
        """Skip the first dead letters."""
        self._offset = max(0, count)
        return self

    async def _get(self) -> list[TopicItem]:
        response = await self._calls.get_raw(
            "/dlq",
            namespace=self._source.namespace,
            topic=self._source.names[0],
            limit=self._limit,
            offset=self._offset,
        )
        return decode_items(response.body)

    async def _retry(self, letters: ItemRefs | None) -> int:
        return await self._each("dlq/retry", letters)

    async def _delete(self, letters: ItemRefs | None) -> int:
        return await self._each("dlq/delete", letters)

    async def _each(self, verb: str, letters: ItemRefs | None) -> int:
        chosen = await self._get() if letters is None else letters
        return len(await self._calls.settle_all(verb, refs_of(chosen, self._source)))


class TopicDlq(TopicDlqOptions):
    """`topic(...).dlq()`: list, redeliver or delete dead letters."""

    async def get(self) -> list[TopicItem]:
        """The dead letters."""
        return await self._get()

    async def retry(self, letters: ItemRefs | None = None) -> int:
        """Redeliver these dead letters, or all that `get()` returns; returns their number.

        Raises `NotFoundError` if one of them is not a dead letter; the others are redelivered.
        """
        return await self._retry(letters)

    async def delete(self, letters: ItemRefs | None = None) -> int:
        """Delete these dead letters, or all that `get()` returns; returns their number. Raises as `retry`."""
        return await self._delete(letters)


R = TypeVar("R")

_counts = msgspec.json.Decoder(list[TopicCounts])


class TopicBuilder(TopicOptions):
    """Builder for one topic of a namespace, several, or (without a name) all.

    Its methods change it and return it. Operations raise `RequestError`.
    """

    def __init__(self, engine: Engine, namespace: str, names: Sequence[str]) -> None:
        self._engine = engine
        self._source = TopicSource(namespace, tuple(names))
        self._calls = TopicCalls(engine.http)

    async def enqueue(self, items: EnqueueItems) -> list[int]:
        """Enqueue an item or a list of items atomically; returns their ids in order.

        An item is any JSON value, or bytes, or a dict with `data` (or `payload`, bytes) and optionally `priority`,
        `deliver_after`, `delay`, `ttl`, `metadata` and `idempotency_key`. A duplicate returns the id of the first.
        """
        return await self._calls.enqueue(self._wire_items(items, "enqueue"))

    async def dequeue(self) -> list[TopicItem]:
        """Lease up to `batch` items, with a long poll unless `wait(False)`."""
        millis = self._timeout_millis if self._wait else None
        return await self._calls.dequeue(self._source, self._batch, millis, self._lease)

    def consume(self, handler: TopicHandler, *, signal: asyncio.Event | None = None) -> ConsumeTopic:
        """Call the handler with each item, or with lists if `batch` is above 1; runs when awaited.

        Items are acknowledged when the handler returns. When it raises they are retried, and become dead letters after
        `max_retries`. Leases are renewed while it runs. Set `signal` to stop.
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
        """Enqueue an item at every tick of a cron expression; runs when awaited.

        Ticks are deduplicated across clients by `name` (default: topic, expression and time zone). Ticks while no
        client runs are skipped, except those of the last `catch_up` seconds.
        """
        topic = self._one("schedule")
        (item,) = wire_items([data], self._item, self._where("schedule"), None)
        if any(item.get(name) for name in ("deliver_after", "delay", "idempotency_key")):
            raise ValueError("a schedule sets deliver_after and idempotency_key itself: remove them")
        schedule_name = name if name is not None else f"{topic} {cron} {timezone}"
        return Schedule(self._calls, self._engine.log, cron, item, schedule_name, timezone, catch_up, signal)

    async def ack(self, items: ItemRefs) -> None:
        """Acknowledge one or several items, which removes them. Raises `LeaseLostError` if a lease has expired."""
        await self._calls.settle_all("ack", refs_of(items, self._source))

    @overload
    async def nack(self, items: ItemRef, error: str | None = None, *, dlq: bool = False) -> NackResponse: ...

    @overload
    async def nack(
        self, items: ItemRefs, error: str | None = None, *, dlq: bool = False
    ) -> NackResponse | list[NackResponse]: ...

    async def nack(
        self, items: ItemRefs, error: str | None = None, *, dlq: bool = False
    ) -> NackResponse | list[NackResponse]:
        """Report one or several items as failed: they are retried with backoff, or become dead letters.

        With `dlq` they are dead letters at once.
        """
        refs = _failed(refs_of(items, self._source), error, dlq)
        responses: list[NackResponse] = [
            {"dlq": one.dlq, "retry_in_seconds": one.retry_in_seconds}
            for one in await self._calls.settle_all("nack", refs)
        ]
        return _as_given(items, responses)

    @overload
    async def extend(self, items: ItemRef, seconds: float | None = None) -> str: ...

    @overload
    async def extend(self, items: ItemRefs, seconds: float | None = None) -> str | list[str]: ...

    async def extend(self, items: ItemRefs, seconds: float | None = None) -> str | list[str]:
        """Extend the leases to at least `seconds` from now (default: `lease()`, or the topic's); returns the expiry."""
        seconds = self._lease if seconds is None else seconds
        refs = [{**ref, "seconds": seconds} for ref in refs_of(items, self._source)]
        ends = [one.lease_expires_at for one in await self._calls.settle_all("extend", refs)]
        return _as_given(items, ends)

    async def release(self, items: ItemRefs) -> None:
        """Release the leases: the items are ready again, and no retry is counted."""
        await self._calls.settle_all("release", refs_of(items, self._source))

    async def peek(self, limit: int = 10, *, delayed: bool = False, leased: bool = False) -> list[TopicItem]:
        """The next items, with `delayed` also those that are not due; with `leased` those that are leased instead."""
        flags = {name: "true" for name, on in (("delayed", delayed), ("leased", leased)) if on}
        response = await self._calls.get_raw("/peek", **self._where("peek"), limit=limit, **flags)
        return decode_items(response.body)

    async def counts(self) -> TopicCounts | None:
        """Number of ready, delayed, leased and dead items, and the topic's options; None if it does not exist."""
        found = decode_as(_counts, (await self._calls.get_raw("/counts", **self._where("counts"))).body)
        return found[0] if found else None

    async def configure(self, **options: Any) -> dict[str, Any]:
        """Set `max_retries`, `backoff_base_ms`, `backoff_cap_ms`, `lease_seconds`, `at_most_once`, `ttl_seconds`.

        Options not named stay, None resets to the default; returns all options. Creates the topic if necessary.
        """
        body = {**self._where("configure"), "options": options}
        response: dict[str, Any] = (await self._engine.http.request("POST", f"{PATH}/configure", body))["options"]
        return response

    async def purge(self) -> int:
        """Remove all items, including leased ones, but no dead letters; returns their number."""
        body = self._where("purge")
        removed: int = (await self._engine.http.request("POST", f"{PATH}/purge", body))["removed"]
        return removed

    async def delete(self) -> bool:
        """Delete the topic with its items and options; False if it does not exist."""
        path = TopicSource(self._source.namespace, (self._one("delete"),)).address
        deleted: bool = (await self._engine.http.request("DELETE", f"{PATH}?{path}"))["deleted"]
        return deleted

    def dlq(self) -> TopicDlq:
        """The dead letters of the topic."""
        self._one("dlq")
        return TopicDlq(self._calls, self._source)

    def _wire_items(self, items: EnqueueItems, operation: str) -> list[dict[str, Any]]:
        ids = self._engine.ids if self._make_keys else None
        return wire_items(items, self._item, self._where(operation), ids)

    def _deliveries(self) -> TopicDeliveries:
        return TopicDeliveries(self._calls, self._source, self._lease, self._wait, self._renew_lease, self._engine.log)

    def _where(self, operation: str) -> dict[str, str]:
        return {"namespace": self._source.namespace, "topic": self._one(operation)}

    def _one(self, operation: str) -> str:
        if len(self._source.names) != 1:
            raise ValueError(f"{operation} needs exactly one topic: queen.topic('namespace', 'topic').{operation}(...)")
        return self._source.names[0]


class ConsumeTopic(Deferred[None]):
    """A consumer of topics; runs when awaited."""

    def __init__(
        self,
        engine: Engine,
        handler: TopicHandler,
        deliveries: TopicDeliveries,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
    ) -> None:
        if not callable(handler):
            raise TypeError(f"handler must be a function of an item, not {type(handler).__name__}")
        self._engine = engine
        self._handler = handler
        self._deliveries = deliveries
        self._options = options
        self._signal = signal

    def __await__(self) -> Generator[Any, None, None]:
        """Consume until the limit, the idle time, the signal, SIGTERM, or `close()` of the client."""
        consumer = Consumer(self._deliveries, self._handler, self._options, self._engine.http, self._engine.log)
        return self._engine.run(consumer, self._signal).__await__()


def _failed(refs: Sequence[Mapping[str, Any]], error: str | None, dead: bool) -> list[dict[str, Any]]:
    """Items of a nack."""
    return [{**ref, "error": error, "dlq": dead} if dead else {**ref, "error": error} for ref in refs]


def _as_given(items: ItemRefs, responses: list[R]) -> R | list[R]:
    """A single result for a single item, a list for several."""
    return responses[0] if isinstance(items, int | Mapping) else responses

"""The loop behind `consume()`: fetch, call the handler, acknowledge."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from queen.client.config import ClientLog
from queen.client.consume.acks import COMPLETED, DEAD, FAILED, RENEWAL_SECONDS, RETRY, Ack, AckResult, lease_ids
from queen.client.consume.transport import Transport
from queen.client.errors import TRANSIENT, DeadLetterError, LeaseLostError, QueenError, RequestError, text_of_error
from queen.client.http import HttpClient
from queen.client.types import QUEUE_MODE, Message, TraceConfig

# The shortest possible lease is one second; a renewal extends it to a minute.
_FIRST_RENEWAL_SECONDS = 0.5
_DEFAULT_INTERVAL_SECONDS = 20.0


class Renewal:
    """Renews leases every `interval_millis`; by default after 0.5 s and then every 20 s."""

    def __init__(self, transport: Transport, interval_millis: int | None, log: ClientLog) -> None:
        self._transport = transport
        self._log = log
        self._first = interval_millis / 1000 if interval_millis else _FIRST_RENEWAL_SECONDS
        self._interval = interval_millis / 1000 if interval_millis else _DEFAULT_INTERVAL_SECONDS
        # A single failed renewal must not lose the lease.
        self._seconds = max(RENEWAL_SECONDS, 3 * self._interval)

    @asynccontextmanager
    async def renewing(self, messages: Sequence[Message]) -> AsyncIterator[None]:
        """Renew the leases of these messages while the block runs."""
        leases = lease_ids(messages)
        task = asyncio.create_task(self._renew(leases))
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, leases: list[str]) -> None:
        pause = self._first
        while leases:
            await asyncio.sleep(pause)
            pause = self._interval
            for lease in list(leases):
                try:
                    await self._transport.renew(lease, self._seconds)
                except LeaseLostError as error:
                    leases.remove(lease)
                    self._log.warning("Consumer.renew", f"lease {lease} lost, its messages are redelivered: {error}")
                except QueenError as error:
                    self._log.warning("Consumer.renew", f"renewal of lease {lease} failed: {error}")


M = TypeVar("M")


class Deliveries(Protocol[M]):
    """The source of a consumer, shared by its workers. Raises `RequestError`; the consumer retries."""

    async def fetch(self, batch: int, timeout_millis: int) -> list[M]:
        """Lease up to `batch` messages; empty after the timeout."""
        ...

    async def settle(self, delivered: Sequence[M], error: str | None, *, dead: bool = False) -> list[AckResult]:
        """Acknowledge messages as completed, or as failed with an error (for good if `dead`); results in that order."""
        ...

    async def release_leases(self, delivered: Sequence[M]) -> None:
        """Release the leases of messages that will not be handled."""
        ...

    def renewing(self, delivered: Sequence[M]) -> AbstractAsyncContextManager[None]:
        """Renew the leases while a block runs, if enabled."""
        ...

    def order_key(self, delivered: M) -> str | None:
        """Messages with the same key stay in order: after one fails, later ones are not handled. None: unordered."""
        ...

    async def close(self) -> None:
        """Called when the consumer has stopped."""
        ...


_NO_DATA = "Invalid trace config: requires { data: {...} }"


class Tracer:
    """Records trace events of the messages of one consumer."""

    def __init__(self, http: HttpClient, log: ClientLog, group: str | None) -> None:
        self._http = http
        self._log = log
        self._group = group or QUEUE_MODE

    def attach(self, messages: list[Message]) -> None:
        """Set `trace` of each message."""
        for message in messages:
            message["trace"] = MessageTrace(self, message["transactionId"], message["partitionId"])

    async def record(self, transaction_id: str, partition_id: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Record one event. A failure is logged and returned, and never raised into the handler."""
        if not isinstance(config, Mapping) or "data" not in config:
            self._log.warning("Message.trace", _NO_DATA, transaction_id=transaction_id)
            return {"success": False, "error": _NO_DATA}
        body = {
            "transactionId": transaction_id,
            "partitionId": partition_id,
            "consumerGroup": self._group,
            "traceNames": _names(config.get("traceName")),
            "eventType": config.get("eventType") or "info",
            "data": config["data"],
        }
        try:
            response = await self._http.request("POST", "/api/v1/traces", body)
        except (QueenError, TypeError, ValueError) as error:
            self._log.warning("Message.trace", f"trace not recorded: {error}", transaction_id=transaction_id)
            return {"success": False, "error": str(error)}
        return {"success": True, **(response or {})}


# One per message: a struct without garbage collection costs half as much as a closure.
class MessageTrace(msgspec.Struct, gc=False):
    """`message["trace"]`: records trace events of this message."""

    tracer: Tracer
    transaction_id: str
    partition_id: str

    async def __call__(self, config: TraceConfig, /) -> dict[str, Any]:
        return await self.tracer.record(self.transaction_id, self.partition_id, config)


def _names(given: object) -> list[str] | None:
    names = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    return [name for name in names if isinstance(name, str) and name] or None


class QueueDeliveries:
    """Messages of queues."""

    def __init__(self, transport: Transport, tracer: Tracer, renewal: Renewal | None) -> None:
        self._transport = transport
        self._tracer = tracer
        self._renewal = renewal

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        messages = await self._transport.fetch(batch, timeout_millis)
        self._tracer.attach(messages)
        return messages

    async def settle(self, delivered: Sequence[Message], error: str | None, *, dead: bool = False) -> list[AckResult]:
        status = COMPLETED if error is None else DEAD if dead else FAILED
        acks = [Ack(one["transactionId"], one["partitionId"], one["leaseId"], status, error) for one in delivered]
        return await self._transport.ack(acks)

    async def release_leases(self, delivered: Sequence[Message]) -> None:
        # A `retry` of the last message of a partition, which is not acknowledged yet, releases its lease.
        last = {message["partitionId"]: message for message in delivered}
        acks = [Ack(one["transactionId"], one["partitionId"], one["leaseId"], RETRY) for one in last.values()]
        await self._transport.ack(acks)

    def renewing(self, delivered: Sequence[Message]) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._renewal is None else self._renewal.renewing(delivered)

    def order_key(self, delivered: Message) -> str | None:
        return delivered["partitionId"]

    async def close(self) -> None:
        await self._transport.close()


T = TypeVar("T")

_POLL_SECONDS = 0.1
# A response that is being received is not cut off: its messages would stay leased until the lease expires.
_FETCH_GRACE_SECONDS = 0.25
_RELEASE_SECONDS = 2.0
_ACK_ATTEMPTS_WHEN_STOPPING = 3


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """Options of a consumer."""

    batch: int
    wait: bool
    timeout_millis: int
    concurrency: int = 1
    limit: int | None = None
    idle_millis: int | None = None
    auto_ack: bool = True
    each: bool = False
    renew_lease: bool = False
    renew_interval_millis: int | None = None


class Consumer(Generic[M]):
    """`concurrency` workers that share a handler and a source. Runs once."""

    def __init__(
        self,
        deliveries: Deliveries[M],
        handler: Callable[[Any], Awaitable[object] | object],
        options: ConsumeOptions,
        http: HttpClient,
        log: ClientLog,
    ) -> None:
        self._deliveries = deliveries
        self._handler = handler
        self._options = options
        self._http = http
        self._log = log
        self._workers: list[asyncio.Task[None]] = []
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.finished = asyncio.Event()

    async def run(self, signal: asyncio.Event | None = None) -> None:
        """Consume until the limit, the idle time, the signal or `stop()`; running handlers finish first.

        Cancelling the task cancels the handlers and releases their messages.
        """
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._options.concurrency)]
        stopper = asyncio.create_task(self._stop_on(signal)) if signal is not None else None
        try:
            await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
            self.stop()
            await asyncio.wait(self._workers)
        except asyncio.CancelledError:
            for worker in self._workers:
                worker.cancel()
            await asyncio.wait(self._workers)
            raise
        finally:
            if stopper is not None:
                stopper.cancel()
            await self._deliveries.close()
            self.finished.set()
        for error in [worker.exception() for worker in self._workers]:
            if error is not None:
                raise error

    def stop(self) -> None:
        """Stop fetching; `run` returns when running handlers have finished and are acknowledged."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(_FETCH_GRACE_SECONDS, self._cancel_waiting)

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether the task is one of the workers; handlers run in them."""
        return task in self._workers

    async def _stop_on(self, signal: asyncio.Event) -> None:
        await signal.wait()
        self.stop()

    def _cancel_waiting(self) -> None:
        for task in self._waiting:
            task.cancel()

    async def _work(self) -> None:
        options = self._options
        handled = 0
        failures = 0
        last_received = time.monotonic()
        while not self._stopping and (not options.limit or handled < options.limit):
            millis = options.timeout_millis
            if options.idle_millis:
                left = options.idle_millis - int((time.monotonic() - last_received) * 1000)
                if left <= 0:
                    return
                millis = min(millis, left)
            batch = min(options.batch, options.limit - handled) if options.limit else options.batch
            try:
                asked = time.monotonic()
                messages = await self._wait_for(self._deliveries.fetch(batch, millis))
                failures = 0
                # A server in maintenance mode responds to long polls at once.
                if not messages and (not options.wait or time.monotonic() - asked < _POLL_SECONDS):
                    await self._wait_for(asyncio.sleep(_POLL_SECONDS))
            except TRANSIENT as error:
                failures += 1
                self._log.warning("Consumer.fetch", f"fetch failed, retrying: {error}", failures=failures)
                await self._wait_for(asyncio.sleep(self._http.retry_delay(failures, error)))
                continue
            if messages:
                if self._stopping:
                    await self._release(messages)
                    return
                handled += await self._handle(messages)
                last_received = time.monotonic()

    async def _wait_for(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Await something that `stop` may cancel; None if it did."""
        if self._stopping:
            waiting.close()
            return None
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            # Only `stop` cancels a waiting worker while the run itself is not cancelled.
            if self._stopping and task.uncancel() == 0:
                return None
            raise
        finally:
            self._waiting.discard(task)

    async def _handle(self, messages: list[M]) -> int:
        """Call the handler and acknowledge; returns the number of messages handled."""
        try:
            async with self._deliveries.renewing(messages):
                if self._options.each:
                    return await self._handle_each(messages)
                single = self._options.batch == 1 and len(messages) == 1
                await self._process(messages, messages[0] if single else messages)
                return len(messages)
        except asyncio.CancelledError:
            if self._options.auto_ack:
                await self._release(messages)
            raise

    async def _handle_each(self, messages: list[M]) -> int:
        handled = 0
        failed: set[str | None] = set()
        order_key = self._deliveries.order_key
        for index, message in enumerate(messages):
            if self._stopping:
                await self._release([one for one in messages[index:] if order_key(one) not in failed])
                break
            # Later messages with the key of a failed one are redelivered after it, which keeps the order.
            if order_key(message) in failed:
                continue
            results = await self._process([message], message)
            handled += 1
            if results is not None and order_key(message) is not None:
                failed.add(order_key(message))
                if any(result.dlq and not result.released for result in results):
                    # On a server that keeps the lease of what comes after a dead letter: release it.
                    await self._release([one for one in messages[index + 1 :] if order_key(one) == order_key(message)])
        return handled

    async def _process(self, messages: list[M], given: M | list[M]) -> list[AckResult] | None:
        """Call the handler and acknowledge; None on success, else the results of the negative acknowledgment."""
        try:
            result = self._handler(given)
            if inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if not self._options.auto_ack:
                raise
            text = text_of_error(error)
            self._log.warning("Consumer.handler", f"handler failed for {len(messages)} messages: {text}")
            return await self._settle(messages, text, dead=isinstance(error, DeadLetterError))
        if self._options.auto_ack:
            await self._settle(messages)
        return None

    async def _settle(self, messages: list[M], error: str | None = None, *, dead: bool = False) -> list[AckResult]:
        """Acknowledge, retrying until a server responds: unacknowledged messages would be redelivered."""
        failures = 0
        while True:
            try:
                results = await self._deliveries.settle(messages, error, dead=dead)
                break
            except TRANSIENT as failure:
                failures += 1
                self._log.warning("Consumer.ack", f"ack of {len(messages)} messages failed, retrying: {failure}")
                if self._stopping and failures >= _ACK_ATTEMPTS_WHEN_STOPPING:
                    return []
                await asyncio.sleep(self._http.retry_delay(failures, failure))
        rejected = [result for result in results if not result.success]
        if rejected:
            self._log.warning(
                "Consumer.ack",
                f"ack of {len(rejected)} of {len(messages)} messages rejected, redelivering: {rejected[0].error}",
            )
        return results

    async def _release(self, messages: list[M]) -> None:
        if not messages:
            return
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._deliveries.release_leases(messages)
        except (RequestError, TimeoutError) as error:
            self._log.warning(
                "Consumer.stop",
                f"release of {len(messages)} messages failed, they stay leased until expiry: {error}",
            )

"""The loop behind `consume()`: fetch, call the handler, acknowledge."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from queen.client.acks import COMPLETED, FAILED, RENEWAL_SECONDS, RETRY, Ack, AckResult, lease_ids
from queen.client.config import ClientLog
from queen.client.errors import PASSING, LeaseLostError, QueenError, RequestError
from queen.client.http import HttpClient
from queen.client.trace import Tracer
from queen.client.transport import Transport
from queen.client.types import Message

# The shortest lease is a second. Once renewed, it lives for a minute.
_FIRST_SECONDS = 0.5
_UNTOLD_SECONDS = 20.0


class Renewal:
    """Renews every `interval_millis`; where none is given, soon and then every 20 seconds."""

    def __init__(self, transport: Transport, interval_millis: int | None, log: ClientLog) -> None:
        self._transport = transport
        self._log = log
        self._first = interval_millis / 1000 if interval_millis else _FIRST_SECONDS
        self._interval = interval_millis / 1000 if interval_millis else _UNTOLD_SECONDS
        # Long enough that one renewal may fail and the next still comes in time.
        self._seconds = max(RENEWAL_SECONDS, 3 * self._interval)

    @asynccontextmanager
    async def keeping(self, messages: Sequence[Message]) -> AsyncIterator[None]:
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
                    self._log.warning("Consumer.renew", f"lease {lease} is lost, its messages come again: {error}")
                except QueenError as error:
                    self._log.warning("Consumer.renew", f"lease {lease} was not renewed: {error}")


M = TypeVar("M")


class Deliveries(Protocol[M]):
    """What a consumer needs of its source. Raises `RequestError`; the consumer decides what is tried again.

    All workers of a consumer share it and call it at the same time.
    """

    async def fetch(self, batch: int, timeout_millis: int) -> list[M]:
        """Up to `batch` of them, leased and ready to be handed over; empty when there were none in time."""
        ...

    async def settle(self, delivered: Sequence[M], error: str | None) -> list[AckResult]:
        """They are done, or failed with an error; the results are in the same order."""
        ...

    async def give_back(self, delivered: Sequence[M]) -> None:
        """End the leases of those that will not be handled, so that others need not wait for their end."""
        ...

    def keeping(self, delivered: Sequence[M]) -> AbstractAsyncContextManager[None]:
        """Keep the leases while a block runs, if that is wanted."""
        ...

    def lane(self, delivered: M) -> str | None:
        """What has to stay in order: one that fails holds back those after it in its lane. None: nothing."""
        ...

    async def close(self) -> None:
        """The consumer has ended."""
        ...


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

    async def settle(self, delivered: Sequence[Message], error: str | None) -> list[AckResult]:
        status = COMPLETED if error is None else FAILED
        acks = [Ack(one["transactionId"], one["partitionId"], one["leaseId"], status, error) for one in delivered]
        return await self._transport.ack(acks)

    async def give_back(self, delivered: Sequence[Message]) -> None:
        # One for each partition does it, and the last one of it has not been acknowledged yet.
        last = {message["partitionId"]: message for message in delivered}
        acks = [Ack(one["transactionId"], one["partitionId"], one["leaseId"], RETRY) for one in last.values()]
        await self._transport.ack(acks)

    def keeping(self, delivered: Sequence[Message]) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._renewal is None else self._renewal.keeping(delivered)

    def lane(self, delivered: Message) -> str | None:
        return delivered["partitionId"]

    async def close(self) -> None:
        await self._transport.close()


T = TypeVar("T")

_POLL_SECONDS = 0.1
# A fetch that is being answered is let finish, because its messages would stay leased to nobody.
_FETCH_GRACE_SECONDS = 0.25
_GIVE_BACK_SECONDS = 2.0
_TRIES_WHEN_STOPPING = 3


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """How messages are handed to the handler."""

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
    """`concurrency` workers that share a handler and a source. It runs once."""

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
        self._parked: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.finished = asyncio.Event()

    async def run(self, signal: asyncio.Event | None = None) -> None:
        """Consume until the limit, the idle time, the signal or `stop()`; a handler that has begun is let finish.

        When the task that runs this is cancelled, handlers are cancelled with it and their messages given back.
        """
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._options.concurrency)]
        watching = asyncio.create_task(self._watch(signal)) if signal is not None else None
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
            if watching is not None:
                watching.cancel()
            await self._deliveries.close()
            self.finished.set()
        for error in [worker.exception() for worker in self._workers]:
            if error is not None:
                raise error

    def stop(self) -> None:
        """Fetch no more; what is being handled is finished and acknowledged, and then `run` returns."""
        if not self._stopping:
            self._stopping = True
            asyncio.get_running_loop().call_later(_FETCH_GRACE_SECONDS, self._unpark)

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether the task is one of the workers, as it is for a handler."""
        return task in self._workers

    async def _watch(self, signal: asyncio.Event) -> None:
        await signal.wait()
        self.stop()

    def _unpark(self) -> None:
        for task in self._parked:
            task.cancel()

    async def _work(self) -> None:
        options = self._options
        handled = 0
        failures = 0
        heard = time.monotonic()
        while not self._stopping and (not options.limit or handled < options.limit):
            millis = options.timeout_millis
            if options.idle_millis:
                left = options.idle_millis - int((time.monotonic() - heard) * 1000)
                if left <= 0:
                    return
                millis = min(millis, left)
            batch = min(options.batch, options.limit - handled) if options.limit else options.batch
            try:
                asked = time.monotonic()
                messages = await self._parking(self._deliveries.fetch(batch, millis))
                failures = 0
                # A server in maintenance answers at once, even where it is asked to wait.
                if not messages and (not options.wait or time.monotonic() - asked < _POLL_SECONDS):
                    await self._parking(asyncio.sleep(_POLL_SECONDS))
            except PASSING as error:
                failures += 1
                self._log.warning("Consumer.fetch", f"nothing can be fetched, trying again: {error}", failures=failures)
                await self._parking(asyncio.sleep(self._http.pause(failures, error)))
                continue
            if messages:
                if self._stopping:
                    await self._give_back(messages)
                    return
                handled += await self._handle(messages)
                heard = time.monotonic()

    async def _parking(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Wait for something that `stop` may break off; None then."""
        if self._stopping:
            waiting.close()
            return None
        task = asyncio.current_task()
        assert task is not None
        self._parked.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            # Only `stop` cancels a parked task without the run itself being cancelled.
            if self._stopping and task.uncancel() == 0:
                return None
            raise
        finally:
            self._parked.discard(task)

    async def _handle(self, messages: list[M]) -> int:
        """Hand messages over and acknowledge them; how many were handled."""
        try:
            async with self._deliveries.keeping(messages):
                if self._options.each:
                    return await self._handle_each(messages)
                single = self._options.batch == 1 and len(messages) == 1
                await self._process(messages, messages[0] if single else messages)
                return len(messages)
        except asyncio.CancelledError:
            if self._options.auto_ack:
                await self._give_back(messages)
            raise

    async def _handle_each(self, messages: list[M]) -> int:
        handled = 0
        failed: set[str | None] = set()
        lane = self._deliveries.lane
        for index, message in enumerate(messages):
            if self._stopping:
                await self._give_back([one for one in messages[index:] if lane(one) not in failed])
                break
            # What follows a failed message in its lane comes again after it, so that the order is kept.
            if lane(message) in failed:
                continue
            refusals = await self._process([message], message)
            handled += 1
            if refusals is not None and lane(message) is not None:
                failed.add(lane(message))
                if any(refusal.dlq for refusal in refusals):
                    # A dead letter is consumed, so the lease goes on for what came after it.
                    await self._give_back([one for one in messages[index + 1 :] if lane(one) == lane(message)])
        return handled

    async def _process(self, messages: list[M], given: M | list[M]) -> list[AckResult] | None:
        """Call the handler and acknowledge; None, or when it failed what the server did with the messages."""
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
            text = f"{type(error).__name__}: {error}"
            self._log.warning("Consumer.handler", f"{len(messages)} messages failed: {text}")
            return await self._settle(messages, text)
        if self._options.auto_ack:
            await self._settle(messages)
        return None

    async def _settle(self, messages: list[M], error: str | None = None) -> list[AckResult]:
        """Acknowledge, for as long as it takes a server to answer: what is not acknowledged is delivered again."""
        failures = 0
        while True:
            try:
                results = await self._deliveries.settle(messages, error)
                break
            except PASSING as failure:
                failures += 1
                self._log.warning("Consumer.ack", f"{len(messages)} messages are not acknowledged yet: {failure}")
                if self._stopping and failures >= _TRIES_WHEN_STOPPING:
                    return []
                await asyncio.sleep(self._http.pause(failures, failure))
        refused = [result for result in results if not result.success]
        if refused:
            self._log.warning(
                "Consumer.ack",
                f"{len(refused)} of {len(messages)} messages come again, their acknowledgment was refused: "
                f"{refused[0].error}",
            )
        return results

    async def _give_back(self, messages: list[M]) -> None:
        if not messages:
            return
        try:
            async with asyncio.timeout(_GIVE_BACK_SECONDS):
                await self._deliveries.give_back(messages)
        except (RequestError, TimeoutError) as error:
            self._log.warning("Consumer.stop", f"{len(messages)} messages stay leased until their lease ends: {error}")

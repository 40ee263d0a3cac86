"""`Queen`, the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

from queen.client.acks import Acker
from queen.client.admin import AdminCalls
from queen.client.buffers import Buffers
from queen.client.config import read_config
from queen.client.consumer import ConsumeOptions, Consumer
from queen.client.dlq import DlqQuery
from queen.client.errors import QueenError, UnsentError
from queen.client.http import HttpClient
from queen.client.ids import TransactionIds
from queen.client.log import ClientLog
from queen.client.messages import AckResponse, BufferStats, Given, GivenMany, Message, RenewResponse
from queen.client.popping import Popper
from queen.client.push import Pusher
from queen.client.queue import QueueBuilder
from queen.client.signals import StopSignals
from queen.client.subscription import Subscription
from queen.client.trace import Tracer
from queen.client.transaction import Transaction
from queen.client.transport import HttpTransport, TransportMaker


class Admin(AdminCalls[Awaitable[Any]]):
    """`queen.admin`: administration and observation; every call is awaited."""


class Queen:
    """A client of one server, or of several that share their queues.

        async with Queen("http://localhost:6632") as queen:
            await queen.queue("tasks").push([{"data": {"job": 1}}])
            await queen.queue("tasks").consume(handler)

    `strict=True` makes `pop`, `ack`, `renew` and DLQ queries raise what they otherwise only log and answer with
    nothing or `success: False`. `handle_signals=False` leaves SIGINT and SIGTERM alone while consuming.
    """

    def __init__(
        self,
        config: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        urls: Sequence[str] | None = None,
        url: str | None = None,
        timeout_millis: int | None = None,
        retry_attempts: int | None = None,
        retry_delay_millis: int | None = None,
        load_balancing_strategy: str | None = None,
        affinity_hash_ring: int | None = None,
        enable_failover: bool | None = None,
        health_retry_after_millis: int | None = None,
        bearer_token: str | None = None,
        headers: Mapping[str, str] | None = None,
        strict: bool | None = None,
        handle_signals: bool | None = None,
    ) -> None:
        """`config` is a URL, a list of URLs, or a dict of the options that can also be given by name."""
        named = {name: value for name, value in locals().items() if name not in ("self", "config")}
        self._config = read_config(config, named)
        self._log = ClientLog()
        self.http = HttpClient(self._config, self._log)
        self.buffers = Buffers(self.http, self._log)
        self._ids = TransactionIds()
        self.pusher = Pusher(self.http, self.buffers, self._ids, self._log)
        self.acker = Acker(self.http, self._log, self._config.strict)
        self._admin = Admin(self.http.request)
        self._consumers: set[Consumer] = set()
        self._signals = StopSignals(self._stop_consumers) if self._config.handle_signals else None
        self.transports: dict[str, TransportMaker] = {"http": self._http_transport}
        self._log.info("Queen.constructor", status="initialized", urls=len(self._config.urls))

    def queue(self, name: str | None = None) -> QueueBuilder:
        """Begin a sentence of the fluent grammar; without a name, go on with `namespace` or `task`."""
        return QueueBuilder(self, name)

    @property
    def admin(self) -> Admin:
        """Administration and observation."""
        return self._admin

    def transaction(self) -> Transaction:
        """Begin a transaction: acknowledgments and pushes that happen together or not at all."""
        return Transaction(self.http, self._ids)

    async def ack(
        self,
        message: Given | GivenMany,
        status: bool | str = True,
        context: Mapping[str, Any] | None = None,
    ) -> AckResponse:
        """Acknowledge a message or a list of messages.

        True (or `completed`): done. False (or `failed`): deliver again, until the retries are used up. `retry`: deliver
        again without counting. `dlq`: make it a dead letter. `context` may hold the `group` that popped it, and an
        `error` text. In a list, `_status` and `_error` of a message are for that one.
        """
        return await self.acker.ack(message, status, context)

    @overload
    async def renew(self, message_or_lease_id: Given, seconds: float | None = None) -> RenewResponse: ...

    @overload
    async def renew(self, message_or_lease_id: GivenMany, seconds: float | None = None) -> list[RenewResponse]: ...

    async def renew(
        self, message_or_lease_id: Given | GivenMany, seconds: float | None = None
    ) -> RenewResponse | list[RenewResponse]:
        """Let the leases of messages live for at least `seconds` (60) from now."""
        return await self.acker.renew(message_or_lease_id, seconds)

    async def flush_all_buffers(self) -> None:
        """Send everything that is buffered; raises when that cannot be done, and keeps it."""
        await self.buffers.flush_all()

    def get_buffer_stats(self) -> BufferStats:
        """What the buffers hold and have done."""
        return self.buffers.stats()

    async def delete_consumer_group(self, consumer_group: str, delete_metadata: bool = True) -> Any:
        """Forget where a group is, everywhere; with its metadata, also where it once began."""
        return await self._admin.delete_consumer_group(consumer_group, delete_metadata) or {"success": True}

    async def update_consumer_group_timestamp(self, consumer_group: str, timestamp: str) -> Any:
        """Move the time from which a group gets messages of partitions it has not begun."""
        return await self._admin.update_consumer_group_timestamp(consumer_group, timestamp) or {"success": True}

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_millis: int | None = None,
        affinity_key: str | None = None,
    ) -> Any:
        """Any request to the HTTP API, with this client's servers, token, retries and failover.

        `body` goes as JSON and the answer is decoded (None when empty). Raises `RequestError` or one of its kinds.
        """
        return await self.http.request(method, path, body, timeout_millis=timeout_millis, affinity_key=affinity_key)

    async def pop(self, subscription: Subscription, *, auto_ack: bool = False) -> list[Message]:
        """What `queue(...).pop()` does."""
        try:
            popper = Popper(self.http, subscription)
            return await popper.pop(subscription.batch, subscription.timeout_millis, auto_ack=auto_ack)
        except QueenError as error:
            if self._config.strict:
                raise
            self._log.warning("QueueBuilder.pop", f"answered with nothing, because it failed: {error}")
            return []

    def dead_letters(self, queue: str, group: str | None, partition: str) -> DlqQuery:
        """What `queue(...).dlq()` does."""
        return DlqQuery(self.http, self._log, self._config.strict, queue, group, partition)

    async def run_consumer(
        self,
        handler: Callable[[Any], Awaitable[object] | object],
        subscription: Subscription,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
        transport: str,
    ) -> None:
        """What `queue(...).consume()` does."""
        maker = self.transports.get(transport)
        if maker is None:
            raise ValueError(f"transport must be one of {', '.join(self.transports)}, not {transport!r}")
        tracer = Tracer(self.http, self._log, subscription.group)
        consumer = Consumer(maker(subscription), handler, options, tracer, self.http, self._log)
        self._consumers.add(consumer)
        if self._signals is not None:
            self._signals.watch()
        try:
            await consumer.run(signal)
        finally:
            self._consumers.discard(consumer)
            if self._signals is not None and not self._consumers:
                self._signals.leave()

    async def close(self) -> None:
        """End the consumers after what they are handling, send what is buffered, and close the connections.

        Raises `UnsentError` with the messages that were buffered and could not be sent.
        """
        self._stop_consumers()
        here = asyncio.current_task()
        for consumer in list(self._consumers):
            # A handler that closes its own client must not wait for itself.
            if not consumer.runs_in(here):
                await consumer.finished.wait()
        unsent = await self.buffers.close()
        await self.http.close()
        self._log.info("Queen.close", unsent=len(unsent))
        if unsent:
            raise UnsentError(unsent)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except UnsentError as unsent:
            if error is None:
                raise
            # What ended the block matters more, and must not hide that messages are left.
            error.add_note(str(unsent))
            self._log.warning("Queen.close", str(unsent))

    def _stop_consumers(self) -> None:
        for consumer in self._consumers:
            consumer.stop()

    def _http_transport(self, subscription: Subscription) -> HttpTransport:
        return HttpTransport(self.http, self.acker, subscription)

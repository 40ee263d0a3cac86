"""`Queen`, the client."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

from queen.client.admin import AdminCalls
from queen.client.config import read_config
from queen.client.engine import Engine
from queen.client.errors import UnsentError
from queen.client.queue import QueueBuilder
from queen.client.state import EphemeralQueue, KeyValues, Lock, Timers, fetch
from queen.client.topics.calls import TopicCalls
from queen.client.topics.topic import TopicBuilder
from queen.client.transaction import Transaction
from queen.client.types import DEFAULT_PARTITION, AckResponse, BufferStats, MessageRef, MessageRefs, RenewResponse


class Admin(AdminCalls[Awaitable[Any]]):
    """`queen.admin`: administrative calls, each awaitable."""


class Queen:
    """A client of one server, or of several servers on the same database.

        async with Queen("http://localhost:6632") as queen:
            await queen.queue("tasks").push([{"data": {"job": 1}}])
            await queen.queue("tasks").consume(handler)

    With `strict=True` failed `pop`, `ack`, `renew` and DLQ calls raise; without it they log a warning and return an
    empty list or `success: False`. `handle_signals=False` installs no handlers for SIGINT and SIGTERM.
    `insecure=True` does not verify TLS certificates.
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
        insecure: bool | None = None,
    ) -> None:
        """`config` is a URL, a list of URLs, or a dict of the keyword options."""
        named = {name: value for name, value in locals().items() if name not in ("self", "config")}
        self._engine = Engine(read_config(config, named))
        self._admin = Admin(self._engine.http.request)
        self._engine.log.info("Queen.constructor", status="initialized", urls=len(self._engine.config.urls))

    @property
    def engine(self) -> Engine:
        """The components of this client, for libraries built on it; not a stable API."""
        return self._engine

    def queue(self, name: str | None = None) -> QueueBuilder:
        """A builder for a queue; without a name, select queues with `namespace` or `task`."""
        return QueueBuilder(self._engine, name)

    def topic(self, namespace: str, *names: str) -> TopicBuilder:
        """A builder for a topic; with several names, or none for all topics of the namespace, for consuming."""
        return TopicBuilder(self._engine, namespace, names)

    async def topics(self, namespace: str) -> list[str]:
        """The names of the topics of a namespace that have ready or leased items."""
        names: list[str] = await TopicCalls(self._engine.http).get("", namespace=namespace)
        return names

    @property
    def admin(self) -> Admin:
        """Administrative calls."""
        return self._admin

    def transaction(self) -> Transaction:
        """A new transaction: acknowledgments and pushes that are applied atomically."""
        return Transaction(self._engine.http, self._engine.ids)

    def kv(self, namespace: str) -> KeyValues:
        """The keys of a namespace."""
        return KeyValues(self._engine.http, namespace)

    def lock(self, name: str, *, ttl: int = 30, limit: int = 1, poll_seconds: float = 1.0) -> Lock:
        """A lock, or one of `limit` permits, that expires `ttl` seconds after its last renewal."""
        return Lock(self._engine.http, name, ttl, limit, poll_seconds)

    def timers(self, queue: str) -> Timers:
        """The timers of a queue."""
        return Timers(self._engine.http, queue)

    def ephemeral(self, name: str) -> EphemeralQueue:
        """An ephemeral queue."""
        return EphemeralQueue(self._engine.http, name)

    async def fetch(
        self, queue: str, *, partition: str = DEFAULT_PARTITION, offset: int = 0, max_bytes: int | None = None
    ) -> dict[str, Any]:
        """Read a partition from an offset on, consuming nothing: `records`, `highWatermark`, `error` and others."""
        return await fetch(self._engine.http, queue, partition, offset, max_bytes)

    async def ack(
        self,
        message: MessageRef | MessageRefs,
        status: bool | str = True,
        context: Mapping[str, Any] | None = None,
    ) -> AckResponse:
        """Acknowledge a message or a list of messages.

        True (or `completed`): done. False (or `failed`): redeliver, up to `retryLimit` times. `retry`: redeliver, not
        counting a retry. `dlq`: move to the dead letter queue. `context` may hold the consumer `group` and an `error`
        text. In a list, `_status` and `_error` of a message override those of the call.
        """
        return await self._engine.acker.ack(message, status, context)

    @overload
    async def renew(self, message_or_lease_id: MessageRef, seconds: float | None = None) -> RenewResponse: ...

    @overload
    async def renew(self, message_or_lease_id: MessageRefs, seconds: float | None = None) -> list[RenewResponse]: ...

    async def renew(
        self, message_or_lease_id: MessageRef | MessageRefs, seconds: float | None = None
    ) -> RenewResponse | list[RenewResponse]:
        """Extend the leases of messages to at least `seconds` (60) from now."""
        return await self._engine.acker.renew(message_or_lease_id, seconds)

    async def flush_all_buffers(self) -> None:
        """Flush all buffers; on failure raises, and keeps the messages."""
        await self._engine.buffers.flush_all()

    def get_buffer_stats(self) -> BufferStats:
        """Statistics of the buffers."""
        return self._engine.buffers.stats()

    async def delete_consumer_group(self, consumer_group: str, delete_metadata: bool = True) -> Any:
        """Delete the offsets of a consumer group in all queues; with its metadata, also its start position."""
        return await self._admin.delete_consumer_group(consumer_group, delete_metadata) or {"success": True}

    async def update_consumer_group_timestamp(self, consumer_group: str, timestamp: str) -> Any:
        """Change the start position of a group in partitions it has not read yet."""
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
        """Send any request to the HTTP API, with this client's servers, token, retries and failover.

        `body` is sent as JSON and the response is decoded (None when empty). Raises `RequestError`.
        """
        return await self._engine.http.request(
            method, path, body, timeout_millis=timeout_millis, affinity_key=affinity_key
        )

    async def close(self) -> None:
        """Stop the consumers gracefully, flush the buffers, and close the connections.

        Raises `UnsentError` with the buffered messages that could not be sent.
        """
        unsent = await self._engine.close()
        self._engine.log.info("Queen.close", unsent=len(unsent))
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
            # The exception of the block wins; the note keeps the unsent messages visible.
            error.add_note(str(unsent))
            self._engine.log.warning("Queen.close", str(unsent))

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
from queen.client.topics.calls import TopicCalls
from queen.client.topics.topic import TopicBuilder
from queen.client.transaction import Transaction
from queen.client.types import AckResponse, BufferStats, Given, GivenMany, RenewResponse


class Admin(AdminCalls[Awaitable[Any]]):
    """`queen.admin`: administration and observation; every call is awaited."""


class Queen:
    """A client of one server, or of several that share their queues.

        async with Queen("http://localhost:6632") as queen:
            await queen.queue("tasks").push([{"data": {"job": 1}}])
            await queen.queue("tasks").consume(handler)

    `strict=True` makes `pop`, `ack`, `renew` and DLQ queries raise what they otherwise only log and answer with
    nothing or `success: False`. `handle_signals=False` leaves SIGINT and SIGTERM alone while consuming.
    `insecure=True` does not check the certificates of servers.
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
        """`config` is a URL, a list of URLs, or a dict of the options that can also be given by name."""
        named = {name: value for name, value in locals().items() if name not in ("self", "config")}
        self._engine = Engine(read_config(config, named))
        self._admin = Admin(self._engine.http.request)
        self._engine.log.info("Queen.constructor", status="initialized", urls=len(self._engine.config.urls))

    @property
    def engine(self) -> Engine:
        """The parts of this client, for those who build on it; they may change."""
        return self._engine

    def queue(self, name: str | None = None) -> QueueBuilder:
        """Begin a sentence of the fluent grammar; without a name, go on with `namespace` or `task`."""
        return QueueBuilder(self._engine, name)

    def topic(self, namespace: str, *names: str) -> TopicBuilder:
        """Begin a sentence about a topic; of several, or (without a name) of all topics of a namespace to consume."""
        return TopicBuilder(self._engine, namespace, names)

    async def topics(self, namespace: str) -> list[str]:
        """The names of the topics of a namespace that have ready or leased items."""
        names: list[str] = await TopicCalls(self._engine.http).get("", namespace=namespace)
        return names

    @property
    def admin(self) -> Admin:
        """Administration and observation."""
        return self._admin

    def transaction(self) -> Transaction:
        """Begin a transaction: acknowledgments and pushes that happen together or not at all."""
        return Transaction(self._engine.http, self._engine.ids)

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
        return await self._engine.acker.ack(message, status, context)

    @overload
    async def renew(self, message_or_lease_id: Given, seconds: float | None = None) -> RenewResponse: ...

    @overload
    async def renew(self, message_or_lease_id: GivenMany, seconds: float | None = None) -> list[RenewResponse]: ...

    async def renew(
        self, message_or_lease_id: Given | GivenMany, seconds: float | None = None
    ) -> RenewResponse | list[RenewResponse]:
        """Let the leases of messages live for at least `seconds` (60) from now."""
        return await self._engine.acker.renew(message_or_lease_id, seconds)

    async def flush_all_buffers(self) -> None:
        """Send everything that is buffered; raises when that cannot be done, and keeps it."""
        await self._engine.buffers.flush_all()

    def get_buffer_stats(self) -> BufferStats:
        """What the buffers hold and have done."""
        return self._engine.buffers.stats()

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
        return await self._engine.http.request(
            method, path, body, timeout_millis=timeout_millis, affinity_key=affinity_key
        )

    async def close(self) -> None:
        """End the consumers after what they are handling, send what is buffered, and close the connections.

        Raises `UnsentError` with the messages that were buffered and could not be sent.
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
            # What ended the block matters more, and must not hide that messages are left.
            error.add_note(str(unsent))
            self._engine.log.warning("Queen.close", str(unsent))

"""What a consumer works on, whatever it is: something to fetch, to settle, to give back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, TypeVar

from queen.client.acks import COMPLETED, FAILED, RETRY, Ack, AckResult
from queen.client.messages import Message
from queen.client.renewal import Renewal
from queen.client.trace import Tracer
from queen.client.transport import Transport

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

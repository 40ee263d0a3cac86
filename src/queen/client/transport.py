"""The way between a consumer and a server: fetch, acknowledge, renew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from queen.client.acks import Ack, Acker, AckResult
from queen.client.http import HttpClient
from queen.client.messages import Message
from queen.client.popping import Popper
from queen.client.subscription import Subscription


class Transport(Protocol):
    """What a consumer needs of a server. Raises `RequestError`; the consumer decides what is tried again.

    All workers of a consumer share one transport and call it at the same time.
    """

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        """Up to `batch` messages, leased; empty when there were none in time."""
        ...

    async def ack(self, acks: list[Ack]) -> list[AckResult]:
        """Acknowledge; the results are in the order of the acknowledgments."""
        ...

    async def renew(self, lease: str, seconds: float) -> None:
        """Let a lease live for at least `seconds` from now, or raise `LeaseLostError`."""
        ...

    async def close(self) -> None:
        """The consumer has ended."""
        ...


TransportMaker = Callable[[Subscription], Transport]


class HttpTransport:
    """Long polling. Acknowledgments go to the server that delivered, which knows the lease by heart."""

    def __init__(self, http: HttpClient, acker: Acker, subscription: Subscription) -> None:
        self._popper = Popper(http, subscription)
        self._acker = acker
        self._group = subscription.group
        self._key = subscription.affinity_key

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        return await self._popper.pop(batch, timeout_millis, attempts=1)

    async def ack(self, acks: list[Ack]) -> list[AckResult]:
        return await self._acker.ack_batch(acks, self._group, self._key, attempts=1)

    async def renew(self, lease: str, seconds: float) -> None:
        await self._acker.extend(lease, seconds, self._key)

    async def close(self) -> None:
        return None

"""Transport of a consumer: fetch, acknowledge, renew; here by HTTP long polls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from queen.client.consume.acks import Ack, Acker, AckResult
from queen.client.http import HttpClient, decode_as
from queen.client.types import Message, Subscription

# Added to the long-poll timeout for the response to arrive.
GRACE_SECONDS = 5.0


class _Popped(msgspec.Struct):
    # Plain dicts: checking their fields would cost as much as decoding them.
    messages: list[Any] = []


_popped = msgspec.json.Decoder(_Popped)


class Popper:
    """Pops from one source."""

    def __init__(self, http: HttpClient, subscription: Subscription) -> None:
        self._http = http
        self._subscription = subscription
        self._key = subscription.affinity_key
        self._last: tuple[int, int, bool] | None = None
        self._path = ""

    async def pop(
        self, batch: int, timeout_millis: int, *, auto_ack: bool = False, attempts: int | None = None
    ) -> list[Message]:
        """Pop up to `batch` messages; empty after the timeout."""
        parameters = (batch, timeout_millis, auto_ack)
        if parameters != self._last:
            self._path, self._last = self._subscription.path(batch, timeout_millis, auto_ack), parameters
        response = await self._http.send(
            "GET",
            self._path,
            seconds=timeout_millis / 1000 + GRACE_SECONDS,
            affinity_key=self._key,
            attempts=attempts,
        )
        return decode_as(_popped, response.body).messages if response.body else []


class Transport(Protocol):
    """Transport of a consumer, shared by its workers. Raises `RequestError`; the consumer retries."""

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        """Lease up to `batch` messages; empty after the timeout."""
        ...

    async def ack(self, acks: list[Ack]) -> list[AckResult]:
        """Acknowledge; results in the order of the acknowledgments."""
        ...

    async def renew(self, lease: str, seconds: float) -> None:
        """Extend a lease to at least `seconds` from now; raises `LeaseLostError`."""
        ...

    async def close(self) -> None:
        """Called when the consumer has stopped."""
        ...


TransportMaker = Callable[[Subscription], Transport]


class HttpTransport:
    """HTTP long polling. Acks go to the server that delivered, which has the lease in its cache."""

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

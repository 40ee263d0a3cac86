"""The way between a consumer and a server: fetch, acknowledge, renew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from queen.client.acks import Ack, Acker, AckResult
from queen.client.http import HttpClient, decode_as
from queen.client.types import Message, Subscription

# A server that keeps its time answers well before this has passed, too.
GRACE_SECONDS = 5.0


class _Popped(msgspec.Struct):
    # Plain dicts, and their fields are not checked: that would cost as much as reading them.
    messages: list[Any] = []


_popped = msgspec.json.Decoder(_Popped)


class Popper:
    """Pops from one source again and again."""

    def __init__(self, http: HttpClient, subscription: Subscription) -> None:
        self._http = http
        self._subscription = subscription
        self._key = subscription.affinity_key
        self._last: tuple[int, int, bool] | None = None
        self._path = ""

    async def pop(
        self, batch: int, timeout_millis: int, *, auto_ack: bool = False, attempts: int | None = None
    ) -> list[Message]:
        """Up to `batch` messages; empty when there were none in time."""
        asked = (batch, timeout_millis, auto_ack)
        if asked != self._last:
            self._path, self._last = self._subscription.path(batch, timeout_millis, auto_ack), asked
        answer = await self._http.send(
            "GET",
            self._path,
            seconds=timeout_millis / 1000 + GRACE_SECONDS,
            affinity_key=self._key,
            attempts=attempts,
        )
        return decode_as(_popped, answer.body).messages if answer.body else []


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

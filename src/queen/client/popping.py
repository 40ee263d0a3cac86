"""Pop requests and their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.client.http import HttpClient, decode_as
from queen.client.messages import Message
from queen.client.subscription import Subscription

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

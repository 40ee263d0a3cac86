"""Pop requests and their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.client.http import HttpClient, decode_as
from queen.client.messages import Message
from queen.client.subscription import Subscription

_GRACE_MILLIS = 5000


class _Popped(msgspec.Struct):
    # Plain dicts, and their fields are not checked: that would cost as much as reading them.
    messages: list[Any] = []


_popped = msgspec.json.Decoder(_Popped)


async def pop(
    http: HttpClient,
    subscription: Subscription,
    *,
    batch: int | None = None,
    timeout_millis: int | None = None,
    auto_ack: bool = False,
    attempts: int | None = None,
) -> list[Message]:
    """Pop once; empty when there was nothing in time."""
    millis = subscription.timeout_millis if timeout_millis is None else timeout_millis
    answer = await http.send(
        "GET",
        subscription.path(batch, millis, auto_ack),
        seconds=(millis + _GRACE_MILLIS) / 1000,
        affinity_key=subscription.affinity_key,
        attempts=attempts,
    )
    if not answer.body:
        return []
    return decode_as(_popped, answer.body).messages

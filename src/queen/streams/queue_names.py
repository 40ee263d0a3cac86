"""The name of a queue, from whatever stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTRIBUTES = ("_queue_name", "queue_name", "name")
_KEYS = ("queueName", "queue_name", "name")


def queue_name_of(queue: Any) -> str:
    """The name of `"orders"`, of a client's `queen.queue("orders")`, or of `{"queueName": "orders"}`."""
    if isinstance(queue, str):
        candidates: list[Any] = [queue]
    elif isinstance(queue, Mapping):
        candidates = [queue.get(key) for key in _KEYS]
    else:
        candidates = [getattr(queue, attribute, None) for attribute in _ATTRIBUTES]
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return candidate
    raise ValueError(
        f"{queue!r} does not name a queue: give its name, queen.queue('name') of a client, or {{'queueName': 'name'}}"
    )

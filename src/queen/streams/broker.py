"""The seam to a server: what a stream needs of one, and of a client that pops for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from queen.streams.queue_names import queue_name_of
from queen.streams.records import Message


@dataclass(frozen=True, slots=True)
class PopRequest:
    """What a stream asks its source for."""

    group: str
    batch: int
    partitions: int
    wait_ms: int
    subscription_mode: str | None = None
    subscription_from: str | None = None


class Broker(Protocol):
    """A connection to a Queen server."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, return the JSON of the answer. Raises `StreamsHttpError` when it is not a 2xx."""
        ...

    async def pop(self, queue: str, request: PopRequest) -> list[Message]:
        """Lease messages, waiting for some; empty when none came."""
        ...

    async def close(self) -> None: ...


class Source(Protocol):
    """Where a stream's messages come from."""

    async def pop(self, request: PopRequest) -> list[Message]: ...


class BrokerSource:
    """A queue by its name, popped through the broker itself."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self._broker = broker
        self._queue = queue

    async def pop(self, request: PopRequest) -> list[Message]:
        return await self._broker.pop(self._queue, request)


class BuilderSource:
    """The `queen.queue("name")` of a client, popped through that client."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    async def pop(self, request: PopRequest) -> list[Message]:
        chosen = self._builder.batch(request.batch).wait(True).timeout_millis(request.wait_ms).group(request.group)
        if request.partitions > 1:
            chosen = chosen.partitions(request.partitions)
        if request.subscription_mode:
            chosen = chosen.subscription_mode(request.subscription_mode)
        if request.subscription_from:
            chosen = chosen.subscription_from(request.subscription_from)
        found = chosen.pop()
        messages = await found if inspect.isawaitable(found) else found
        return list(messages or [])


def source_of(queue: Any, broker: Broker) -> Source:
    """A client's queue is popped through its client; a mere name through the broker."""
    if not isinstance(queue, str) and hasattr(queue, "pop") and hasattr(queue, "batch"):
        return BuilderSource(queue)
    return BrokerSource(broker, queue_name_of(queue))

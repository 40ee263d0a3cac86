"""`queen.queue(name)`: the fluent grammar ends in one of these."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from queen.client.consume import Consume
from queen.client.dlq import DlqQuery
from queen.client.engine import Engine
from queen.client.messages import Handler, Items, Message
from queen.client.operation import Operation
from queen.client.push import Push
from queen.client.queue_options import QueueOptions


class QueueBuilder(QueueOptions):
    """One queue and what has been said about it. Words change the builder itself."""

    def __init__(self, engine: Engine, name: str | None = None) -> None:
        self._engine = engine
        if name is not None:
            self._name = name

    def create(self) -> Operation:
        """Create the queue, or give it these options; what it holds stays."""
        self._required("create")
        return Operation(self._engine.http, "POST", "/api/v1/configure", self._configuration())

    def delete(self) -> Operation:
        """Remove the queue with everything in it."""
        path = f"/api/v1/resources/queues/{quote(self._required('delete'), safe='')}"
        return Operation(self._engine.http, "DELETE", path)

    def push(self, items: Items) -> Push:
        """Push `{"data": …}` or a list of such; awaited, it gives the server's result for each.

        `transactionId` makes a push repeatable: the same id twice is one message. Where it is missing, it is made.
        """
        return Push(self._engine.pusher, self._required("push"), self._partition, items, self._buffer)

    async def pop(self) -> list[Message]:
        """Take messages now, or as soon as there are any; they are leased until they are acknowledged."""
        return await self._engine.pop(self._subscription(), auto_ack=self._auto_ack is True)

    def consume(self, handler: Handler, *, signal: asyncio.Event | None = None, transport: str = "http") -> Consume:
        """Call the handler with each message, or each list of them when `batch` is above 1; awaited, it runs.

        A handler that returns has its messages acknowledged; one that raises gets them again. Set `signal` to end.
        """
        return Consume(self._engine, handler, self._subscription(), self._consume_options(), signal, transport)

    async def flush_buffer(self) -> None:
        """Send what is buffered for this partition; raises when that cannot be done, and keeps it."""
        await self._engine.buffers.flush(self._required("flush_buffer"), self._partition)

    def dlq(self, consumer_group: str | None = None) -> DlqQuery:
        """Query the dead letters of this queue, and of one partition if one was chosen."""
        return self._engine.dead_letters(self._required("dlq"), consumer_group, self._partition)

    def _required(self, operation: str) -> str:
        if not self._name:
            raise ValueError(f"Queue name is required for {operation}: queen.queue('name').{operation}(...)")
        return self._name

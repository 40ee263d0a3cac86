"""The way in for items: straight to PostgreSQL, or by way of the log of this host, as their namespaces are set."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from queen.broker.topics.buffer import Buffer
from queen.broker.topics.enqueue import Enqueuer
from queen.broker.topics.quotas import Quotas
from queen.broker.topics.write_modes import WriteModes
from queen.wire.topics import EnqueueItem


class TopicWriter:
    """Stores items, or makes them durable for the flusher to store. A request goes one way as a whole."""

    def __init__(self, modes: WriteModes, quotas: Quotas, enqueuer: Enqueuer, buffer: Buffer) -> None:
        self._modes = modes
        self._quotas = quotas
        self._enqueuer = enqueuer
        self._buffer = buffer

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Take items; gives their ids in the order of the items, a duplicate that of the first with its key."""
        await self._modes.learn()
        if self._modes.takes(items):
            await self._quotas.admit(items)
            return await self._buffer.enqueue(items)
        if self._buffer.engaged:
            await self.let_pass({item.namespace for item in items})
        return await self._enqueuer.enqueue(items)

    async def let_pass(self, namespaces: Collection[str]) -> None:
        """Wait for what was buffered before these namespaces were set to `sync`, so that it is not overtaken."""
        await self._buffer.pass_on(self._modes.synced(namespaces))

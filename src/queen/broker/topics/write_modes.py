"""How namespaces are written to: `sync`, in PostgreSQL before the answer, or `buffered`, by way of a log on disk."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from queen.broker.topics.buffer import Buffer
from queen.broker.topics.enqueue import Enqueuer
from queen.errors import DatabaseUnavailable
from queen.log.quotas import Quotas
from queen.storage.database import Database
from queen.wire.topics import EnqueueItem

log = logging.getLogger(__name__)

SYNC: Final = "sync"
BUFFERED: Final = "buffered"


class WriteModes:
    """Remembers the modes; one that was set by `set` wins over the settings."""

    def __init__(self, database: Database, configured: Mapping[str, str]) -> None:
        self._database = database
        self._configured = dict(configured)
        self._stored: dict[str, str] = {}
        self._buffered: frozenset[str] = frozenset()
        self._loaded = False
        self._changes = 0
        self._judge()

    async def learn(self) -> None:
        """Read the modes if they were changed. While PostgreSQL is away, what was known, or configured, holds."""
        if self._loaded:
            return
        try:
            await self.refresh()
        except DatabaseUnavailable as error:
            log.debug("the write modes of namespaces cannot be read: %s", error)

    def takes(self, items: Sequence[EnqueueItem]) -> bool:
        """Whether a request is buffered: all of it, or nothing.

        An item with a key is not: whether its key is new can be said by PostgreSQL alone.
        """
        buffered = self._buffered
        return bool(buffered) and all(item.namespace in buffered and item.idempotency_key is None for item in items)

    def of(self, namespace: str) -> str:
        return BUFFERED if namespace in self._buffered else SYNC

    def synced(self, namespaces: Collection[str]) -> list[str]:
        """Those of the namespaces that are not buffered, or not any more."""
        return [namespace for namespace in namespaces if namespace not in self._buffered]

    async def set(self, namespace: str, mode: str | None) -> None:
        """Set the mode of a namespace, or (None) let the settings decide."""
        await self._database.fetch("topic_set_mode", namespace, mode)
        await self.refresh()

    async def refresh(self) -> None:
        """Read the modes again."""
        changes = self._changes
        rows = await self._database.fetch("topic_modes")
        self._stored = {row["name"]: row["write_mode"] for row in rows}
        # Who told of a change meanwhile may have meant one that was not read yet.
        self._loaded = changes == self._changes
        self._judge()

    def forget(self) -> None:
        """A mode was changed: they are read again when next needed."""
        self._changes += 1
        self._loaded = False

    def all(self) -> dict[str, str]:
        """Every namespace that has a mode of its own, or one by the settings."""
        return dict(sorted((self._configured | self._stored).items()))

    def _judge(self) -> None:
        modes = self._configured | self._stored
        self._buffered = frozenset(namespace for namespace, mode in modes.items() if mode == BUFFERED)


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

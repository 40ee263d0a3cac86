"""The connection of an application to its server."""

from __future__ import annotations

import functools
from typing import Any

from queen.client.client import Queen
from queen.client.sync import QueenSync
from queen.client.topics.topic import TopicBuilder
from queen.tasks.jobs import Outcomes


class Connection:
    """Clients of a server, created when they are first used."""

    def __init__(self, server: Any, namespace: str, options: dict[str, Any]) -> None:
        self.namespace = namespace
        self._server = server
        self._options = options

    @functools.cached_property
    def queen(self) -> Queen:
        return Queen(self._server, **self._options)

    @functools.cached_property
    def sync(self) -> QueenSync:
        return QueenSync(self._server, **self._options)

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(self.queen, self.namespace)

    def topic(self, *names: str) -> TopicBuilder:
        """Topics of the application."""
        return self.queen.topic(self.namespace, *names)

    async def close(self) -> None:
        """Close what is open; it opens again when it is used."""
        if "queen" in self.__dict__:
            await self.queen.close()
            del self.queen
        if "sync" in self.__dict__:
            self.sync.close()
            del self.sync

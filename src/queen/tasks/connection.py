"""The connection of an application to its server."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from queen.client.client import Queen
from queen.client.sync import QueenSync
from queen.client.topics.topic import TopicBuilder

_KV = "/api/v1/kv"


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

    async def run_kv(self, *operations: dict[str, Any]) -> list[dict[str, Any]]:
        """Read and write keys of the application, in one transaction."""
        return _results(await self.queen.request("POST", _KV, self._placed(operations)))

    def run_kv_sync(self, *operations: dict[str, Any]) -> list[dict[str, Any]]:
        """The same in a program without an event loop."""
        return _results(self.sync.request("POST", _KV, self._placed(operations)))

    def _placed(self, operations: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"operations": [{**one, "ns": self.namespace} for one in operations]}

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


def _results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = answer["results"]
    return results

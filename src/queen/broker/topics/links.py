"""Connections of a lane whose batches may run beside each other."""

from __future__ import annotations

from typing import Any

from queen.storage.database import Database, Link, Record


class Links:
    """As many links as are in use at the same time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: list[Link] = []

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        """Run a named statement on a link that nobody uses."""
        link = self._idle.pop() if self._idle else self._database.link()
        try:
            return await link.fetch(name, *args)
        finally:
            self._idle.append(link)

"""The counters of all queues of a shard: what they hold, what is leased, how far the slowest group is behind.

To count means to look at every partition and cursor, so it is done once for all views that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from queen.single_flight import SharedResult
from queen.storage.database import Database, Record

LARGE: Final = 10_000
"""Views do not wait for the count of a queue with more partitions than this."""


class QueueStats:
    """Rows of `queue_stats`, by the name of the queue. With a cache time of 0 they are counted for each view."""

    def __init__(self, database: Database, most_seconds: float) -> None:
        self._database = database
        self._all = SharedResult(partial(database.fetch, "queue_stats", None), most_seconds)
        self.keep_warm = self._all.keep_warm

    async def __call__(self) -> list[Record]:
        """Of all queues."""
        return await self._all.get()

    async def of(self, queue: str, namespace: str, task: str) -> list[Record]:
        """Of the queues of a name, namespace and task; empty: any."""

        def wanted(row: Record) -> bool:
            return queue in ("", row["name"]) and namespace in ("", row["namespace"]) and task in ("", row["task"])

        if not (queue or namespace or task) or self._large(wanted):
            return [row for row in await self() if wanted(row)]
        found = await self._database.fetch("queue_ids", queue, namespace, task)
        return await self._database.fetch("queue_stats", [row["id"] for row in found])

    async def large(self) -> dict[int, Record]:
        """Of those queues alone that have too many partitions for a view to count them, by their ids."""
        if not self._large(lambda row: True):
            return {}
        return {row["id"]: row for row in await self() if row["partitions"] >= LARGE}

    def _large(self, wanted: Callable[[Record], bool]) -> bool:
        """Whether one of these queues is large, as of the last count."""
        return any(row["partitions"] >= LARGE and wanted(row) for row in self._all.last or ())

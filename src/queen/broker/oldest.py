"""When the oldest messages were stored that groups have before them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypeAlias

from queen.storage.database import Database, Record

Starts: TypeAlias = tuple[list[int], list[int], list[int]]
"""(group, partition, offset), column by column: where groups are to start on partitions they have not met."""

Pair: TypeAlias = tuple[int, int]
"""A group and a queue."""


class Oldest:
    """Finds them by a look at the segments of every partition, and remembers them for those who stay where they are.

    `places` of a pair is a hash of the partitions where the group is behind, and of where it is on each: as long as it
    is the same, so is the oldest message, for the time of a stored message never changes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[Pair, tuple[int, datetime]] = {}

    async def of(self, rows: Sequence[Record], starts: Starts) -> dict[Pair, datetime]:
        """For those of the rows (`group_id`, `queue_id`, `places`) that are behind."""
        behind = {(row["group_id"], row["queue_id"]): row["places"] for row in rows if row["places"] is not None}
        known = {pair: kept for pair in behind if (kept := self._known.get(pair)) and kept[0] == behind[pair]}
        moved = [pair for pair in behind if pair not in known]
        if moved:
            groups, queues = zip(*moved, strict=True)
            for row in await self._database.fetch("oldest_unconsumed", groups, queues, *starts):
                # With the places of this very look: the group may have gone on since the rows were read.
                known[row["group_id"], row["queue_id"]] = (row["places"], row["oldest"])
        self._known = known
        return {pair: oldest for pair, (_, oldest) in known.items()}

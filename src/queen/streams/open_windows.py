"""Which partitions have windows open, as one runner knows it: what the idle flush has to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class OpenPartition:
    """`ends`: when its windows end. `unread`: state was found there whose windows this runner has not seen."""

    id: str
    name: str
    ends: set[int] = field(default_factory=set)
    unread: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    def ripe(self, at: int) -> bool:
        return self.unread or any(end <= at for end in self.ends)


class OpenWindows:
    """Remembers partitions until nothing of them is open."""

    def __init__(self) -> None:
        self._partitions: dict[str, OpenPartition] = {}

    def partition(self, id: str, name: str) -> OpenPartition:
        found = self._partitions.get(id)
        if found is None:
            found = self._partitions[id] = OpenPartition(id, name)
        return found

    def ripe(self, at: int) -> list[OpenPartition]:
        return [partition for partition in self._partitions.values() if partition.ripe(at)]

    def note(self, partition: OpenPartition, closed_to: int | None, still_open: Iterable[int]) -> None:
        """Windows up to `closed_to` were emitted, others opened or left open."""
        # It may have been forgotten while somebody waited for it.
        known = self.partition(partition.id, partition.name)
        if closed_to is not None:
            known.ends = {end for end in known.ends if end > closed_to}
        known.ends.update(still_open)

    def forget_closed(self) -> None:
        """Let go of partitions in which nothing is open and nobody works."""
        for id, partition in list(self._partitions.items()):
            if not partition.ends and not partition.unread and not partition.busy.locked():
                del self._partitions[id]

"""Removing what lies below the floors of partitions, gently."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from queen.broker.janitor.election import Session

STEPS = 100
"""Statements that a run may spend on the same partitions."""
_SHORTEST_PAUSE = 0.002


@dataclass(slots=True)
class Sweep:
    """How far partitions have been swept, and how many messages that were."""

    starts: dict[int, int]
    messages: int = 0
    unfinished: bool = False


class Sweeper:
    """Sweeps partitions, `batch` segments at a time."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def sweep(self, session: Session, ids: list[int]) -> None:
        """Remove what lies below the floors of partitions, or as much of it as a run may."""
        sweep = Sweep(dict.fromkeys(ids, 0))
        for _ in range(STEPS):
            if await self.sweep_some(session, sweep):
                return

    async def sweep_some(self, session: Session, sweep: Sweep) -> bool:
        """Remove one batch; whether that was all."""
        pause = Pause()
        rows = await session.fetch("sweep", list(sweep.starts), list(sweep.starts.values()), self._batch)
        ends = {row["id"]: row["upto"] for row in rows}
        sweep.starts.update(ends)
        sweep.messages += sum(row["messages"] for row in rows)
        if rows:
            await self._remove_traces(session, ends)
            await pause.rest()
        segments: int = sum(row["segments"] for row in rows)
        return segments < self._batch

    async def _remove_traces(self, session: Session, ends: dict[int, int]) -> None:
        """A trace goes with its message."""
        ids, offsets = list(ends), list(ends.values())
        while len(await session.fetch("remove_old_traces", ids, offsets, self._batch)) == self._batch:
            pass


class Pause:
    """Rests as long as a step has taken, so that removing takes no more than half of PostgreSQL's attention."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def rest(self) -> None:
        await asyncio.sleep(max(_SHORTEST_PAUSE, self._loop.time() - self._began))

"""Moves that were requested from this worker: they run in the background after the request is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import asyncpg

from queen.broker.sharding.fleet import connect_fleet
from queen.broker.sharding.move import Mover
from queen.errors import Conflict, QueenError
from queen.storage.database import UNAVAILABLE_ERRORS
from queen.wire.shards import Name

log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 20.0


@dataclass(slots=True)
class Progress:
    """Progress of a move: its phase, and how many messages (of `total`) are copied."""

    phase: str = "connecting"
    done: int = 0
    total: int = 0


class ShardMoves:
    """Runs moves, one of a name at a time."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        self._tasks: dict[Name, asyncio.Task[bool]] = {}
        self._progress: dict[Name, Progress] = {}

    async def move(self, name: Name, to: int) -> bool | None:
        """Move a queue or topic; False: it was there already, None: that goes on. Raises `NotFound` and `Conflict`."""
        if name in self._tasks:
            raise Conflict(f"{name} is being moved already")
        task = self._tasks[name] = asyncio.create_task(self._run(name, to))
        task.add_done_callback(lambda ended: self._ended(name, ended))
        done, _ = await asyncio.wait([task], timeout=_ANSWER_SECONDS)
        return task.result() if done else None

    def progress(self, name: Name) -> Progress | None:
        """How far a move is; None when this worker does not run it."""
        return self._progress.get(name)

    async def stop(self) -> None:
        """Interrupt what runs: it has moved or it has not, and can be moved again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: Name, to: int) -> bool:
        progress = self._progress[name] = Progress()

        def show(phase: str, done: int, total: int) -> None:
            progress.phase, progress.done, progress.total = phase, done, total

        async with connect_fleet(self._dsns) as fleet:
            return await Mover(fleet, show).move(name, to)

    def _ended(self, name: Name, task: asyncio.Task[bool]) -> None:
        self._tasks.pop(name, None)
        self._progress.pop(name, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, (QueenError, asyncpg.PostgresError, *UNAVAILABLE_ERRORS)):
            log.warning("%s was not moved: %s", name, error)
        elif error is not None:
            log.error("%s was not moved", name, exc_info=error)

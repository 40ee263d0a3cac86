"""Being asked to stop, once or impatiently."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("queen.supervisor")


class Stop:
    """`asked` once somebody wants us to stop; `hurry` when they ask again, and do not want to wait."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
            return
        _log.info("stopping")
        self.asked.set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody asks to stop."""
        await first_of(asyncio.sleep(seconds), self.asked.wait())


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these is done, and cancel the others. An error of the one that is done is raised."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

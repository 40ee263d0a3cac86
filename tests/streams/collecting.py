"""What streams put into their sinks, as tests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from queen.streams import Runner, Stream
from tests.support.api import Api


async def drain(api: Api, queue: str, count: int, seconds: float = 20.0) -> list[Any]:
    """The payloads of `count` messages of a queue, each taken once."""
    found: list[Any] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            messages = await api.pop(queue, batch=1000, partitions=100, wait=True, timeout=2000, autoAck=True)
            found += [message["data"] for message in messages]
    return found


@asynccontextmanager
async def running(stream: Stream, query_id: str, url: str, **options: Any) -> AsyncIterator[Runner]:
    """The stream runs while the block does."""
    runner = await stream.run(query_id, url, **{"max_wait_millis": 200} | options)
    try:
        yield runner
    finally:
        await runner.stop()

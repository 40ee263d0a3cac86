"""Ten dashboards that look every second, at 10 000 partitions: they are answered, and pushes go on as before."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from bench.dashboards import FILL, POLLED

from tests.acceptance.served import served
from tests.support.api import Api
from tests.support.database import Connection

SECONDS = 10.0
POLLERS = 10


async def fill(connection: Connection) -> None:
    """100 queues of 100 partitions, each with ten segments of 100 messages, and three groups that lag behind."""
    for statement in FILL:
        await connection.execute(statement)


async def push_for(api: Api, seconds: float) -> float:
    """Messages per second that eight connections push, a hundred at a time."""
    end = time.monotonic() + seconds
    pushed = 0

    async def producer(number: int) -> None:
        nonlocal pushed
        while time.monotonic() < end:
            await api.push("load", *range(100), partition=str(number))
            pushed += 100

    await asyncio.gather(*(producer(number) for number in range(8)))
    return pushed / seconds


@asynccontextmanager
async def pollers(url: str, took: dict[str, list[float]]) -> AsyncIterator[None]:
    """Dashboards that ask for everything once a second."""

    async def poller(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(number / POLLERS)
            while True:
                due = time.monotonic() + 1
                for path in POLLED:
                    begun = time.monotonic()
                    async with session.get(url + path) as answer:
                        assert answer.status == 200 and await answer.read()
                    took[path].append(time.monotonic() - begun)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    tasks = [asyncio.create_task(poller(number)) for number in range(POLLERS)]
    yield
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.soak
async def test_ten_dashboards_do_not_slow_pushes_down(connection: Connection, dsn: str, tmp_path: Path) -> None:
    await fill(connection)
    with served(tmp_path, DATABASE_URLS=dsn, STATS_CACHE_MS="1000") as server:
        api = Api(server.url)
        await push_for(api, 2)
        alone, watched = [], []
        took: dict[str, list[float]] = {path: [] for path in POLLED}
        for _ in range(2):
            alone.append(await push_for(api, SECONDS))
            async with pollers(server.url, took):
                watched.append(await push_for(api, SECONDS))
        await api.close()
    for path, times in took.items():
        print(f"{path:40} {len(times):5} asked, median {statistics.median(times) * 1000:6.0f} ms,", end=" ")
        print(f"slowest {max(times) * 1000:6.0f} ms")
    print(f"pushes alone {max(alone):.0f} messages/s, watched {max(watched):.0f} messages/s")
    assert statistics.median(time for times in took.values() for time in times) < 1.0
    assert max(watched) > 0.6 * max(alone)

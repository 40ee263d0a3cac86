"""Time in tests: what is stored is made older, and the background jobs are run when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import asyncpg

from queen.broker.broker import Broker
from tests.support.api import Api

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


def broker_of(api: Api) -> Broker:
    """The broker behind a server of this process."""
    assert api.worker is not None
    return api.worker.broker


async def clean(api: Api) -> None:
    """Run every background job once, to its end."""
    await broker_of(api).jobs.run_once()


async def age(connection: Connection, seconds: float, *names: str) -> None:
    """Make everything that is stored (in partitions of these names) that much older."""
    ids = await connection.fetch("SELECT id FROM queen.partitions WHERE name = ANY($1) OR $1 = '{}'", list(names))
    for statement in (
        "UPDATE queen.segments SET created_at = created_at - make_interval(secs => $1) WHERE partition_id = ANY($2)",
        "UPDATE queen.partitions SET created_at = created_at - make_interval(secs => $1),"
        " last_at = last_at - make_interval(secs => $1) WHERE id = ANY($2)",
        "UPDATE queen.cursors SET created_at = created_at - make_interval(secs => $1),"
        " last_consumed_at = last_consumed_at - make_interval(secs => $1),"
        " lease_acquired_at = lease_acquired_at - make_interval(secs => $1) WHERE partition_id = ANY($2)",
    ):
        await connection.execute(statement, seconds, [row["id"] for row in ids])


async def until(condition: Callable[[], object | Awaitable[object]], seconds: float = 100.0) -> None:
    """Poll until the condition, a function or a coroutine function, is true; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if await result if isinstance(result, Awaitable) else result:
                return
            await asyncio.sleep(0.01)


async def until_parked(api: Api, count: int | None = None) -> None:
    """Wait until so many pops wait on this server; without a number, until any does."""
    popper = broker_of(api).popper
    await until(lambda: popper.parked > 0 if count is None else popper.parked == count)


async def is_inbox_empty(connection: Connection) -> bool:
    """Whether everything that was pushed by SQL has been appended, or refused."""
    return not await connection.fetchval("SELECT EXISTS (SELECT FROM queen.inbox)")


def block_until(condition: Callable[[], object], what: str, seconds: float = 100.0) -> None:
    """`until` for threads without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {seconds:.0f} s")
        time.sleep(0.05)

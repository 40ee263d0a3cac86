"""Time in tests: what is stored is made older, and the background jobs are run when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import asyncpg

from queen.broker.broker import Broker
from tests.api import Api

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


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait for what can only be asked for, at most so long."""
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"still not so after {seconds} s")

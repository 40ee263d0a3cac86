"""What the driver's errors mean for whoever asked."""

from __future__ import annotations

import asyncpg
import pytest

from queen.errors import DatabaseUnavailable, Overloaded
from queen.storage.database import Database
from tests.database import Connection


async def test_a_statement_that_is_refused_leaves_the_connection_as_it_was(dsn: str) -> None:
    """Others use it too, so an error of the statement is not mistaken for one of the connection."""
    database = Database(dsn)
    link = database.link()
    before = await link.fetch("lock_partitions", [])
    for fetch in (link.fetch, database.fetch):
        with pytest.raises(asyncpg.DataError, match="out of int64 range"):
            await fetch("lock_partitions", [1 << 70])
        assert await fetch("lock_partitions", []) == before
    await database.close()


async def test_a_lock_that_somebody_holds_is_worth_another_try(dsn: str, connection: Connection) -> None:
    await connection.execute("INSERT INTO queen.queues (name) VALUES ('q')")
    await connection.execute("INSERT INTO queen.partitions (queue_id, name) VALUES (1, 'p')")
    database = Database(dsn, lock_timeout_ms=50)
    link = database.link()
    async with connection.transaction():
        await connection.execute("SELECT FROM queen.partitions FOR UPDATE")
        for fetch in (link.fetch, database.fetch):
            with pytest.raises(Overloaded, match="try again"):
                await fetch("lock_partitions", [1])
    async with link.transaction():
        assert len(await link.fetch("lock_partitions", [1])) == 1
    await database.close()


async def test_a_server_that_is_not_there_is_away() -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/nothing")
    for fetch in (database.link().fetch, database.fetch):
        with pytest.raises(DatabaseUnavailable, match="not reachable"):
            await fetch("ping")
    await database.close()

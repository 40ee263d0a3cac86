"""A transaction that stays open somewhere in the database must not make the queues slower and slower."""

from __future__ import annotations

import asyncpg
import pytest

from queen.broker.maintenance.election import Session
from queen.broker.maintenance.rewrite import Rewrite
from queen.storage.database import Connection
from tests.support.api import Api


async def churn(connection: Connection, times: int) -> None:
    """As many versions of every row as so many batches make, each in a transaction of its own."""
    await connection.execute(
        f"CREATE OR REPLACE PROCEDURE churn() LANGUAGE plpgsql AS $p$ BEGIN FOR i IN 1..{times} LOOP"
        " UPDATE queen.partitions SET last_at = last_at; UPDATE queen.cursors SET attempts = attempts; COMMIT;"
        " END LOOP; END $p$"
    )
    await connection.execute("CALL churn()")
    await connection.execute("SELECT pg_stat_force_next_flush()")


async def rewrite(api: Api) -> None:
    assert api.worker is not None
    session = await Session.open(api.worker.broker.database)
    await Rewrite().run(session)
    await session.close()


async def sizes(connection: Connection) -> dict[str, int]:
    rows = await connection.fetch(
        "SELECT relname, pg_relation_size(oid) AS size FROM pg_class"
        " WHERE oid IN ('queen.partitions'::regclass, 'queen.cursors'::regclass)"
    )
    return {row["relname"]: row["size"] for row in rows}


async def push_pop_ack(api: Api, name: str) -> None:
    await api.push("orders", name)
    messages = await api.pop("orders")
    assert [message["data"] for message in messages] == [name]
    await api.ack(messages)


async def test_versions_that_vacuum_must_keep_are_left_behind(api: Api, dsn: str, connection: Connection) -> None:
    await push_pop_ack(api, "before")
    reader = await asyncpg.connect(dsn)
    transaction = reader.transaction(isolation="repeatable_read")
    await transaction.start()
    await reader.fetchval("SELECT pg_current_xact_id()")
    await churn(connection, 5000)
    bloated = await sizes(connection)
    await rewrite(api)
    cleaned = await sizes(connection)
    assert all(size > 200_000 for size in bloated.values())
    assert all(size <= 16_384 for size in cleaned.values())
    await push_pop_ack(api, "after")
    await transaction.rollback()
    await reader.close()
    await push_pop_ack(api, "at last")


async def test_without_a_long_transaction_vacuum_is_enough(
    api: Api, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await push_pop_ack(api, "before")
    caplog.set_level("INFO")
    node = await connection.fetchval("SELECT pg_relation_filenode('queen.cursors')")
    await churn(connection, 5000)
    await rewrite(api)
    assert await connection.fetchval("SELECT pg_relation_filenode('queen.cursors')") == node
    assert "rewrote" not in caplog.text
    await push_pop_ack(api, "after")


async def test_a_table_that_the_long_transaction_reads_is_left_alone(
    api: Api, dsn: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await push_pop_ack(api, "before")
    reader = await asyncpg.connect(dsn)
    transaction = reader.transaction(isolation="repeatable_read")
    await transaction.start()
    assert await reader.fetchval("SELECT count(*) FROM queen.cursors") == 1
    assert await reader.fetchval("SELECT count(*) FROM queen.partitions") == 1
    await churn(connection, 5000)
    await rewrite(api)
    assert await reader.fetchval("SELECT count(*) FROM queen.cursors") == 1
    assert "held back by pid" in caplog.text
    await push_pop_ack(api, "after")
    await transaction.rollback()
    await reader.close()

"""How errors of the driver are translated for callers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import asyncpg
import pytest

from queen.errors import DatabaseUnavailable, Overloaded
from queen.storage.database import Database, Transaction, TransactionAborted, unavailable_reason
from tests.support.ageing import until
from tests.support.database import Connection


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


async def test_a_held_lock_is_tried_again(dsn: str, connection: Connection) -> None:
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


async def test_a_statement_that_lost_a_deadlock_is_repeated_and_a_transaction_says_so(
    dsn: str, connection: Connection
) -> None:
    await connection.execute("INSERT INTO queen.queues (name) VALUES ('q')")
    await connection.execute("INSERT INTO queen.partitions (queue_id, name) VALUES (1, 'p'), (1, 'q')")
    # The other session is to give way: it looks for a deadlock first.
    await connection.execute("SET deadlock_timeout = '5s'")
    database = Database(dsn, lock_timeout_ms=0, statement_timeout_ms=0)
    link = database.link()

    async def waits() -> bool:
        found: bool = await connection.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return found

    async def deadlocked(work: Callable[[], Awaitable[object]]) -> object:
        """Run something that locks both partitions in order beside a session that locks them the other way round."""
        while True:
            try:
                async with connection.transaction():
                    await connection.execute("SELECT FROM queen.partitions WHERE id = 2 FOR UPDATE")
                    working = asyncio.ensure_future(work())
                    await until(waits)
                    await connection.execute("SELECT FROM queen.partitions WHERE id = 1 FOR UPDATE")
                return await working
            except asyncpg.DeadlockDetectedError:
                # The machine was so busy that the other had looked before.
                await working

    async def lock_in(begin: Callable[[], AbstractAsyncContextManager[Transaction | None]]) -> object:
        async with begin() as own:
            return await (own or link).fetch("lock_partitions", [1, 2])

    async with asyncio.timeout(60):
        for fetch in (link.fetch, database.fetch):
            lock_both = partial(fetch, "lock_partitions", [1, 2])
            assert await deadlocked(lock_both) == await lock_both()
        for begin in (link.transaction, database.transaction):
            with pytest.raises(TransactionAborted, match=r"try again soon \(deadlock detected\)$"):
                await deadlocked(partial(lock_in, begin))
    await database.close()


async def test_a_server_that_is_not_there_is_away() -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/nothing")
    for fetch in (database.link().fetch, database.fetch):
        with pytest.raises(DatabaseUnavailable, match="is unavailable; reconnecting"):
            await fetch("ping")
    with pytest.raises(DatabaseUnavailable) as raised:
        await database.connect()
    # Who repeats why adds nothing to it.
    assert "unavailable" not in unavailable_reason(raised.value)
    await database.close()


def test_why_postgresql_is_unavailable_is_one_line() -> None:
    starting = asyncpg.CannotConnectNowError(
        "the database system is starting up\nDETAIL:  Recovery goes on.\nHINT:  Wait."
    )
    assert unavailable_reason(starting) == "the database system is starting up"
    try:
        raise DatabaseUnavailable("PostgreSQL is unavailable; reconnecting (…)") from starting
    except DatabaseUnavailable as error:
        assert unavailable_reason(error) == "the database system is starting up"
    assert unavailable_reason(asyncpg.InternalClientError("cannot switch to state 12")) == "connection lost"
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert unavailable_reason(missing) == "nothing listens on its Unix socket"
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 5432)")
    assert unavailable_reason(refused) == "connection refused"
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert unavailable_reason(unknown) == "name or service not known"


async def test_a_pool_that_is_all_in_use_says_nothing_about_postgresql(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.storage.database._POOL_SECONDS", 0.0)
    database = Database(dsn, pool_size=1, connect_timeout=0.3)
    await database.fetch("ping")
    async with database.connection():
        with pytest.raises(Overloaded, match=r"all 1 connections to PostgreSQL .DB_POOL_SIZE. are in use"):
            await database.fetch("ping")
    assert await database.fetch("ping")
    await database.close()


async def _kill(connection: Connection) -> int:
    """End the sessions of servers on the database; how many there were."""
    return len(
        await connection.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'queen%'"
        )
    )


async def test_a_killed_session_makes_the_database_unavailable_and_never_shows_the_state_of_the_driver(
    dsn: str, connection: Connection
) -> None:
    database = Database(dsn)
    link = database.link()
    await connection.execute("INSERT INTO queen.queues (name) VALUES ('q')")
    errors: list[BaseException] = []
    kills = 0

    async def use(work: Callable[[], Awaitable[object]]) -> None:
        while kills < 200:
            try:
                await work()
            except Exception as error:
                errors.append(error)

    async def in_link_transaction() -> None:
        async with link.transaction():
            for _ in range(5):
                await link.fetch("lock_queue", 1)

    async def in_pool_transaction() -> None:
        async with database.transaction() as transaction:
            for _ in range(5):
                await transaction.fetch("queues_by_names", ["q"])

    async def kill() -> None:
        nonlocal kills
        while kills < 200:
            kills += await _kill(connection)
            await asyncio.sleep(0.002)

    works = (in_link_transaction, *[in_pool_transaction] * 4, *[lambda: database.fetch("ping")] * 4)
    await asyncio.gather(kill(), *map(use, works))
    assert errors
    assert {type(error) for error in errors} == {DatabaseUnavailable}
    told = {str(error) for error in errors}
    assert not [text for text in told if "state" in text or "operation" in text or "released" in text], told
    await in_link_transaction()
    await in_pool_transaction()
    await database.close()


async def test_a_transaction_whose_session_was_killed_does_not_go_on_in_another(
    dsn: str, connection: Connection
) -> None:
    database = Database(dsn)
    link = database.link()
    with pytest.raises(DatabaseUnavailable):
        async with link.transaction():
            await link.fetch("create_group", "before")
            assert await _kill(connection) == 1
            await asyncio.sleep(0.05)
            await link.fetch("create_group", "after")
    assert await connection.fetch("SELECT name FROM queen.groups WHERE name IN ('before', 'after')") == []
    with pytest.raises(DatabaseUnavailable):
        async with link.transaction():
            await link.fetch("create_group", "before")
            database.mark_down("a test says so")
            database.mark_up()
            await link.fetch("create_group", "after")
    assert await connection.fetch("SELECT name FROM queen.groups WHERE name IN ('before', 'after')") == []
    async with link.transaction():
        await link.fetch("create_group", "after")
    assert len(await connection.fetch("SELECT name FROM queen.groups WHERE name = 'after'")) == 1
    await database.close()


async def test_a_session_that_stands_still_is_given_up_for_another(dsn: str, connection: Connection) -> None:
    database = Database(dsn, statement_timeout_ms=100, application_name="stopped")
    link = database.link()
    await link.fetch("ping")
    pid = await connection.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'stopped'")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DatabaseUnavailable, match="no answer in time"):
            await link.fetch("ping")
        assert await link.fetch("ping")
    finally:
        os.kill(pid, signal.SIGCONT)
    await database.close()


async def test_a_connection_of_unknown_state_does_not_go_back_to_the_pool(dsn: str) -> None:
    database = Database(dsn, pool_size=1)
    pids = []
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="connection lost"):
            async with database.connection() as pooled:
                pids.append(pooled.get_server_pid())
                raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")
    assert pids[0] != pids[1]
    await database.close()


async def test_a_cancelled_transaction_is_cancelled_and_leaves_nothing_behind(dsn: str, connection: Connection) -> None:
    database = Database(dsn)
    link = database.link()

    async def begin(started: asyncio.Event) -> None:
        async with link.transaction():
            await link.fetch("create_group", "half")
            started.set()
            await asyncio.sleep(3600)

    started = asyncio.Event()
    task = asyncio.create_task(begin(started))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with link.transaction():
        await link.fetch("create_group", "whole")
    assert await connection.fetchval("SELECT array_agg(name) FROM queen.groups WHERE name IN ('half', 'whole')") == [
        "whole"
    ]
    await database.close()

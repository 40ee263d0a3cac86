"""Background jobs that find a table locked, or PostgreSQL too busy."""

from __future__ import annotations

from typing import Any

import pytest

from queen.broker.maintenance.election import Election
from queen.errors import Overloaded
from queen.storage.database import AdvisoryLock, Database, Record
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.database import Connection


async def test_a_job_that_waits_too_long_for_a_lock_says_so_in_a_line_and_tries_again(
    start_server: StartServer, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    api = await start_server(retention_interval=100, db_lock_timeout=50)
    await api.configure("q", retentionEnabled=True, retentionSeconds=1)
    await api.push("q", 1)

    def said() -> bool:
        return any("its next run tries again" in record.getMessage() for record in caplog.records)

    async with connection.transaction():
        await connection.execute("LOCK TABLE queen.partitions IN ACCESS EXCLUSIVE MODE")
        await until(said)
    (first, *_) = (record for record in caplog.records if "its next run tries again" in record.getMessage())
    assert (first.levelname, first.exc_info) == ("WARNING", None)
    assert "canceling statement due to lock timeout" in first.getMessage()
    caplog.clear()
    # The lock is gone: what is old is removed after all.
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '1 hour'")

    async def removed() -> bool:
        return not await connection.fetchval("SELECT count(*) FROM queen.segments")

    await until(removed)


@pytest.mark.parametrize(
    ("lock", "line"),
    [
        ("ALTER SEQUENCE queen.inbox_awake CACHE 1", "inbox: append failed"),
        ("LOCK TABLE queen.timers IN ACCESS EXCLUSIVE MODE", "timers could not be fired"),
    ],
)
async def test_what_runs_on_the_elected_worker_waits_for_a_lock_without_a_traceback(
    start_server: StartServer, connection: Connection, caplog: pytest.LogCaptureFixture, lock: str, line: str
) -> None:
    async with connection.transaction():
        await connection.execute(lock)
        await start_server(db_lock_timeout=50)
        await until(lambda: any(line in record.getMessage() for record in caplog.records))
    (first, *_) = (record for record in caplog.records if line in record.getMessage())
    assert (first.levelname, first.exc_info) == ("WARNING", None)
    assert "lock timeout" in first.getMessage()


class BusyOnce(Database):
    """Does not answer the first statement in time."""

    is_busy = True

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        if self.is_busy:
            self.is_busy = False
            raise Overloaded("PostgreSQL could not do it in time, so nothing was done; try again soon")
        return await super().fetch(name, *args)


async def test_a_candidate_stands_again_after_postgresql_was_too_busy(dsn: str) -> None:
    database = BusyOnce(dsn)
    session = await Election(database, AdvisoryLock.BACKGROUND_JOBS).win()
    assert not database.is_busy
    await session.close()
    await database.close()

"""Background jobs that find a table locked."""

from __future__ import annotations

import pytest

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

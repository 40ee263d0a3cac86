"""Queen runs on every PostgreSQL from 15 to 18. The other tests run on 18."""

from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.errors import SchemaTooNew
from queen.server.worker import Worker
from queen.settings import Settings
from queen.storage.migrate import migrate
from tests.support.api import Api

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="module", params=[15, 16])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    binaries = None
    if request.param == 15:
        if not (DEBIAN_15 / "postgres").exists():
            pytest.skip("PostgreSQL 15 is not installed here (Debian: apt install postgresql-15)")
        binaries = DEBIAN_15
    directory = tmp_path_factory.mktemp(f"postgres{request.param}") / "pg"
    with EmbeddedPostgres(directory, request.param, {"fsync": "off"}, binaries=binaries) as server:
        yield server


async def test_messages_go_through_an_older_postgres(older: EmbeddedPostgres, tmp_path: Path) -> None:
    await migrate(older.dsn())
    settings = Settings.from_env({}, num_workers=1, host="127.0.0.1", database_urls=(older.dsn(),))
    worker = Worker(settings, 0, tmp_path, port=0)
    await worker.start()
    api = Api(f"http://127.0.0.1:{worker.port}", worker)
    try:
        await api.configure("jobs", retryLimit=0)
        await api.push("jobs", 1, 2, 3, ids=["a", "b", "c"])
        (again,) = await api.push("jobs", 1, ids=["a"])
        assert again["status"] == "duplicate"
        messages = await api.pop("jobs", batch=3)
        results = await api.ack(messages, ["completed", "failed", "completed"], error="broken")
        assert [result["dlq"] for result in results] == [False, True, False]
        assert (await api.call("GET", "/api/v1/dlq", queue="jobs")).body["total"] == 1
        await api.push("jobs", 4, partition="other")
        (message,) = await api.pop("jobs", autoAck=True)
        assert message["data"] == 4
        connection = await asyncpg.connect(older.dsn())
        await connection.execute("SELECT queen.push('by-sql', 'p', '5'), queen.enqueue('ns', 't', '6')")
        await connection.close()
        (message,) = await api.pop("by-sql", wait=True)
        assert message["data"] == 5
        for path in ("resources/queues/jobs", "resources/overview", "consumer-groups", "messages", "status/queues"):
            answer = await api.call("GET", f"/api/v1/{path}")
            assert answer.status in (200, 404), (path, answer)
    finally:
        await api.close()
        await worker.stop()


async def test_migrating_twice_changes_nothing_and_a_newer_schema_is_refused(older: EmbeddedPostgres) -> None:
    await migrate(older.dsn())
    await migrate(older.dsn())
    connection = await asyncpg.connect(older.dsn())
    try:
        await connection.execute("INSERT INTO queen.schema_migrations (version, name) VALUES (9999, 'future')")
        with pytest.raises(SchemaTooNew, match=r"schema version 9999.*install the newer Queen"):
            await migrate(older.dsn())
        await connection.execute("DELETE FROM queen.schema_migrations WHERE version = 9999")
    finally:
        await connection.close()

"""Everything is copied to another PostgreSQL, by the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.broker.maintenance.database_copy import EXCLUDABLE
from queen.embedded import EmbeddedPostgres
from tests.conftest import StartServer
from tests.support.ageing import Connection, until
from tests.support.api import Answer, Api
from tests.support.databases import as_target, create_database
from tests.support.topic_api import TopicApi, item

PASSWORD = "correct horse"
_MIGRATION = "/api/v1/migration"


def target_of(dsn: str, **changes: Any) -> dict[str, Any]:
    return as_target(dsn, **{"password": PASSWORD, **changes})


@pytest.fixture
async def target(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """An empty database."""
    name = await create_database(postgres, "template1")
    yield postgres.dsn(name)
    admin = await asyncpg.connect(postgres.dsn())
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def post(api: Api, what: str, body: Any = None) -> Answer:
    return await api.call("POST", f"{_MIGRATION}/{what}", body)


async def status(api: Api) -> Any:
    answer = await api.call("GET", f"{_MIGRATION}/status")
    assert answer.status == 200, answer
    return answer.body


async def ended(api: Api) -> Any:
    """How the copy that runs ends."""

    async def over() -> bool:
        return (await status(api))["status"] not in ("dumping", "restoring")

    await until(over)
    return await status(api)


async def rest(api: Api, connection: Connection) -> None:
    """Both modes are on, and have been for a while."""
    for path in ("", "/pop"):
        assert (await api.call("POST", f"/api/v1/system/maintenance{path}", {"enabled": True})).status == 200
    await connection.execute("UPDATE queen.system_state SET updated_at = updated_at - interval '1 minute'")


@asynccontextmanager
async def held(connection: Connection) -> AsyncIterator[None]:
    """A copy that begins meanwhile cannot read all tables."""
    async with connection.transaction():
        await connection.execute("LOCK TABLE queen.traces IN ACCESS EXCLUSIVE MODE")
        yield


async def test_everything_is_copied_and_served_from_where_groups_stood(
    start_server: StartServer, connection: Connection, target: str, tmp_path: Path
) -> None:
    first, second = [await start_server(worker_id=number, num_workers=2) for number in (0, 1)]
    await first.push("orders", *range(10), partition="a", ids=[f"t-{number}" for number in range(10)])
    taken = await first.pop("orders", consumerGroup="g", batch=4)
    await first.ack(taken, group="g")
    await first.push("broken", "x")
    poison = await first.pop("broken", consumerGroup="g")
    await first.call("POST", "/api/v1/configure", {"queue": "broken", "options": {"retryLimit": 0}})
    await first.ack(poison, group="g", status="failed", error="no")
    await TopicApi(first).enqueue(*(item(number, "mail", "shop") for number in range(3)))
    trace = {"transactionId": "t-1", "partitionId": taken[0]["partitionId"], "data": {"text": "seen"}}
    assert (await first.call("POST", "/api/v1/traces", trace)).status == 201
    body = target_of(target)

    tested = await post(first, "test-connection", body)
    assert tested.body["success"] is True
    assert tested.body["message"] == "Connection successful"
    assert tested.body["version"].startswith("PostgreSQL ")
    assert await status(first) == {"status": "idle", "currentStep": "", "elapsedSeconds": 0}
    refused = await post(first, "start", body)
    assert refused.status == 409
    assert "push and pop maintenance must both be on" in refused.body["error"]
    await rest(first, connection)
    started = await post(first, "start", body | {"excludeTableData": ["traces"]})
    assert (started.status, started.body["status"]) == (202, "started")
    assert PASSWORD not in str(started.body)
    # Who asked for it has left; the other worker knows how it goes on.
    await first.close()
    complete = await ended(second)
    assert complete["status"] == "complete", complete
    assert complete["elapsedSeconds"] > 0
    assert "dumping contents of table" in complete["dumpOutput"]
    assert "queen.segments" in complete["restoreOutput"]

    for _ in range(2):
        compared = await post(second, "validate", body)
        assert (compared.status, compared.body["success"]) == (200, True)
        tables = {one["table"]: one for one in compared.body["tables"]}
        assert [one for one in tables.values() if not one["match"]] == []
        assert compared.body["allMatch"] is True
    assert len(tables) == await connection.fetchval(
        "SELECT count(*) FROM pg_tables WHERE schemaname IN ('queen', 'queen_proxy')"
    )
    assert (tables["dead_letters"]["sourceCount"], tables["dead_letters"]["targetCount"]) == (1, 1)
    assert (tables["traces"]["sourceCount"], tables["traces"]["targetCount"]) == (1, 0)
    assert tables["topic_items"]["targetCount"] == 3
    there = await asyncpg.connect(target)
    await there.execute("DELETE FROM queen.topic_items WHERE id IN (SELECT min(id) FROM queen.topic_items)")
    found = (await post(second, "validate", body)).body
    assert found["allMatch"] is False
    assert [one["table"] for one in found["tables"] if not one["match"]] == ["topic_items"]
    await there.close()

    for row in await connection.fetch("SELECT action, object, before::text AS b, after::text AS a FROM queen.audit"):
        assert PASSWORD not in str(dict(row))
    noted = await connection.fetchval("SELECT after FROM queen.audit WHERE action LIKE '%migration/start'")
    assert '"password": "***"' in noted
    assert PASSWORD not in await connection.fetchval(
        "SELECT value::text FROM queen.system_state WHERE key = 'migration'"
    )

    new = await start_server(database_urls=(target,), queen_data_dir=tmp_path / "new")
    assert (await status(new))["status"] == "idle"
    assert (await new.call("GET", "/api/v1/system/maintenance")).body["popMaintenanceMode"] is True
    for path in ("", "/pop"):
        await new.call("POST", f"/api/v1/system/maintenance{path}", {"enabled": False})
    others = await new.pop("orders", consumerGroup="g", batch=10)
    assert [message["data"] for message in others] == [4, 5, 6, 7, 8, 9]
    (again,) = await new.push("orders", 0, partition="a", ids=["t-0"])
    assert again["status"] == "duplicate"
    assert (await new.call("GET", "/api/v1/dlq", queue="broken")).body["total"] == 1
    refused = await post(second, "start", body)
    assert refused.status == 409
    assert "a server uses the target" in refused.body["error"]
    assert (await post(second, "reset")).body == {"status": "idle", "message": "Migration state reset"}
    assert (await status(second))["status"] == "idle"
    assert new.worker is not None
    await new.worker.stop()


async def test_one_copy_runs_at_a_time_and_ends_with_its_worker(api: Api, connection: Connection, target: str) -> None:
    body = target_of(target)
    await rest(api, connection)
    async with held(connection):
        assert (await post(api, "start", body)).status == 202
        assert (await status(api))["status"] == "dumping"
        again = await post(api, "start", body)
        assert (again.status, again.body) == (409, {"error": "Migration already in progress"})
        reset = await post(api, "reset")
        assert (reset.status, reset.body) == (409, {"error": "Cannot reset while migration is in progress"})
        assert api.worker is not None
        await api.worker.api.database_copy.stop()
    stopped = await status(api)
    assert (stopped["status"], stopped["error"]) == ("error", "the server was stopped; start again")
    # As a worker leaves it that is killed: its session is gone, and with it the lock.
    await connection.execute(
        """UPDATE queen.system_state SET value = '{"status": "restoring"}' WHERE key = 'migration'"""
    )
    # PostgreSQL may not have ended the session of the copy yet.
    dead = await ended(api)
    assert dead["status"] == "error"
    assert "has ended before it was complete" in dead["error"]
    # The next one replaces what the last one left.
    there = await asyncpg.connect(target)
    await there.execute("CREATE SCHEMA queen; CREATE TABLE queen.leftover ()")
    await there.close()
    assert (await post(api, "start", body)).status == 202
    assert (await ended(api))["status"] == "complete"
    assert (await post(api, "validate", body)).body["allMatch"] is True


async def test_a_copy_without_its_snapshot_fails_with_the_cause(api: Api, connection: Connection, target: str) -> None:
    await rest(api, connection)
    async with held(connection):
        assert (await post(api, "start", target_of(target))).status == 202
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'queen migration' AND datname = current_database()"
        )
        failed = await ended(api)
    assert failed["status"] == "error"

    # The lock is free a moment before the worker has stored why it stopped.
    async def caused() -> bool:
        return str((await status(api))["error"]).startswith("the source could not be read: ")

    await until(caused)


async def test_refused_targets(api: Api, connection: Connection, target: str, dsn: str) -> None:
    await rest(api, connection)
    same = await post(api, "start", target_of(dsn))
    assert (same.status, same.body["error"]) == (
        400,
        "the target is the database that this server runs on; name another one",
    )
    for group in ("messages", "segments", ""):
        unknown = await post(api, "start", target_of(target, excludeTableData=["traces", group]))
        assert unknown.status == 400
        assert unknown.body["error"].endswith(f"allowed: {', '.join(EXCLUDABLE)}")
    absent = target_of(target, database="absent")
    for body, error in ((absent, 'database "absent" does not exist'), (target_of(target, port="1"), "nothing listens")):
        tested = await post(api, "test-connection", body)
        assert (tested.status, tested.body["success"], tested.body["message"]) == (200, False, "Connection failed")
        assert error in tested.body["error"]
        started = await post(api, "start", body)
        assert started.status == 400
        assert error in started.body["error"]
        compared = await post(api, "validate", body)
        assert compared.status == 400
        assert error in compared.body["error"]
    assert (await status(api))["status"] == "idle"


async def test_a_password_is_checked_and_rights_of_the_target_are_needed(
    api: Api, connection: Connection, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.execute(f"CREATE ROLE migrator LOGIN PASSWORD '{PASSWORD}'")
    hba = Path(await connection.fetchval("SHOW hba_file"))
    before = await asyncio.to_thread(hba.read_text)
    await asyncio.to_thread(hba.write_text, f"local all migrator scram-sha-256\n{before}")
    await connection.fetch("SELECT pg_reload_conf()")
    # What the server itself is set up for is not for the target.
    monkeypatch.setenv("PGPASSWORD", "another")
    monkeypatch.setenv("PGOPTIONS", "-c nonsense=1")
    try:
        wrong = target_of(target, user="migrator", password="wrong")

        async def refused() -> bool:
            return "password authentication failed" in str((await post(api, "test-connection", wrong)).body)

        await until(refused)
        monkeypatch.delenv("PGOPTIONS")
        right = target_of(target, user="migrator")
        assert (await post(api, "test-connection", right)).body["success"] is True
        await rest(api, connection)
        assert (await post(api, "start", wrong)).status == 400
        assert (await post(api, "start", right)).status == 202
        failed = await ended(api)
        assert failed["status"] == "error"
        assert failed["error"].startswith("pg_restore ended with 1: ")
        assert "permission denied for database" in failed["error"]
        secure = await post(api, "test-connection", target_of(target, user="migrator", host="127.0.0.1", ssl=True))
        assert secure.body["success"] is False
    finally:
        await asyncio.to_thread(hba.write_text, before)
        await connection.fetch("SELECT pg_reload_conf()")
        await connection.execute("DROP ROLE migrator")


async def test_several_shards_are_not_copied(
    start_server: StartServer, dsn: str, target: str, postgres: EmbeddedPostgres
) -> None:
    name = await create_database(postgres)
    api = await start_server(database_urls=(dsn, postgres.dsn(name)))
    for what in ("start", "validate"):
        answer = await post(api, what, target_of(target))
        assert answer.status == 409
        assert "queen shards move" in answer.body["error"]
    assert (await status(api))["status"] == "idle"

"""What docs/backup.md says, done: what comes back is consistent, and goes on where it was."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.embedded.account import account_for
from queen.storage.migrate import migrate
from tests.deploy.postgres_tools import as_embedded, cluster_of, postgres_tool, running
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import stored_ids


async def push(api: Api, *numbers: int, queue: str = "orders") -> list[Any]:
    """Messages whose transactionId is their number."""
    answers: list[Any] = await api.push(queue, *numbers, ids=[str(number) for number in numbers])
    return answers


async def consume(api: Api, count: int, status: str = "completed") -> list[int]:
    messages = await api.pop("orders", consumerGroup="billing", batch=count)
    await api.ack(messages, status, group="billing", error="broken" if status == "dlq" else None)
    return [message["data"] for message in messages]


async def ids_in(dsn: str) -> list[int]:
    connection = await asyncpg.connect(dsn)
    try:
        return [int(name) for name in await stored_ids(connection, "orders")]
    finally:
        await connection.close()


async def test_a_dump_taken_under_load_is_restored_and_goes_on(
    postgres: EmbeddedPostgres, dsn: str, tmp_path: Path
) -> None:
    dump = tmp_path / "queen.dump"
    async with running(dsn, tmp_path / "before") as api:
        await push(api, *range(100))
        assert await consume(api, 10) == list(range(10))
        assert await consume(api, 1, "dlq") == [10]
        assert len(await api.pop("orders", consumerGroup="billing", batch=5)) == 5  # Leased, and never acked.

        answered: list[int] = []
        over = asyncio.Event()

        async def producing() -> None:
            number = 100
            while not over.is_set():
                await push(api, number)
                answered.append(number)
                number += 1

        producer = asyncio.create_task(producing())
        await until(lambda: _is(len(answered) > 5))
        before = len(answered)
        await postgres_tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={dsn}")
        await until(lambda: _is(len(answered) > before + 5))
        over.set()
        await producer

    restored = postgres.dsn("restored")
    await postgres_tool("createdb", f"--maintenance-db={postgres.dsn()}", "restored")
    try:
        await postgres_tool("pg_restore", "--exit-on-error", "--jobs=2", f"--dbname={restored}", dump)
        # Everything that was answered before the dump, in order and without a gap; and a prefix of what came later.
        kept = await ids_in(restored)
        assert kept == list(range(len(kept)))
        assert len(kept) >= 100 + before
        async with running(restored, tmp_path / "after") as api:
            answer = await api.call("GET", "/api/v1/dlq", queue="orders")
            assert [letter["data"] for letter in answer.body["messages"]] == [10]
            (again,) = await push(api, 50)
            assert again["status"] == "duplicate"
            # The lease came back with the dump; its consumer did not.
            await api.call("POST", "/api/v1/consumer-groups/billing/queues/orders/seek", {"timestamp": _EPOCH})
            everything = await consume(api, 10_000)
            assert everything == kept
            (new,) = await push(api, len(kept))
            assert new["status"] == "queued"
    finally:
        await postgres_tool("dropdb", "--force", f"--maintenance-db={postgres.dsn()}", "restored")


async def test_a_dump_replaces_the_schema_of_the_database_it_came_from(dsn: str, tmp_path: Path) -> None:
    dump = tmp_path / "queen.dump"
    await postgres_tool("psql", "--no-psqlrc", "--command=DROP SCHEMA cleaning CASCADE", dsn)
    async with running(dsn, tmp_path / "before") as api:
        await push(api, *range(20))
        await consume(api, 7)
        await postgres_tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={dsn}")
        await push(api, *range(20, 30))
        await consume(api, 20)
    await postgres_tool("psql", "--no-psqlrc", "--command=DROP SCHEMA queen, queen_proxy CASCADE", dsn)
    await postgres_tool("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={dsn}", dump)
    async with running(dsn, tmp_path / "after") as api:
        assert await consume(api, 100) == list(range(7, 20))


async def test_a_spool_that_is_kept_with_its_dump_is_replayed_once(
    postgres: EmbeddedPostgres, dsn: str, tmp_path: Path
) -> None:
    host = tmp_path / "host"
    async with running(dsn, host) as api:
        await push(api, 0, 1)
        await api.call("POST", "/api/v1/system/maintenance", {"enabled": True})
        (answer,) = await push(api, 2)
        assert answer["status"] == "buffered"
    dump = tmp_path / "queen.dump"
    await postgres_tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={dsn}")
    shutil.copytree(host / "data", tmp_path / "copied" / "data")
    await postgres_tool("createdb", f"--maintenance-db={postgres.dsn()}", "spooled")
    restored = postgres.dsn("spooled")
    try:
        await postgres_tool("pg_restore", "--exit-on-error", f"--dbname={restored}", dump)
        async with running(restored, tmp_path / "copied") as api:
            assert await ids_in(restored) == [0, 1]
            await api.call("POST", "/api/v1/system/maintenance", {"enabled": False})

            async def replayed() -> bool:
                return await ids_in(restored) == [0, 1, 2]

            await until(replayed)
            assert await consume(api, 10) == [0, 1, 2]
    finally:
        await postgres_tool("dropdb", "--force", f"--maintenance-db={postgres.dsn()}", "spooled")


@pytest.mark.soak
async def test_a_base_backup_and_the_archive_bring_back_any_moment(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    archiving = {
        "fsync": "off",
        "archive_mode": "on",
        "archive_command": f"test ! -f {archive}/%f && cp %p {archive}/%f",
    }
    with EmbeddedPostgres(tmp_path / "pg", settings=archiving) as postgres:
        account = account_for(cluster_of(postgres))
        account.chown(archive)
        account.check_reach(archive / "any")
        dsn = postgres.dsn()
        await migrate(dsn)
        async with running(dsn, tmp_path / "before") as api:
            await push(api, *range(10))
            await postgres_tool(
                "pg_basebackup", f"--pgdata={tmp_path / 'base'}", "--checkpoint=fast", "--wal-method=stream",
                f"--dbname={dsn}",
            )  # fmt: skip
            await push(api, *range(10, 20))
            await consume(api, 15)
            connection = await asyncpg.connect(dsn)
            await connection.execute("SELECT pg_create_restore_point('before_the_mistake')")
            await api.call("DELETE", "/api/v1/resources/queues/orders")
            await push(api, 99)
            last = await connection.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
            await connection.close()

            async def archived() -> bool:
                return (archive / str(last)).exists()

            await until(archived)

    base = tmp_path / "base"
    (base / "recovery.signal").touch()
    with (base / "postgresql.auto.conf").open("a") as file:
        file.write(f"restore_command = 'cp {archive}/%f %p'\n")
        file.write("recovery_target_name = 'before_the_mistake'\nrecovery_target_action = 'promote'\n")
    as_embedded(base, tmp_path / "restored")
    with EmbeddedPostgres(tmp_path / "restored", settings={"fsync": "off"}) as postgres:
        dsn = postgres.dsn()

        async def promoted() -> bool:
            connection = await asyncpg.connect(dsn)
            try:
                return not await connection.fetchval("SELECT pg_is_in_recovery()")
            finally:
                await connection.close()

        await until(promoted)
        assert await ids_in(dsn) == list(range(20))
        async with running(dsn, tmp_path / "after") as api:
            assert await consume(api, 100) == [15, 16, 17, 18, 19]
            (again,) = await push(api, 3)
            assert again["status"] == "duplicate"


_EPOCH = "1970-01-01T00:00:00Z"


async def _is(value: bool) -> bool:
    return value

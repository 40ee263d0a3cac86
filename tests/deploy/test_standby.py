"""What docs/high-availability.md says of PostgreSQL, done with the scripts of deploy/docker/postgres: a synchronous
standby takes over, and nothing that was answered is missing."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.storage.migrate import migrate
from tests.deploy.postgres_tools import as_embedded, cluster_of, postgres_tool, running
from tests.deploy.tools import DEPLOY
from tests.support.ageing import until
from tests.support.database import stored_ids
from tests.support.ports import free_port

SCRIPTS = DEPLOY / "docker" / "postgres"
PASSWORD = "0123456789abcdef"


def production_settings() -> dict[str, str]:
    """What postgresql.conf of the compose file sets, without sizes, the address and what the build lacks."""
    found = dict(re.findall(r"^(\w+) = '?([^'\n]*)'?$", (SCRIPTS / "postgresql.conf").read_text(), re.MULTILINE))
    left_out = ("listen_addresses", "shared_buffers", "effective_cache_size", "wal_compression", "min_wal_size")
    return {name: value for name, value in found.items() if name not in left_out}


@pytest.mark.soak
async def test_a_synchronous_standby_takes_over_with_all_that_was_answered(tmp_path: Path) -> None:
    settings = production_settings() | {"fsync": "off"}
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    first, second = free_port(), free_port()
    primary = EmbeddedPostgres(tmp_path / "primary", settings=settings, port=first)
    standby = EmbeddedPostgres(tmp_path / "standby", settings=settings, port=second)
    try:
        await asyncio.to_thread(primary.start)
        admin = await asyncpg.connect(primary.dsn())
        await admin.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'")
        where = {"PGHOST": str(primary.data_dir), "PGPORT": str(first), "PGDATA": str(cluster_of(primary))}
        names = {"POSTGRES_USER": "postgres", "POSTGRES_DB": "postgres", "REPLICATION_PASSWORD_FILE": str(password)}
        await postgres_tool(SCRIPTS / "make-replica-role.sh", env=where | names)

        copy = {"PGDATA": str(tmp_path / "copy"), "PRIMARY_HOST": "127.0.0.1", "PRIMARY_PORT": str(first)}
        await postgres_tool(SCRIPTS / "standby.sh", "true", env=copy | {"REPLICATION_PASSWORD_FILE": str(password)})
        as_embedded(tmp_path / "copy", tmp_path / "standby")
        await asyncio.to_thread(standby.start)

        async def synchronous() -> bool:
            return bool(await admin.fetchval("SELECT sync_state FROM pg_stat_replication") == "sync")

        await until(synchronous)
        await admin.close()

        hosts = f"127.0.0.1%3A{first}%2C127.0.0.1%3A{second}"
        dsn = f"postgresql://postgres:{PASSWORD}@/postgres?host={hosts}&target_session_attrs=primary"
        await migrate(dsn)
        async with running(dsn, tmp_path / "host") as api:
            stored = [f"stored-{number}" for number in range(20)]
            for name in stored:
                await api.push("orders", 1, ids=[name])
            await asyncio.to_thread(primary.kill)

            # PostgreSQL is gone: what is pushed now is kept on the disk of the host.
            async def buffers() -> bool:
                (answer,) = await api.push("orders", 1, ids=["while-away"])
                return bool(answer["status"] == "buffered")

            await until(buffers)
            promoting = await asyncpg.connect(standby.dsn())
            assert await promoting.fetchval("SELECT pg_promote()")

            async def complete() -> bool:
                return await stored_ids(promoting, "orders") == [*stored, "while-away"]

            await until(complete)
            # The spool is known to be empty a moment after its last message is stored; until then, pushes follow it.
            afterwards: list[str] = []

            async def stores() -> bool:
                afterwards.append(f"afterwards-{len(afterwards)}")
                (answer,) = await api.push("orders", 1, ids=afterwards[-1:])
                return bool(answer["status"] == "queued")

            await until(stores)
            assert await stored_ids(promoting, "orders") == [*stored, "while-away", *afterwards]
            await promoting.close()
    finally:
        await asyncio.to_thread(standby.stop)
        await asyncio.to_thread(primary.stop)

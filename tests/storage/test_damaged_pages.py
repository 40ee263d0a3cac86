"""Bytes that change on the disk under PostgreSQL: its checksums find them, and they are never delivered."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.storage.migrate import migrate
from tests.deploy.postgres_tools import cluster_of, running

MARK = b"the only payload of its kind"


async def test_a_message_whose_bytes_changed_on_disk_is_reported_and_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(16)
    postgres = EmbeddedPostgres(tmp_path / "pg", settings={"fsync": "off"})
    await asyncio.to_thread(postgres.start)
    try:
        await migrate(postgres.dsn())
        async with running(postgres.dsn(), tmp_path / "host") as api:
            await api.push("damaged", MARK.decode())
            # Its page is full, so that PostgreSQL stores nothing more there.
            for number in range(20):
                await api.push(f"filler{number}", chance.randbytes(700).hex())
        connection = await asyncpg.connect(postgres.dsn())
        await connection.execute("CHECKPOINT")
        relation = await connection.fetchval("SELECT pg_relation_filepath('queen.segments')")
        await connection.close()
        await asyncio.to_thread(postgres.stop)
        table = cluster_of(postgres) / relation
        content = bytearray(table.read_bytes())
        content[content.index(MARK) + chance.randrange(len(MARK))] ^= 1 << chance.randrange(8)
        table.write_bytes(content)
        await asyncio.to_thread(postgres.start)

        async with running(postgres.dsn(), tmp_path / "host") as api:
            for path in ("/api/v1/pop/queue/damaged", "/api/v1/messages/search?queue=damaged"):
                answer = await api.call("GET", path)
                assert answer.status == 503, answer
                assert answer.body["error"].startswith("PostgreSQL reports damaged data (invalid page in block 0")
            # What lies elsewhere is as it was.
            await api.push("whole", 1)
            assert [message["data"] for message in await api.pop("whole")] == [1]
        assert "PostgreSQL reports damaged data; restore it from a backup: invalid page" in caplog.text
    finally:
        await asyncio.to_thread(postgres.stop)

"""The catalog: names to ids, while other sessions change them."""

from __future__ import annotations

import asyncio

import asyncpg

from queen.log.catalog import Catalog
from tests.conftest import StartServer


async def test_a_group_that_another_session_deletes_all_the_time_has_an_id(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    async def delete() -> None:
        while True:
            await connection.execute("DELETE FROM queen.groups WHERE name = 'billing'")

    api = await start_server()
    assert api.worker is not None
    deleting = asyncio.create_task(delete())
    try:
        ids = [await Catalog(api.worker.broker.database).group("billing") for _ in range(200)]
    finally:
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)
    assert all(isinstance(id, int) for id in ids)
    assert len(set(ids)) > 1

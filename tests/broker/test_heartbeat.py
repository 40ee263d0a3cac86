"""The heartbeat of PostgreSQL judges PostgreSQL, and not the event loop that it lives on."""

from __future__ import annotations

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import asyncpg
import pytest

from queen.broker.heartbeat import Mode
from queen.embedded import EmbeddedPostgres
from queen.storage.database import Connection
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import payloads


def keep_the_loop_busy() -> None:
    time.sleep(0.5)


async def test_a_late_event_loop_does_not_take_postgresql_for_dead(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_server(db_away_ms=200)
    assert api.worker is not None
    broker = api.worker.broker
    went_down: list[str] = []
    mark_down = broker.database.mark_down

    def note(reason: str) -> None:
        went_down.append(reason)
        mark_down(reason)

    monkeypatch.setattr(broker.database, "mark_down", note)
    for turns in range(1, 12):
        broker.heartbeat.trigger()
        # So many turns of the loop bring the beat as far as it comes: asked, and not answered yet.
        for _ in range(turns):
            await asyncio.sleep(0)
        keep_the_loop_busy()
    await api.push("q", 1)
    assert went_down == []


async def test_a_database_that_takes_no_connections_is_unavailable_until_it_does(
    start_server: StartServer, postgres: EmbeddedPostgres, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    api = await start_server()
    assert api.worker is not None
    availability = api.worker.broker.database.availability
    await api.push("q", 1)
    name = urlsplit(dsn).path[1:]
    admin = await asyncpg.connect(postgres.dsn())
    try:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        await until(lambda: availability.down)
        [pushed] = await api.push("q", 2)
        assert pushed["status"] == "buffered"
        refused = await api.call("GET", "/api/v1/resources/queues")
        assert refused.status == 503
        assert "is not currently accepting connections" in refused.body["error"]
    finally:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await admin.close()
    await until(lambda: not availability.down)
    got = [
        *payloads(await api.pop("q", autoAck=True, wait=True)),
        *payloads(await api.pop("q", autoAck=True, wait=True)),
    ]
    assert got == [1, 2]
    assert [record for record in caplog.records if record.exc_info] == []


class _Paused:
    """A connection whose first answer comes late."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.answered, self.go_on = asyncio.Event(), asyncio.Event()
        self.asked = 0

    async def fetch(self, query: str) -> list[asyncpg.Record]:
        self.asked += 1
        rows = await self._connection.fetch(query)
        self.answered.set()
        await self.go_on.wait()
        return rows

    def terminate(self) -> None:
        self._connection.terminate()


async def test_a_beat_that_was_read_before_a_mode_was_switched_does_not_undo_it(start_server: StartServer) -> None:
    api = await start_server(db_away_ms=60_000)
    assert api.worker is not None
    broker = api.worker.broker
    await until(lambda: broker.heartbeat._connection is not None)
    assert broker.heartbeat._connection is not None
    paused = _Paused(broker.heartbeat._connection)
    broker.heartbeat._connection = cast("Connection", paused)
    await paused.answered.wait()
    await broker.switch(Mode.POP_MAINTENANCE, True)
    learnt: list[bool] = []
    broker.heartbeat._on_modes = lambda: learnt.append(broker.modes.pop_maintenance)
    paused.go_on.set()
    await until(lambda: paused.asked == 3)
    assert learnt == []

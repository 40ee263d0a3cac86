"""Probes: alive, ready, healthy; quick and truthful whatever PostgreSQL does."""

from __future__ import annotations

import asyncio

from queen import __version__
from queen.storage.migrate import load_migrations
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.proxy import Proxy


async def test_a_healthy_server_says_what_clients_look_for(api: Api) -> None:
    answer = await api.call("GET", "/health")
    assert answer.status == 200
    assert answer.body == {
        "status": "healthy",
        "database": "connected",
        "server": "Queen",
        "worker_id": 0,
        "version": __version__,
        "queen": {"worker_id": 0, "status": "active"},
    }


async def test_a_server_that_can_do_everything_is_ready(api: Api) -> None:
    answer = await api.call("GET", "/readyz")
    assert answer.status == 200
    assert answer.body == {"ready": True, "reasons": [], "pushes": "stored", "worker_id": 0, "warnings": []}


async def test_probes_answer_soon_while_postgres_is_silent(start_server: StartServer, proxy: Proxy) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    assert (await api.call("GET", "/readyz")).status == 200
    # What the last look found is not asked for again within a second.
    await asyncio.sleep(1.1)
    async with proxy.stalled():
        alive = await api.call("GET", "/livez")
        assert (alive.status, alive.body) == (200, {"alive": True, "worker_id": 0})
        answers = await asyncio.gather(*(api.call("GET", path) for path in ("/readyz", "/health") * 10))
    assert {answer.status for answer in answers} == {503}
    ready, health = answers[0].body, answers[1].body
    assert ready == {
        "ready": False,
        "reasons": ["PostgreSQL did not answer within 1.5 s"],
        "pushes": "buffered",
        "worker_id": 0,
        "warnings": [],
    }
    assert (health["status"], health["database"]) == ("unhealthy", "disconnected")


async def test_a_server_is_ready_again_when_postgres_is_back(start_server: StartServer, proxy: Proxy) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    async with proxy.away():
        answer = await api.call("GET", "/readyz")
        assert answer.status == 503
        assert "PostgreSQL is unavailable" in answer.body["reasons"][0]
    await asyncio.sleep(1.1)
    assert (await api.call("GET", "/readyz")).status == 200


async def test_many_probes_at_once_ask_postgres_once(start_server: StartServer, proxy: Proxy) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    asked: list[bytes] = []

    def note(sent: bytes) -> bool:
        asked.append(sent)
        return False

    proxy.lose_answers(1, of=note)
    answers = await asyncio.gather(*(api.call("GET", "/readyz") for _ in range(50)))
    assert {answer.status for answer in answers} == {200}
    assert sum(b"schema_migrations" in sent for sent in asked) == 1


async def test_a_database_that_lacks_a_migration_is_not_ready(
    start_server: StartServer, connection: Connection
) -> None:
    newest = max(migration.version for migration in load_migrations())
    await connection.execute("DELETE FROM queen.schema_migrations WHERE version = $1", newest)
    api = await start_server()
    answer = await api.call("GET", "/readyz")
    assert (answer.status, answer.body["reasons"]) == (503, [f"the database lacks migration {newest}"])
    assert (await api.call("GET", "/health")).body["database"] == "connected"


async def test_a_database_that_was_never_migrated_is_not_ready(
    start_server: StartServer, connection: Connection
) -> None:
    await connection.execute("DROP SCHEMA queen CASCADE")
    answer = await (await start_server()).call("GET", "/readyz")
    assert (answer.status, answer.body["reasons"]) == (503, ["the database has not been migrated"])


async def test_readiness_ends_before_the_listener_closes(start_server: StartServer) -> None:
    api = await start_server(shutdown_delay_ms=1500)
    assert api.worker is not None
    assert (await api.call("GET", "/readyz")).status == 200
    stopping = asyncio.create_task(api.worker.stop())
    await asyncio.sleep(0)
    late = Api(api.url)
    answer = await late.call("GET", "/readyz")
    assert (answer.status, answer.body["reasons"]) == (503, ["the server is shutting down"])
    assert (await late.call("GET", "/health")).body["queen"] == {"worker_id": 0, "status": "stopping"}
    assert len(await late.push("orders", 1)) == 1, "requests are still served"
    await late.close()
    await stopping


async def test_readiness_says_when_pushes_are_buffered(proxy: Proxy, start_server: StartServer) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    async with proxy.away():
        answer = await api.call("GET", "/readyz")
        assert (answer.status, answer.body["pushes"]) == (503, "buffered")

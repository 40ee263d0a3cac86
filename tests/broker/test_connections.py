"""How many connections to PostgreSQL a worker opens, which administrators have to allow for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from queen.cli.serve.supervisor import _BATCH_CONNECTIONS, Supervisor
from queen.settings import Settings
from tests.conftest import StartServer
from tests.support.database import Connection

_SIZING = Path(__file__).parents[2] / "docs" / "sizing.md"
_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


async def test_a_worker_opens_no_more_connections_than_are_documented(
    start_server: StartServer, connection: Connection
) -> None:
    (documented,) = re.findall(r"\(DB_POOL_SIZE \+ (\d+)\)", _SIZING.read_text())
    assert int(documented) == _BATCH_CONNECTIONS
    pool = 2
    before = await connection.fetchval(_SESSIONS)
    api = await start_server(db_pool_size=pool, namespace_modes=(("log", "buffered"),))

    async def use(number: int) -> None:
        where: dict[str, Any] = {"namespace": ("ns", "log", "other")[number % 3], "topic": f"t{number % 5}"}
        await api.push("q", number, partition=f"p{number}")
        for message in await api.pop("q", consumerGroup=f"g{number % 4}", batch=2):
            ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
            await api.call("POST", "/api/v1/ack", ack | {"consumerGroup": f"g{number % 4}"})
        await api.call("POST", "/api/v1/topics/enqueue", [where | {"data": n} for n in range(4)])
        many: dict[str, Any] = {"namespace": where["namespace"], "limit": 2}
        taken = [*(await api.call("GET", "/api/v1/topics/dequeue", **where, limit=2)).body]
        taken += (await api.call("GET", "/api/v1/topics/dequeue/many", **many)).body
        for item, how in zip(taken, ("ack", "nack", "extend", "release"), strict=False):
            more = {"seconds": 5} if how == "extend" else {}
            refs = [{key: item[key] for key in ("namespace", "topic", "id", "lease_owner")} | more]
            assert (await api.call("POST", f"/api/v1/topics/{how}", refs)).status == 200
        await api.call("GET", "/api/v1/status/queues")
        await api.call("GET", "/readyz")

    most = 0
    working = asyncio.gather(*(use(number) for number in range(60)))
    while not working.done():
        most = max(most, await connection.fetchval(_SESSIONS))
        await asyncio.sleep(0.02)
    await working
    assert pool + 3 < most - before <= pool + _BATCH_CONNECTIONS


def test_the_embedded_postgresql_has_connections_for_all_workers() -> None:
    settings = Settings(num_workers=16, db_pool_size=10)

    async def migrate(dsn: str) -> None:
        return

    postgres = Supervisor(settings, migrate, print)._embedded_postgres()
    assert int(postgres._settings["max_connections"]) >= 16 * (10 + _BATCH_CONNECTIONS) + 10

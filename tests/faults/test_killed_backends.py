"""Sessions of PostgreSQL that are ended under load: clients see 503 at most, and nothing answered is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from queen.storage.database import HEARTBEAT_SESSION
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection

_KILLS = 60


async def test_clients_never_see_the_state_of_the_driver(api: Api, connection: Connection) -> None:
    await api.push("orders", *range(50))
    answers: list[tuple[str, int, Any]] = []
    pushed: set[int] = set()
    killing = True

    async def call(method: str, path: str, body: Any = None) -> Any:
        answer = await api.call(method, path, body)
        answers.append((path, answer.status, answer.body))
        return answer

    async def push(first: int) -> None:
        number = first
        while killing:
            item = {"queue": "orders", "partition": f"p{first}", "payload": number, "transactionId": f"t{number}"}
            if (await call("POST", "/api/v1/push", {"items": [item]})).status == 201:
                pushed.add(number)
            number += 10

    async def consume() -> None:
        while killing:
            popped = await call("GET", "/api/v1/pop/queue/orders?batch=10")
            for message in (popped.body or {}).get("messages", ()) if popped.status == 200 else ():
                ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
                await call("POST", "/api/v1/ack", ack | {"status": "failed" if message["data"] == 7 else "completed"})

    async def transact(first: int) -> None:
        number = first
        while killing:
            number += 10
            item = {"queue": "others", "payload": number}
            await call("POST", "/api/v1/transaction", {"operations": [{"type": "push", "items": [item]}]})

    async def look() -> None:
        while killing:
            await call("GET", "/api/v1/resources/queues")

    async def kill() -> None:
        nonlocal killing
        kills = 0
        while kills < _KILLS:
            kills += len(
                await connection.fetch(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND application_name <> $1"
                    " AND random() < 0.3",
                    # Without it PostgreSQL counts as down, and pushes go to the spool for the rest of the test.
                    HEARTBEAT_SESSION,
                )
            )
            await asyncio.sleep(0.02)
        killing = False

    await asyncio.gather(kill(), push(1000), push(1001), consume(), consume(), transact(0), transact(1), look())
    odd = [answer for answer in answers if answer[1] >= 500 and answer[1] != 503]
    assert not odd, odd[:3]
    texts = {str(body.get("error")) for _, status, body in answers if status == 503}
    assert not [text for text in texts if "state" in text or "operation" in text], texts
    assert pushed

    async def all_stored() -> bool:
        stored = await connection.fetchval(
            "SELECT coalesce(sum(count), 0) FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
            " WHERE p.name IN ('p1000', 'p1001')"
        )
        return bool(stored >= len(pushed))

    await until(all_stored)

"""Pops that wait: woken at once, answered in time, and costing nothing while nothing comes."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import asyncpg
import pytest

from tests.conftest import StartServer
from tests.support.ageing import until_parked
from tests.support.api import Api, payloads
from tests.support.database import Connection, make_queue
from tests.support.raw_http import exchange, open_request

NEVER = 600_000
"""Milliseconds between safety polls that no test here should need."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("partition", [None, "p"])
async def test_a_parked_pop_is_woken_by_a_push(start_server: StartServer, workers: int, partition: str | None) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=workers, pop_safety_poll_ms=NEVER) for number in range(workers)
    ]
    here, there = servers[0], servers[-1]
    await here.push("q", -1, partition="p")
    await there.pop("q", autoAck=True)
    for number in range(20):
        waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=60_000, autoAck=True))
        await until_parked(there, 1)
        await here.push("q", number, partition="p")
        assert payloads(await waiting) == [number]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("partition", [None, "Default", "p"])
async def test_a_pop_waits_for_a_queue_and_a_partition_that_do_not_exist_yet(
    start_server: StartServer, workers: int, partition: str | None
) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=workers, pop_safety_poll_ms=NEVER) for number in range(workers)
    ]
    here, there = servers[0], servers[-1]
    waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=60_000))
    await until_parked(there, 1)
    async with asyncio.timeout(100):
        await here.push("q", 1, partition=partition or "any")
        assert payloads(await waiting) == [1]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_pop_that_comes_while_its_queue_is_being_made_is_not_forgotten(
    start_server: StartServer, workers: int
) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=workers, pop_safety_poll_ms=NEVER) for number in range(workers)
    ]
    here, there = servers[0], servers[-1]

    async def race(number: int, partition: str | None) -> None:
        name = f"q-{number}-{partition}"
        pop = there.pop(name, partition, wait=True, timeout=20_000)
        messages, _ = await asyncio.gather(pop, here.push(name, number, partition=partition or "any"))
        assert payloads(messages) == [number]

    async with asyncio.timeout(100):
        for number in range(0, 60, 4):
            await asyncio.gather(
                *(race(one, partition) for one in range(number, number + 4) for partition in (None, "p"))
            )


async def test_a_pop_waits_for_a_namespace_that_has_no_queue_yet(api: Api) -> None:
    waiting = asyncio.create_task(
        api.call("GET", "/api/v1/pop", namespace="billing", wait=True, timeout=60_000, autoAck=True)
    )
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await api.push("billing.invoices", 1)
        assert payloads((await waiting).body["messages"]) == [1]


@pytest.mark.parametrize("target", ["queue/q", "queue/q/partition/p", "queue/none", "queue/q/partition/none"])
async def test_a_pop_is_answered_empty_when_its_time_is_up(api: Api, target: str) -> None:
    await api.push("q", 1, partition="p")
    await api.pop("q", autoAck=True)
    begun = time.perf_counter()
    answer = await api.call("GET", f"/api/v1/pop/{target}", wait=True, timeout=300)
    assert (answer.status, answer.body) == (204, None)
    assert time.perf_counter() - begun > 0.28


async def test_a_pop_that_does_not_wait_is_answered_at_once(api: Api) -> None:
    for target in ("queue/q", "queue/q/partition/p"):
        assert (await api.call("GET", f"/api/v1/pop/{target}", timeout=30_000)).status == 204


@pytest.mark.parametrize("limit", ["0", "-5", "nonsense", "99999999999999999999", "9999999999999999999"])
async def test_absurd_timeouts_do_no_harm(api: Api, limit: str) -> None:
    waiting = asyncio.create_task(exchange(api.url, "GET", f"/api/v1/pop/queue/q?wait=true&timeout={limit}"))
    await asyncio.sleep(0.05)
    await api.push("q", 1)
    async with asyncio.timeout(100):
        status, _ = await waiting
    assert status in (200, 204)


async def test_messages_are_not_lost_when_time_runs_out_as_they_arrive(start_server: StartServer) -> None:
    """A pop is answered either with messages or with none; what it consumed it is given."""
    api = await start_server(pop_safety_poll_ms=NEVER)
    total, seen = 200, list[int]()
    chance = random.Random(5)

    async def consume() -> None:
        while len(seen) < total:
            messages = await api.pop("q", wait=True, timeout=chance.randrange(1, 12), autoAck=True)
            seen.extend(payloads(messages))

    async def produce() -> None:
        for number in range(total):
            await api.push("q", number)
            await asyncio.sleep(chance.random() * 0.006)

    async with asyncio.timeout(100):
        await asyncio.gather(produce(), *(consume() for _ in range(6)))
    assert sorted(seen) == list(range(total))


@pytest.mark.parametrize("partition", [None, "p", "none"])
async def test_a_client_that_disconnects_frees_its_place(start_server: StartServer, partition: str | None) -> None:
    api = await start_server(pop_safety_poll_ms=NEVER)
    assert api.worker is not None
    await api.push("q", 0, partition="p")
    await api.pop("q", autoAck=True)
    path = "/api/v1/pop/queue/q" + (f"/partition/{partition}" if partition else "")
    connections = [
        await open_request(api.url, "GET", f"{path}?wait=true&timeout=30000&autoAck=true") for _ in range(20)
    ]
    await until_parked(api, 20)
    for _, writer in connections:
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.1)
    # Nobody who left gets the message: it is there for the one who asks next.
    await api.push("q", 1, partition=partition or "p")
    assert payloads(await api.pop("q", autoAck=True)) == [1]
    await until_parked(api, 0)


async def test_a_batch_claimed_for_a_client_that_left_is_not_invisible_for_longer_than_its_lease(
    api: Api, connection: Connection
) -> None:
    await make_queue(connection, "q", lease_time=1)
    await api.push("q", *range(200))
    for _ in range(10):
        _, writer = await open_request(api.url, "GET", "/api/v1/pop/queue/q?batch=200&wait=true")
        writer.close()
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(100):
        while not messages:
            messages = await api.pop("q", batch=200, wait=True, timeout=3000)
    assert payloads(messages) == list(range(200))


async def test_parked_pops_cost_no_query(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(
        pop_safety_poll_ms=NEVER,
        queen_sync_reconcile_ms=NEVER,
        metrics_aggregate_interval_s=3600,
        queen_sql_push=False,
    )
    for partition in ("a", "b"):
        await api.push("q", 0, partition=partition)
    for group in ("x", "y"):
        await api.pop("q", batch=5, partitions=5, autoAck=True, consumerGroup=group)
    waiting = [
        asyncio.create_task(api.pop(queue, partition, wait=True, timeout=30_000, consumerGroup=group))
        for queue, partition in (("q", None), ("q", "a"), ("q", "none"), ("none", None))
        for group in ("x", "y")
        for _ in range(20)
    ]
    await until_parked(api, len(waiting))
    asked: list[asyncpg.Record] = []
    # Jobs that maintain the database run now and then beside them; pops that asked would do so all the time.
    for _ in range(6):
        begun = await connection.fetchval("SELECT clock_timestamp()")
        await asyncio.sleep(3)
        asked = await connection.fetch(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'queen%'"
            " AND (query_start > $1 OR backend_start > $1) "
            " AND query NOT LIKE '-- Is PostgreSQL available?%' AND query NOT LIKE '-- The modes that are or were on%'",
            begun,
        )
        if not asked:
            break
    # But for the elected janitor, which says every second that it is there, and the look for PostgreSQL itself.
    assert [row["query"] for row in asked] == []
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_as_many_messages_as_parked_pops_are_delivered_one_each(start_server: StartServer) -> None:
    api = await start_server(pop_safety_poll_ms=NEVER)
    await api.push("q", -1)
    await api.pop("q", autoAck=True)
    waiting = [asyncio.create_task(api.pop("q", wait=True, timeout=20_000, autoAck=True)) for _ in range(200)]
    await until_parked(api, 200)
    async with asyncio.timeout(100):
        await asyncio.gather(*(api.push("q", number, partition=str(number % 20)) for number in range(200)))
        delivered = await asyncio.gather(*waiting)
    assert sorted(message["data"] for messages in delivered for message in messages) == list(range(200))


@pytest.mark.parametrize("workers", [1, 2])
async def test_parked_pops_that_lease_are_each_given_one_message_once(start_server: StartServer, workers: int) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=workers, pop_safety_poll_ms=NEVER) for number in range(workers)
    ]
    seen: list[int] = []

    async def consume(number: int) -> None:
        api = servers[number % workers]
        (message,) = await api.pop("q", wait=True, timeout=30_000)
        seen.append(message["data"])
        await servers[(number + 1) % workers].ack([message])

    consumers = [asyncio.create_task(consume(number)) for number in range(200)]
    await asyncio.sleep(0.3)
    async with asyncio.timeout(100):
        await asyncio.gather(
            *(servers[number % workers].push("q", number, partition=str(number % 10)) for number in range(200))
        )
        await asyncio.gather(*consumers)
    assert sorted(seen) == list(range(200))


async def test_what_a_pop_here_took_and_did_not_lease_is_not_held_in_the_eyes_of_others(
    start_server: StartServer,
) -> None:
    """A worker that ends a lease serves its own waiting pop first; the other workers are notified all the same."""
    here, there = [await start_server(worker_id=number, num_workers=2, pop_safety_poll_ms=NEVER) for number in range(2)]
    await here.configure("q")
    assert await there.pop("q") == []
    await here.push("q", 1)
    leased = await here.pop("q")
    await here.push("q", 2)
    elsewhere = asyncio.create_task(there.pop("q", wait=True, timeout=60_000))
    await until_parked(there, 1)
    at_once = asyncio.create_task(here.pop("q", wait=True, timeout=60_000, autoAck=True))
    await until_parked(here, 1)
    async with asyncio.timeout(100):
        await here.ack(leased)
        assert payloads(await at_once) == [2]
        await here.push("q", 3)
        assert payloads(await elsewhere) == [3]


async def test_what_another_worker_has_consumed_is_not_tried_one_by_one(start_server: StartServer) -> None:
    here, there = [await start_server(worker_id=number, num_workers=2, pop_safety_poll_ms=NEVER) for number in range(2)]
    assert there.worker is not None
    claimer, partitions = there.worker.broker.claimer, 300
    await asyncio.gather(*(here.push("q", number, partition=str(number)) for number in range(partitions)))
    (first,) = await there.pop("q", autoAck=True)
    taken = [message["data"] for _ in range(1, partitions) for message in await here.pop("q", autoAck=True)]
    assert sorted([first["data"], *taken]) == list(range(partitions))
    before = claimer.batches
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000, autoAck=True))
    await until_parked(there, 1)
    await here.push("q", "new", partition="7")
    assert payloads(await waiting) == ["new"]
    assert claimer.batches - before < 20
    await here.push("q", "newer", partition="8")
    assert payloads(await there.pop("q", autoAck=True)) == ["newer"]
    assert await there.pop("q", autoAck=True) == []

"""`kill -9` of the embedded PostgreSQL: it comes back by itself, and everything answered with it."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import Victim
from tests.faults.consumers import Consumer, Record, consuming
from tests.faults.load import Client, Producer, answered, check_delivered, check_stored, pushing
from tests.support.api import Answer, Api


async def kill_postgres(victim: Victim, api: Api, *, children_too: bool) -> None:
    """Kill it, see the server admit it, and wait until all is well again."""
    victim.kill_postgres(children_too=children_too)
    assert (await health_that_is(api, "unhealthy")).status == 503
    assert (await health_that_is(api, "healthy")).status == 200


async def health_that_is(api: Api, status: str) -> Answer:
    async with asyncio.timeout(100):
        while True:
            health = await api.call("GET", "/health")
            if health.body["status"] == status:
                return health
            await asyncio.sleep(0.02)


async def push_while_postgres_is_killed(victim: Victim, kills: list[bool], clients: int = 4) -> None:
    """`kills`: whether the children of the postmaster are killed with it."""
    producers = [Producer(victim.url, f"client{number}", "orders") for number in range(clients)]
    api = Api(victim.url)
    async with pushing(producers):
        for children_too in kills:
            await answered(producers, requests=10)
            await kill_postgres(victim, api, children_too=children_too)
        await answered(producers, requests=10)
    await api.close()
    for producer in producers:
        assert not producer.failures, "what PostgreSQL could not take went to the spool"
    assert sum(producer.buffered for producer in producers) > 0
    async with victim.connection() as connection:
        await check_stored(connection, producers)
    await check_delivered(victim.url, producers)


async def test_parked_pops_and_consumers_survive_the_death_of_postgres(victim: Victim) -> None:
    api = Api(victim.url)
    await api.configure("jobs", leaseTime=2)
    await api.push("quiet", 0)
    # Several, so that both workers have some.
    pops = [api.pop("quiet", wait=True, timeout=60_000, consumerGroup=f"group{number}") for number in range(6)]
    assert [(await api.pop("quiet", consumerGroup=f"group{number}", autoAck=True))[0]["data"] for number in range(6)]
    parked = [asyncio.create_task(pop) for pop in pops]
    await until_parked(api, len(parked))
    counts = {f"p{number}": 200 for number in range(8)}
    for partition in counts:
        ids = [f"{partition}/{number}" for number in range(200)]
        await api.push("jobs", *range(200), partition=partition, ids=ids)
    record = Record()
    consumers = [Consumer(victim.url, "jobs", "group", record, batch=3) for _ in range(4)]
    async with consuming(consumers):
        for children_too in (True, False):
            await kill_postgres(victim, api, children_too=children_too)
        await record.until_given(counts)
    assert not [pop for pop in parked if pop.done()]
    await push_persistently(victim, "quiet", 1)
    async with asyncio.timeout(100):
        assert [[message["data"] for message in await pop] for pop in parked] == [[1]] * len(parked)
    await api.close()


async def until_parked(api: Api, count: int) -> None:
    """Wait until so many pops have waited for half a second: younger ones may be answered 503."""
    async with asyncio.timeout(100):
        while True:
            text = (await api.call("GET", "/metrics/prometheus")).body
            lines = [line for line in text.splitlines() if line.startswith("queen_parked_pops")]
            if sum(float(line.split()[-1]) for line in lines) >= count:
                break
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)


async def push_persistently(victim: Victim, queue: str, payload: object) -> None:
    client = Client(victim.url)
    items = [{"queue": queue, "payload": payload, "transactionId": str(payload)}]
    answer, _ = await client.persist("POST", "/api/v1/push", {"items": items})
    assert answer.status == 201
    await client.close()


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_pushes_survive_the_death_of_postgres_again_and_again(victim: Victim) -> None:
    await push_while_postgres_is_killed(victim, [False, True, True, False] * 10, clients=8)

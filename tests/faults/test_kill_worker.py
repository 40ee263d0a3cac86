"""`kill -9` of a worker: nothing answered is lost, nothing is stored twice, nothing acked comes back."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import psutil
import pytest

from tests.api import Api
from tests.faults.conftest import Victim
from tests.faults.consumers import Consumer, Record, consuming
from tests.faults.load import Producer, answered, check_delivered, check_stored, pushing


async def kill_a_worker(victim: Victim, chance: random.Random) -> None:
    """Kill one of the two, and wait until there is another in its place."""
    workers = victim.workers()
    assert len(workers) == 2
    killed = chance.choice(sorted(workers, key=lambda worker: worker.pid))
    os.kill(killed.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while len(victim.workers()) < 2 or killed in victim.workers():
            await asyncio.sleep(0.02)
        while not await _answers(victim.url, {worker.pid for worker in victim.workers()}):
            await asyncio.sleep(0.02)


async def _answers(url: str, pids: set[int]) -> bool:
    """Whether every worker listens: the port is shared, so ask who holds it."""
    port = int(url.rpartition(":")[2])
    listening = {
        held.pid for held in psutil.net_connections("tcp") if held.status == "LISTEN" and held.laddr[1] == port
    }
    return pids <= listening


async def push_while_workers_are_killed(victim: Victim, kills: int, clients: int = 4) -> None:
    chance = random.Random(kills)
    producers = [Producer(victim.url, f"client{number}", "orders") for number in range(clients)]
    async with pushing(producers):
        for _ in range(kills):
            await answered(producers, requests=chance.randint(5, 40))
            await kill_a_worker(victim, chance)
        await answered(producers, requests=20)
    assert sum(sum(producer.failures.values()) for producer in producers) > 0, "nobody noticed"
    async with victim.connection() as connection:
        await check_stored(connection, producers)
    await check_delivered(victim.url, producers)


async def consume_while_workers_are_killed(victim: Victim, kills: int, messages: int) -> None:
    chance = random.Random(kills)
    api = Api(victim.url)
    await api.configure("jobs", leaseTime=2)
    counts = {f"p{number}": messages for number in range(8)}
    for first in range(0, messages, 250):
        numbers = range(first, min(first + 250, messages))
        for partition in counts:
            await api.push("jobs", *numbers, partition=partition, ids=[f"{partition}/{number}" for number in numbers])
    await api.close()
    record = Record()
    async with consuming([Consumer(victim.url, "jobs", "group", record) for _ in range(4)]):
        for kill in range(1, kills + 1):
            async with asyncio.timeout(60):
                while sum(record.given.values()) < messages * len(counts) * kill / (kills + 1):
                    await asyncio.sleep(0.01)
            await kill_a_worker(victim, chance)
        await record.until_given(counts)


async def test_pushes_survive_the_death_of_workers(victim: Victim) -> None:
    await push_while_workers_are_killed(victim, kills=3)


async def test_consumers_survive_the_death_of_workers(victim: Victim) -> None:
    await consume_while_workers_are_killed(victim, kills=2, messages=400)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_pushes_survive_the_death_of_many_workers(victim: Victim) -> None:
    await push_while_workers_are_killed(victim, kills=60, clients=8)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_consumers_survive_the_death_of_many_workers(victim: Victim) -> None:
    await consume_while_workers_are_killed(victim, kills=30, messages=20_000)

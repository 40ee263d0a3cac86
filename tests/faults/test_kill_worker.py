"""`kill -9` of a worker: nothing answered is lost, nothing is stored twice, nothing acked comes back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial

import psutil
import pytest

from tests.faults.conftest import Victim
from tests.faults.consumers import Consumer, Record, consuming
from tests.faults.load import Producer, answered, check_delivered, check_stored, pushing
from tests.support.ageing import until
from tests.support.api import Api

_YOUTH_SECONDS = 3.0


async def kill_a_worker(victim: Victim, chance: random.Random) -> None:
    """Kill one of the two, and wait until there is another in its place."""
    workers = victim.workers()
    assert len(workers) == 2
    killed = chance.choice(sorted(workers, key=lambda worker: worker.pid))
    # A worker that dies right after its start, several times in a row, is given up on.
    await asyncio.sleep(max(0.0, killed.create_time() + _YOUTH_SECONDS - time.time()))
    os.kill(killed.pid, signal.SIGKILL)
    await until(
        lambda: killed not in (workers := victim.workers()) and len(workers) == 2 and _listen(workers, victim.url)
    )


def _listen(workers: list[psutil.Process], url: str) -> bool:
    """Whether each of the workers has opened the port that they share."""
    port = int(url.rpartition(":")[2])
    held = psutil.net_connections("tcp")
    listening = {one.pid for one in held if one.status == "LISTEN" and one.laddr and one.laddr.port == port}
    return {worker.pid for worker in workers} <= listening


async def push_while_workers_are_killed(victim: Victim, kills: int, clients: int = 4) -> None:
    chance = random.Random(kills)
    producers = [Producer(victim.url, f"client{number}", "orders") for number in range(clients)]
    async with pushing(producers):
        for _ in range(kills):
            await answered(producers, requests=chance.randint(5, 20))
            await kill_a_worker(victim, chance)
        await answered(producers, requests=10)
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
            goal = messages * len(counts) * kill // (kills + 1)
            await until(partial(_given, record, goal), seconds=300)
            await kill_a_worker(victim, chance)
        await record.until_given(counts)


def _given(record: Record, goal: int) -> bool:
    return sum(record.given.values()) >= goal


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_pushes_survive_the_death_of_many_workers(victim: Victim) -> None:
    await push_while_workers_are_killed(victim, kills=60, clients=8)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_consumers_survive_the_death_of_many_workers(victim: Victim) -> None:
    await consume_while_workers_are_killed(victim, kills=30, messages=20_000)

"""`kill -9` of a stream, of workers, of PostgreSQL: what was counted is the truth, and every window came out once."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from queen.streams import Runner
from tests.acceptance.client_environment import clean_environ, client_python
from tests.faults.conftest import Victim
from tests.faults.load import Client
from tests.faults.test_kill_worker import kill_a_worker
from tests.streams.collecting import drain
from tests.streams.counting import QUERY, counting, counts, events, truth
from tests.support.ageing import until
from tests.support.api import Api

_ROOT = Path(__file__).parents[2]


async def push_events(url: str, partitions: int, rounds: int) -> Counter[tuple[str, int]]:
    """A queue whose leases end soon, so that what a dead stream held comes again soon."""
    api = Api(url)
    await api.configure("in", leaseTime=1)
    pushed = events(partitions, rounds)
    for partition, several in pushed.items():
        await api.push("in", *several, partition=partition)
    await api.close()
    return truth(pushed.values())


async def kill_in_the_middle(python: str, url: str, looks: int, delay: float) -> None:
    """Let a stream look at so many messages, and kill it somewhere between that and its commit, or just after."""
    command = [python, "-m", "tests.streams.counting", url]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=_ROOT, env=clean_environ(), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(100):
        while looks:
            line = await process.stdout.readline()
            assert line, "the stream ended by itself"
            looks -= line == b"looked\n"
    await asyncio.sleep(delay)
    process.kill()
    await process.wait()


async def count_while_the_stream_is_killed(python: str, api: Api, kills: int, partitions: int, rounds: int) -> None:
    """Whichever SDK was killed, this one goes on with its state."""
    chance = random.Random(kills)
    expected = await push_events(api.url, partitions, rounds)
    for _ in range(kills):
        await kill_in_the_middle(python, api.url, looks=chance.randint(1, 60), delay=chance.random() * 0.03)
    runner = await counting().run(QUERY, api.url)
    emitted = await drain(api, "out", len(expected), seconds=60)
    await runner.stop()
    assert counts(emitted) == expected
    assert await api.pop("out") == []


async def test_a_stream_that_is_killed_in_the_middle_of_cycles_counts_exactly(api: Api) -> None:
    await count_while_the_stream_is_killed(sys.executable, api, kills=6, partitions=4, rounds=60)


@pytest.mark.soak
async def test_a_stream_of_the_published_client_that_is_killed_counts_exactly(api: Api) -> None:
    published = str(client_python(_ROOT / ".venv-client"))
    await count_while_the_stream_is_killed(published, api, kills=4, partitions=4, rounds=60)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_stream_that_is_killed_again_and_again_counts_exactly(api: Api) -> None:
    await count_while_the_stream_is_killed(sys.executable, api, kills=80, partitions=8, rounds=1000)


@pytest.mark.soak
async def test_a_stream_counts_exactly_while_workers_and_postgres_are_killed(victim: Victim) -> None:
    chance = random.Random(1)
    expected = await push_events(victim.url, partitions=6, rounds=150)
    messages = 6 * (2 * 150 + 1)
    runners = [await counting().run(QUERY, victim.url, batch_size=11, max_partitions=2) for _ in range(2)]
    for kill in range(1, 4):
        await until(partial(_have_read, runners, messages * kill // 4))
        if kill == 2:
            victim.kill_postgres(children_too=True)
        else:
            await kill_a_worker(victim, chance)
    emitted = await drain_persistently(victim.url, len(expected))
    for runner in runners:
        await runner.stop()
    assert counts(emitted) == expected
    async with victim.connection() as connection:
        assert await connection.fetchval(
            "SELECT sum(p.next_offset) FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = 'out'"
        ) == len(expected)


async def drain_persistently(url: str, count: int) -> list[Any]:
    client = Client(url)
    found: list[Any] = []
    async with asyncio.timeout(100):
        while len(found) < count:
            answer, _ = await client.persist(
                "GET", "/api/v1/pop/queue/out", batch=1000, partitions=100, autoAck=True, wait=True, timeout=1000
            )
            found += [message["data"] for message in answer.body["messages"]] if answer.body else []
    await client.close()
    return found


def _have_read(runners: list[Runner], messages: int) -> bool:
    return sum(int(runner.metrics()["messagesTotal"]) for runner in runners) >= messages

"""Two servers on one database that never hear of each other: slower to notice, never wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from queen.settings import Settings
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection, make_queue, stored_messages

Pair = tuple[Api, Api]


@pytest.fixture
async def hosts(start_server: StartServer, tmp_path: Path) -> Pair:
    first = await start_server(pop_safety_poll_ms=200)
    _empty(tmp_path)
    return first, await start_server(pop_safety_poll_ms=200, queen_data_dir=tmp_path / "other")


async def test_pushes_to_many_partitions_at_both_leave_no_gap_and_no_duplicate(
    hosts: Pair, connection: Connection
) -> None:
    partitions = [f"p{number}" for number in range(6)]
    answered: list[tuple[str, str, str, str]] = []

    async def push(client: int) -> None:
        chance = random.Random(client)
        for step in range(30):
            names = chance.sample(partitions, chance.randint(1, 6))
            # Some ids are the client's own, others are everybody's.
            items = [
                {"queue": "q", "partition": name, "transactionId": chance.choice([f"{client}-{step}", str(step % 9)])}
                for name in names
            ]
            answer = await hosts[chance.randrange(2)].call("POST", "/api/v1/push", {"items": items})
            assert answer.status == 201, answer
            for item, result in zip(items, answer.body, strict=True):
                answered.append((item["partition"], item["transactionId"], result["status"], result["message_id"]))

    async with asyncio.timeout(100):
        await asyncio.gather(*(push(client) for client in range(12)))
    for name in partitions:
        stored = await stored_messages(connection, "q", name)
        ids = {message.transaction_id: message.id for message in stored}
        assert len(ids) == len(stored)
        own = [one for one in answered if one[0] == name]
        assert all(ids[transaction_id] == id for _, transaction_id, _, id in own)
        assert Counter(one[1] for one in own if one[2] == "queued") == Counter(ids.keys())


async def test_consumers_at_both_get_everything_once_and_in_order(hosts: Pair, connection: Connection) -> None:
    await make_queue(connection, "q", lease_time=1)
    partitions = [f"p{number}" for number in range(4)]
    acked: defaultdict[str, list[int]] = defaultdict(list)

    async def produce(name: str) -> None:
        chance = random.Random(name)
        for start in range(0, 60, 3):
            await hosts[chance.randrange(2)].push("q", *range(start, start + 3), partition=name)

    async def consume(number: int) -> None:
        chance = random.Random(number)
        while sum(map(len, acked.values())) < 4 * 60:
            messages: list[dict[str, Any]] = await hosts[chance.randrange(2)].pop("q", batch=5, wait=True, timeout=400)
            if chance.random() < 0.1:
                continue
            results = await hosts[chance.randrange(2)].ack(messages)
            for message, result in zip(messages, results, strict=True):
                if result["success"]:
                    acked[message["partition"]].append(message["data"])

    async with asyncio.timeout(100):
        await asyncio.gather(*(produce(name) for name in partitions), *(consume(number) for number in range(6)))
    assert {name: acked[name] for name in partitions} == {name: list(range(60)) for name in partitions}


async def test_a_parked_pop_finds_what_the_other_stored_by_its_slow_poll(hosts: Pair) -> None:
    here, there = hosts
    await here.push("q", 0)
    await there.pop("q", autoAck=True)
    for partition in (None, "Default", "new"):
        waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=60_000, autoAck=True))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(100):
            await here.push("q", 1, partition=partition or "other")
            assert [message["data"] for message in await waiting] == [1]


def _empty(directory: Path) -> None:
    """What the workers of one host share lies in a directory; the second host has none of it."""
    for shared in directory.iterdir():
        if not shared.is_dir():
            shared.unlink()


async def test_a_waiting_pop_finds_what_the_other_host_stored_without_peers_and_without_its_safety_poll(
    start_server: StartServer, tmp_path: Path
) -> None:
    """The log of changes is read every second, and says whether anything was written at all."""
    assert Settings().queen_sync_reconcile_ms < 2000, "what another host stores is promised within two seconds"
    here = await start_server(pop_safety_poll_ms=3_600_000)
    _empty(tmp_path)
    there = await start_server(pop_safety_poll_ms=3_600_000, queen_data_dir=tmp_path / "other")
    await here.push("q", 0)
    assert len(await there.pop("q", autoAck=True)) == 1
    for number in range(1, 3):
        waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000, autoAck=True))
        await until(lambda: _parked(there))
        await here.push("q", number)
        assert [message["data"] for message in await waiting] == [number]
    waiting = asyncio.create_task(there.pop("not yet", wait=True, timeout=60_000, autoAck=True))
    await until(lambda: _parked(there))
    await here.push("not yet", 1)
    assert len(await waiting) == 1


async def test_a_waiting_pop_finds_what_a_lease_of_the_other_host_held(
    start_server: StartServer, tmp_path: Path
) -> None:
    here = await start_server(pop_safety_poll_ms=3_600_000)
    _empty(tmp_path)
    there = await start_server(pop_safety_poll_ms=3_600_000, queen_data_dir=tmp_path / "other")
    await here.push("q", 0, 1)
    (leased,) = await here.pop("q", batch=1)
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000))
    await until(lambda: _parked(there))
    await here.ack([leased])
    assert [message["data"] for message in await waiting] == [1]


async def _parked(host: Api) -> bool:
    assert host.worker is not None
    return host.worker.broker.popper.parked > 0

"""Pushing from SQL while workers and PostgreSQL are killed: what was committed is stored once, the rest never."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import psutil

from queen.storage.database import UNAVAILABLE_ERRORS, AdvisoryLock
from tests.faults.conftest import Victim
from tests.support.ageing import until
from tests.support.database import Connection, stored_messages
from tests.support.workers import worker_number

_YOUTH_SECONDS = 3.0
# The last two: the file that says where PostgreSQL listens is being written.
_LOST: tuple[type[BaseException], ...] = (asyncpg.PostgresError, *UNAVAILABLE_ERRORS, IndexError, ValueError)
PARTITIONS = ("p0", "p1", "p2")


class Writer:
    """A session that pushes transactions of a few messages, one after the other."""

    def __init__(self, victim: Victim, name: str) -> None:
        self._victim = victim
        self.name = name
        self.committed: list[list[tuple[str, str]]] = []
        self.unknown: list[list[tuple[str, str]]] = []
        """Their connection was lost during the commit."""

    async def run(self) -> None:
        chance = random.Random(self.name)
        while True:
            try:
                async with self._victim.connection() as connection:
                    while True:
                        await self._push(connection, chance)
            except _LOST:
                await asyncio.sleep(0.05)

    async def _push(self, connection: Connection, chance: random.Random) -> None:
        number = len(self.committed) + len(self.unknown)
        pushed = [(chance.choice(PARTITIONS), f"{self.name}-{number}-{index}") for index in range(chance.randint(1, 5))]
        transaction = connection.transaction()
        await transaction.start()
        for partition, value in pushed:
            await connection.execute("SELECT queen.push('orders', $1, $2)", partition, json.dumps(value))
        if chance.random() < 0.2:
            await transaction.rollback()
            return
        try:
            await transaction.commit()
        except BaseException:
            self.unknown.append(pushed)
            raise
        self.committed.append(pushed)


@asynccontextmanager
async def writing(victim: Victim, count: int) -> AsyncIterator[list[Writer]]:
    writers = [Writer(victim, f"w{number}") for number in range(count)]
    tasks = [asyncio.create_task(writer.run()) for writer in writers]
    try:
        yield writers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def more_commits(writers: list[Writer], count: int) -> None:
    goal = sum(len(writer.committed) for writer in writers) + count
    await until(lambda: sum(len(writer.committed) for writer in writers) >= goal, seconds=100)


async def check(victim: Victim, writers: list[Writer]) -> None:
    async with victim.connection() as connection:
        await until(lambda: _is_empty(connection), seconds=100)
        places: dict[str, tuple[str, int]] = {}
        for partition in PARTITIONS:
            for message in await stored_messages(connection, "orders", partition):
                value = json.loads(message.payload)
                assert value not in places, "stored twice"
                places[value] = (partition, message.offset)
    for writer in writers:
        last = dict.fromkeys(PARTITIONS, -1)
        for pushed in writer.committed:
            for partition, value in pushed:
                assert places[value][0] == partition
                assert places[value][1] > last[partition], "out of order"
                last[partition] = places[value][1]
    sure = {value for writer in writers for pushed in writer.committed for _, value in pushed}
    maybe = {value for writer in writers for pushed in writer.unknown for _, value in pushed}
    assert sure <= places.keys() <= sure | maybe
    for writer in writers:
        for pushed in writer.unknown:
            assert len({value in places for _, value in pushed}) == 1, "part of a transaction"


async def _is_empty(connection: Connection) -> bool:
    return not await connection.fetchval("SELECT EXISTS (SELECT FROM queen.inbox)")


async def appending_worker(victim: Victim) -> psutil.Process:
    """The worker whose session holds the lock of the inbox."""
    async with victim.connection() as connection:
        while True:
            name = await connection.fetchval(
                "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
                " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
                " AND (l.classid::bigint << 32 | l.objid::bigint) = $1",
                AdvisoryLock.INBOX,
            )
            for worker in victim.workers():
                if name == f"queen worker {worker_number(worker)}":
                    return worker
            await asyncio.sleep(0.05)


def _is_replaced(victim: Victim, worker: psutil.Process) -> bool:
    workers = victim.workers()
    return worker not in workers and len(workers) == 2


async def test_death_of_the_worker_that_appends_loses_and_doubles_nothing(victim: Victim) -> None:
    chance = random.Random(7)
    async with writing(victim, 4) as writers:
        await more_commits(writers, 50)
        for _ in range(3):
            worker = await appending_worker(victim)
            # One that dies right after its start, several times in a row, is given up on.
            await asyncio.sleep(max(0.0, worker.create_time() + _YOUTH_SECONDS - time.time()) + chance.random() / 10)
            os.kill(worker.pid, signal.SIGKILL)
            await more_commits(writers, 50)
            await until(partial(_is_replaced, victim, worker))
    await check(victim, writers)


async def test_death_of_postgres_loses_and_doubles_nothing(victim: Victim) -> None:
    async with writing(victim, 4) as writers:
        await more_commits(writers, 50)
        victim.kill_postgres(children_too=True)
        await more_commits(writers, 50)
    await check(victim, writers)

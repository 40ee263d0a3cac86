"""Cleaning costs as much as there is to clean, however many partitions lie idle beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from queen.broker.maintenance.cleanup import PartitionSweep
from queen.broker.maintenance.election import Session
from queen.broker.maintenance.retention import Eviction, Retention, Trimmer
from queen.broker.maintenance.schedule import PushListener
from queen.storage.database import Database
from tests.conftest import StartServer
from tests.support.ageing import Connection, age, broker_of, until

IDLE = 10_000
SECONDS = 1000
FEW = 40
"""Rows that are read to cut one partition."""
OPTIONS = ("retention_seconds", "completed_retention_seconds", "max_wait_time_seconds", "ttl")


class Costs:
    """The jobs on a connection of their own, and what PostgreSQL counts of what they read."""

    def __init__(self, mine: Connection, connection: Connection, session: Session) -> None:
        self.session = session
        self.push_listener = PushListener()
        self.moment = 1000.0
        self._mine = mine
        self._connection = connection

    def trimmer(self, **limits: Any) -> Trimmer:
        return Trimmer(1000, self.push_listener, clock=lambda: self.moment, **limits)

    def jobs(self, **limits: Any) -> list[Retention | Eviction]:
        return [Retention(self.trimmer(**limits)), Eviction(self.trimmer(**limits))]

    async def of(self, *jobs: Retention | Eviction | PartitionSweep) -> int:
        """Rows of partitions, segments and cursors that a run of jobs reads."""
        before = await self._rows_read()
        for job in jobs:
            while await job.run(self.session):
                pass
        return await self._rows_read() - before

    async def _rows_read(self) -> int:
        for connection in (self._mine, self._connection):
            await connection.execute("SELECT pg_stat_force_next_flush()")
        return int(
            await self._connection.fetchval(
                "SELECT sum(seq_tup_read + idx_tup_fetch) FROM pg_stat_user_tables"
                " WHERE relname IN ('partitions', 'segments', 'cursors')"
            )
        )


@pytest.fixture
async def costs(dsn: str, connection: Connection) -> AsyncIterator[Costs]:
    """Thousands of idle partitions: some hold young messages that are consumed, some that are not, some are empty."""
    await connection.execute("INSERT INTO queen.groups (name) VALUES ('readers')")
    await connection.execute("INSERT INTO queen.queues (name, retention_enabled) VALUES ('logs', true)")
    await connection.execute(
        "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at, created_at)"
        " SELECT 1, n, 1, now(), now() - interval '1 day' FROM generate_series(1, $1::integer) n",
        IDLE,
    )
    await connection.execute(
        "INSERT INTO queen.segments SELECT id, 0, 1, now(), '', '' FROM queen.partitions WHERE id % 3 > 0"
    )
    await connection.execute("UPDATE queen.partitions SET floor_offset = 1 WHERE id % 3 = 0")
    await connection.execute(
        "INSERT INTO queen.cursors (partition_id, group_id, committed) SELECT id, 1, id % 2 FROM queen.partitions"
    )
    await connection.execute("ANALYZE")
    database = Database(dsn)
    mine = await database.connect()
    session = Session(database, mine)
    yield Costs(mine, connection, session)
    await session.close()
    await database.close()


async def set_options(connection: Connection, *options: str, seconds: int = SECONDS) -> None:
    for option in OPTIONS:
        await connection.execute(f"UPDATE queen.queues SET {option} = $1", seconds if option in options else 0)


@pytest.mark.parametrize("option", OPTIONS)
async def test_a_run_reads_only_the_partition_in_which_something_is_due(
    costs: Costs, connection: Connection, option: str
) -> None:
    await set_options(connection, option)
    await connection.execute("UPDATE queen.cursors SET committed = $1 WHERE partition_id = 7", option != OPTIONS[2])
    await age(connection, SECONDS - 500, "7")
    jobs = costs.jobs()
    assert await costs.of(*jobs) >= IDLE
    assert await costs.of(*jobs) == 0
    await age(connection, 501)
    costs.moment += 501
    assert 0 < await costs.of(*jobs) < FEW
    assert await lacking(connection) == [7]
    assert await costs.of(*jobs) == 0


@pytest.mark.parametrize("option", OPTIONS)
async def test_a_new_partition_is_found_without_a_look_at_the_others(
    costs: Costs, connection: Connection, option: str
) -> None:
    await set_options(connection, option)
    jobs = costs.jobs()
    await costs.of(*jobs)
    await connection.execute("INSERT INTO queen.partitions (queue_id, name, next_offset) VALUES (1, 'new', 1)")
    new = await connection.fetchval("SELECT max(id) FROM queen.partitions")
    await connection.execute("INSERT INTO queen.segments VALUES ($1, 0, 1, now(), '', '')", new)
    await connection.execute(
        "INSERT INTO queen.cursors (partition_id, group_id, committed) VALUES ($1, 1, $2)", new, option != OPTIONS[2]
    )
    await age(connection, SECONDS + 1, "new")
    assert 0 < await costs.of(*jobs) < FEW
    assert await lacking(connection) == [new]


@pytest.mark.parametrize("option", OPTIONS)
async def test_a_notified_push_ends_the_pause_of_an_empty_partition(
    costs: Costs, connection: Connection, option: str
) -> None:
    """It was empty for a day, so that it would not be examined within the hour."""
    await set_options(connection, option)
    await connection.execute("UPDATE queen.segments SET created_at = now() + interval '1 d'")
    await age(connection, 86_400, "9")
    jobs = costs.jobs()
    await costs.of(*jobs)
    await connection.execute("INSERT INTO queen.segments VALUES (9, 1, 1, now(), '', '')")
    await connection.execute("UPDATE queen.partitions SET next_offset = 2, last_at = now() WHERE id = 9")
    await connection.execute(
        "UPDATE queen.cursors SET committed = $1 WHERE partition_id = 9", 1 + (option != OPTIONS[2])
    )
    costs.push_listener.pushed(1, 9)
    assert await costs.of(*jobs) == 0
    await age(connection, SECONDS + 1, "9")
    costs.moment += SECONDS - 1
    assert await costs.of(*jobs) == 0
    costs.moment += 2
    await costs.of(*jobs)
    assert await lacking(connection) == [9]


async def test_completed_messages_go_soon_after_the_last_group_has_consumed_them(
    costs: Costs, connection: Connection
) -> None:
    """Acks send no notification: a partition is examined as often as is cheap, and nothing is removed too early."""
    await set_options(connection, "completed_retention_seconds")
    await connection.execute("UPDATE queen.cursors SET committed = 0 WHERE partition_id = 7")
    await age(connection, SECONDS + 1, "7")
    await connection.execute("UPDATE queen.segments SET created_at = now() + interval '1 d' WHERE partition_id <> 7")
    await connection.execute("DELETE FROM queen.partitions WHERE id % 3 = 0")
    jobs = costs.jobs()
    await costs.of(*jobs)
    looks = 0
    for _ in range(60):
        costs.moment += 60
        await age(connection, 60, "7")
        read = await costs.of(jobs[0])
        assert read < FEW
        looks += read > 0
    assert 7 not in await lacking(connection)
    assert 3 <= looks <= 12
    await connection.execute("UPDATE queen.cursors SET committed = 1 WHERE partition_id = 7")
    costs.moment += 3601
    await costs.of(*jobs)
    assert 7 in await lacking(connection)


async def test_a_group_that_goes_back_is_noticed_within_the_hour(costs: Costs, connection: Connection) -> None:
    """What it had consumed waits again, and has done so for too long already."""
    await set_options(connection, "max_wait_time_seconds", seconds=100_000)
    await connection.execute("UPDATE queen.cursors SET committed = 1")
    await age(connection, 100_001, "7")
    jobs = costs.jobs()
    await costs.of(*jobs)
    assert await lacking(connection) == []
    await connection.execute("UPDATE queen.cursors SET committed = 0 WHERE partition_id = 7")
    costs.moment += 3700
    await costs.of(*jobs)
    assert await lacking(connection) == [7]


async def test_shorter_retention_takes_effect_with_the_next_run(costs: Costs, connection: Connection) -> None:
    await set_options(connection, "retention_seconds", seconds=100_000)
    await age(connection, SECONDS + 1, "7", "8")
    jobs = costs.jobs()
    await costs.of(*jobs)
    assert await lacking(connection) == []
    await set_options(connection, "retention_seconds")
    await costs.of(*jobs)
    assert await lacking(connection) == [7, 8]


async def test_beyond_the_capacity_all_partitions_are_examined_once_a_minute(
    costs: Costs, connection: Connection
) -> None:
    await set_options(connection, "retention_seconds")
    jobs = costs.jobs(most_known=IDLE // 2)
    await costs.of(*jobs)
    await age(connection, SECONDS + 1, "7", str(IDLE))
    assert await costs.of(*jobs) == 0
    costs.moment += 61
    assert await costs.of(*jobs) >= IDLE
    assert await lacking(connection) == [7, IDLE]


async def test_the_round_of_all_partitions_is_gone_once_a_day(costs: Costs) -> None:
    rounds = PartitionSweep(1000, 30, lambda events: None)
    assert await costs.of(rounds) >= IDLE
    await costs.of(rounds)
    assert await costs.of(rounds) == 0


async def test_the_elected_worker_is_notified_of_pushes_to_another_worker(start_server: StartServer) -> None:
    here = await start_server(0, num_workers=2)
    await broker_of(here).jobs.elected.wait()
    there = await start_server(1, num_workers=2)
    await here.push("logs", 1)
    queue = await broker_of(here).catalog.queue("logs")
    assert queue is not None
    listener = broker_of(here).jobs.push_listener.listen(queue.id)
    for api in (here, there):
        await api.push("logs", 2)

        async def heard() -> bool:
            return bool(listener.take())

        await until(heard)


async def lacking(connection: Connection) -> list[int]:
    """Partitions of which messages have been removed."""
    rows = await connection.fetch(
        "SELECT p.id FROM queen.partitions p WHERE p.next_offset > 0 AND (p.id % 3 > 0 OR p.next_offset > 1)"
        " AND NOT EXISTS (SELECT FROM queen.segments s WHERE s.partition_id = p.id) ORDER BY p.id"
    )
    return [row["id"] for row in rows]

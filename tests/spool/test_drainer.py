"""The drainer: records are stored in order, each once; what is refused is quarantined alone, and retried."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path

import pytest

from queen.errors import DatabaseUnavailable
from queen.spool.drainer import BreakerState, Drainer, RecordsRefused, Span, advance
from queen.spool.record import Record
from queen.spool.spool import Spool
from queen.storage.database import Database
from tests.spool.records import record
from tests.support.ageing import until
from tests.support.database import Connection


class Numbers:
    """A store of records that are numbers; it refuses some of them."""

    def __init__(self, spool: Spool, database: Database) -> None:
        self._spool = spool
        self._database = database
        self.stored: list[int] = []
        self.announced: list[int] = []
        self.refused: set[int] = set()
        self.calls = 0
        self.fails = False
        self.loses = False

    async def store(self, spans: Sequence[Span], records: Sequence[Record]) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("no space left on device")
        numbers = [int.from_bytes(one.block, "big") for one in records]
        if self.refused & set(numbers):
            raise RecordsRefused("refused")
        async with self._database.transaction() as transaction:
            await advance(transaction, spans)
        self.stored += numbers
        if self.loses:
            self.loses = False
            raise DatabaseUnavailable("connection lost")

    async def divert(self, span: Span, record: Record, error: RecordsRefused) -> None:
        self._spool.failed.add(record, str(error))
        await advance(self._database, [span])

    async def forward(self, record: Record, error: RecordsRefused) -> bool:
        return False

    def order_key(self, record: Record) -> Hashable:
        return record.partition

    def announce(self, records: Sequence[Record]) -> None:
        self.announced += [int.from_bytes(one.block, "big") for one in records]


class Rig:
    """A spool, a store and a drainer that is run by hand."""

    def __init__(self, root: Path, database: Database) -> None:
        self.spool = Spool(root, records_per_file=1000, most_bytes=1 << 20)
        self.store = Numbers(self.spool, database)
        self.paused = False
        self.drainer = Drainer(
            self.spool,
            database,
            self.store,
            name="test",
            poll_seconds=0.01,
            batch_records=64,
            retry_seconds=0.0,
            open_seconds=0.0,
            paused=lambda: self.paused,
        )

    async def append(self, *records: Record) -> None:
        await self.spool.writer.append(records, due_at=0.0, flush_at=1)


@pytest.fixture
async def rig(tmp_path: Path, dsn: str) -> AsyncIterator[Rig]:
    database = Database(dsn)
    rig = Rig(tmp_path / "spool", database)
    yield rig
    await rig.drainer.stop()
    await rig.spool.close()
    await database.close()


async def test_records_are_stored_in_order_and_their_files_and_positions_go(rig: Rig, connection: Connection) -> None:
    await rig.append(*map(record, range(1, 101)))
    rig.drainer.start()
    await until(lambda: rig.store.stored == list(range(1, 101)))
    await until(lambda: not rig.spool.state.engaged)
    await until(lambda: not rig.spool.file_names())

    await rig.drainer.stop()
    assert await connection.fetchval("SELECT count(*) FROM queen.spool_progress") == 0


async def test_one_refused_record_is_quarantined_alone_and_found_in_halves(rig: Rig) -> None:
    rig.store.refused = {33}
    await rig.append(*map(record, range(1, 65)))
    rig.drainer.start()
    await until(lambda: rig.spool.state.settled == rig.spool.state.order)
    assert rig.store.stored == [number for number in range(1, 65) if number != 33]
    assert rig.spool.failed.count()[0] == 1
    rig.store.refused.clear()
    await until(lambda: rig.spool.failed.count()[0] == 0)
    assert rig.store.stored[-1] == 33


async def test_what_is_refused_costs_few_attempts(rig: Rig) -> None:
    rig.store.refused = {1}
    await rig.append(*map(record, range(1, 65)))
    await rig.drainer.positions.load()
    await rig.drainer._drain()
    assert rig.store.calls == 13, "the batch, and two for each of six halvings"


async def test_quarantined_records_of_a_partition_are_retried_in_order(rig: Rig) -> None:
    rig.store.refused = {1, 2, 3}
    await rig.append(record(1), record(2), record(3, partition="other"))
    rig.drainer.start()
    await until(lambda: rig.spool.failed.count()[0] == 3)
    rig.store.refused = {1}
    await until(lambda: rig.store.stored == [3])
    rig.store.refused = set()
    await until(lambda: rig.spool.failed.count()[0] == 0)
    assert rig.store.stored == [3, 1, 2]


async def test_a_position_that_went_back_is_continued_from(rig: Rig, connection: Connection) -> None:
    """As after a failover to a standby that had not received the last commits."""
    await rig.append(record(1))
    rig.drainer.start()
    await until(lambda: rig.store.stored == [1])
    first = await connection.fetchval("SELECT position FROM queen.spool_progress")
    await rig.append(record(2))
    await until(lambda: rig.store.stored == [1, 2])
    rig.paused = True
    await rig.append(record(3))
    await connection.execute("UPDATE queen.spool_progress SET position = $1", first)
    rig.paused = False
    await until(lambda: rig.store.stored == [1, 2, 2, 3])


async def test_records_that_an_attempt_of_unknown_outcome_has_stored_are_announced_and_not_stored_again(
    rig: Rig,
) -> None:
    rig.store.loses = True
    await rig.append(record(1), record(2))
    rig.drainer.start()
    await until(lambda: not rig.spool.state.engaged)
    await rig.append(record(3))
    await until(lambda: rig.store.stored == [1, 2, 3])
    assert rig.store.announced == [1, 2]


async def test_a_paused_drainer_stores_nothing(rig: Rig) -> None:
    rig.paused = True
    await rig.append(record(1))
    rig.drainer.start()
    rig.drainer.wake()
    assert await rig.drainer._try_round()
    assert rig.store.calls == 0
    rig.paused = False
    await until(lambda: rig.store.stored == [1])


async def test_failures_open_the_breaker_which_closes_when_they_are_over(rig: Rig) -> None:
    rig.store.fails = True
    await rig.append(record(1))
    rig.drainer.start()
    await until(lambda: rig.spool.state.breaker == BreakerState.OPEN)
    rig.store.fails = False
    await until(lambda: rig.store.stored == [1])
    assert rig.spool.state.breaker == BreakerState.CLOSED


async def test_a_record_that_is_quarantined_again_under_its_name_is_not_removed(rig: Rig) -> None:
    kept = record(7)
    rig.spool.failed.add(kept, "refused")
    (failed,) = rig.spool.failed.read()
    assert failed.file_id == uuid.UUID(int=7)
    rig.spool.failed.add(kept, "part of it still is")
    rig.spool.failed.remove(failed)
    (again,) = rig.spool.failed.read()
    assert again.record.reason == "part of it still is"
    rig.spool.failed.remove(again)
    assert list(rig.spool.failed.read()) == []

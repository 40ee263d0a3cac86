"""Batches at random: cut into tasks in any way, tried again, cut off anywhere, beside pushes to the same partitions.

Whatever happens: offsets are dense, every row that has no id of its own is stored once, every id once in its partition,
and rows of one task keep their order.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queen.log.dedup_filter import DedupFilter
from queen.log.stager import Stager
from queen.log.stages import Attempt, Stages
from queen.log.topic_store import TopicPublisher
from queen.storage.database import Database, Transaction
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem
from tests.support.api import Api
from tests.support.database import Connection, stored_messages

QUEUE = "q"
PARTITIONS = ("a", "b")
IDS = ("", "", "", "x", "y", "z")


@dataclass(frozen=True)
class Row:
    partition: str
    id: str


class Died(Exception):
    """The process that published is gone; PostgreSQL rolls back what it had not committed."""


class _DyingTransaction(Transaction):
    __slots__ = ("_left",)

    def __init__(self, transaction: Transaction, left: int) -> None:
        super().__init__(transaction._connection, transaction._statements)
        self._left = left

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        if self._left == 0:
            raise Died
        self._left -= 1
        return await super().fetch(name, *args)


class MortalDatabase(Database):
    """Dies before a transaction's statement number `dies_at`, if that is set."""

    dies_at: int | None = None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with super().transaction() as transaction:
            yield transaction if self.dies_at is None else _DyingTransaction(transaction, self.dies_at)


class Publisher:
    """Stages and publishes as a Spark driver and its tasks do."""

    def __init__(self, dsn: str) -> None:
        self.database = MortalDatabase(dsn)
        self.run = str(uuid.uuid4())
        self.stages = self._stages()

    def restart(self) -> None:
        """Another process goes on, which knows nothing."""
        self.stages = self._stages()

    async def stage(self, batch: int, items: Sequence[PushItem]) -> Attempt:
        stager = Stager(self.stages, self.run, batch, uuid.uuid4())
        if items:
            await stager.add(items)
        return await stager.finish()

    async def publish_dying(self, batch: int, attempts: Sequence[Attempt], dies_at: int) -> bool:
        """Whether it came to its end before it was to die."""
        self.database.dies_at = dies_at
        try:
            await self.stages.publish(self.run, batch, attempts)
        except Died:
            return False
        finally:
            self.database.dies_at = None
        return True

    def _stages(self) -> Stages:
        return Stages(
            self.database,
            Envelope(),
            IdSource(),
            TopicPublisher(self.database),
            lambda appended: None,
            dedup_window=3600,
            dedup_filter=DedupFilter(1 << 20),
        )


@pytest.fixture
async def publisher(dsn: str) -> AsyncIterator[Publisher]:
    publisher = Publisher(dsn)
    yield publisher
    await publisher.database.close()


def push_items(queue: str, rows: Sequence[tuple[int, Row]]) -> list[PushItem]:
    return [PushItem(queue, row.partition, msgspec.Raw(b'{"n":%d}' % n), row.id) for n, row in rows]


rows = st.lists(st.builds(Row, st.sampled_from(PARTITIONS), st.sampled_from(IDS)), min_size=1, max_size=8)
cuts = st.lists(st.integers(0, 8), max_size=3)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[Row], list[list[int]], list[int | None]]]:
    """For each batch its rows, and for each time it is tried: how it is cut, and where it dies (None: it does not)."""
    return [
        (some, draw(st.lists(cuts, min_size=len(deaths), max_size=len(deaths))), deaths)
        for some in draw(st.lists(rows, min_size=1, max_size=3))
        for deaths in [[*draw(st.lists(st.integers(0, 10), max_size=2)), None, *draw(st.sampled_from(([], [None])))]]
    ]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=batches(), pushes=st.lists(rows, max_size=3), large=st.booleans())
async def test_batches_at_random_are_stored_once(
    publisher: Publisher,
    api: Api,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    plan: Any,
    pushes: list[list[Row]],
    large: bool,
) -> None:
    """`large`: batches are copied before the partitions are locked, as those of some megabytes are."""
    monkeypatch.setattr("queen.log.stage_moves._COPIED_AHEAD_BYTES", 0 if large else 1 << 62)
    queue = f"q-{uuid.uuid4()}"
    publisher.run = str(uuid.uuid4())
    publisher.restart()

    async def push() -> None:
        for number, some in enumerate(pushes):
            items = [
                {"queue": queue, "partition": row.partition, "payload": {"push": number}, "transactionId": row.id}
                for row in some
            ]
            answer = await api.call("POST", "/api/v1/push", {"items": items})
            assert answer.status == 201

    async def publish() -> None:
        first = 0
        for batch, (some, all_cuts, deaths) in enumerate(plan):
            numbered = list(enumerate(some, first))
            first += len(some)
            for cut, dies_at in zip(all_cuts, deaths, strict=True):
                edges = sorted({0, len(numbered), *(min(edge, len(numbered)) for edge in cut)})
                tasks = [numbered[a:b] for a, b in pairwise(edges)]
                # A task that failed, or that was run twice, has staged as well.
                await publisher.stage(batch, push_items(queue, tasks[0]))
                attempts = [await publisher.stage(batch, push_items(queue, task)) for task in tasks]
                if dies_at is None:
                    await publisher.stages.publish(publisher.run, batch, attempts)
                elif not await publisher.publish_dying(batch, attempts, dies_at):
                    publisher.restart()

    await asyncio.gather(push(), publish())
    await check(
        connection, queue, [row for some, _, _ in plan for row in some], [row for some in pushes for row in some]
    )
    assert await connection.fetchval("SELECT count(*) FROM queen.stages WHERE run = $1", publisher.run) == 0


async def check(connection: Connection, queue: str, published: Sequence[Row], pushed: Sequence[Row]) -> None:
    for partition in PARTITIONS:
        stored = await stored_messages(connection, queue, partition)
        ids = Counter(message.transaction_id for message in stored)
        assert max(ids.values(), default=1) == 1
        assert {id for id in ids if id in IDS} == {
            row.id for row in [*published, *pushed] if row.partition == partition and row.id
        }
        numbers = [json.loads(message.payload).get("n") for message in stored]
        written = [number for number in numbers if number is not None]
        assert written == sorted(written)
        nameless = {n for n, row in enumerate(published) if row.partition == partition and not row.id}
        assert nameless <= set(written)
        assert len(stored) == len(nameless) + sum(not row.id for row in pushed if row.partition == partition) + len(
            {id for id in ids if id in IDS}
        )


@pytest.mark.parametrize("large", [False, True])
async def test_a_death_before_any_statement_leaves_nothing_and_the_next_attempt_everything(
    publisher: Publisher, api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Named and nameless messages, in one batch, so that both ways of storing them are taken."""
    monkeypatch.setattr("queen.log.stage_moves._COPIED_AHEAD_BYTES", 0 if large else 1 << 62)
    await api.push(QUEUE, {}, partition="b", ids=["x"])
    batch = 0
    finished = False
    while not finished:
        some = [(batch, Row("a", "")), (batch, Row("b", "x")), (batch, Row("b", f"id {batch}"))]
        attempts = [await publisher.stage(batch, push_items(QUEUE, some))]
        before = await connection.fetchval("SELECT sum(next_offset) FROM queen.partitions")
        finished = await publisher.publish_dying(batch, attempts, dies_at=batch)
        if not finished:
            assert await connection.fetchval("SELECT sum(next_offset) FROM queen.partitions") == before
            assert (await publisher.stages.publish(publisher.run, batch, attempts)).messages == 2
        assert (await publisher.stages.publish(publisher.run, batch, attempts)).repeated
        batch += 1
    assert batch > 8
    assert len(await stored_messages(connection, QUEUE, "a")) == batch
    ids = [message.transaction_id for message in await stored_messages(connection, QUEUE, "b")]
    assert ids == ["x", *(f"id {number}" for number in range(batch))]


async def test_a_large_batch_of_given_ids_is_checked_in_pieces(
    publisher: Publisher, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later pieces of a partition meet what earlier ones have just stored, in the same transaction."""
    monkeypatch.setattr("queen.log.stages._PIECE_MESSAGES", 1500)
    ids = [f"id {number % 3000}" for number in range(6000)]
    attempts = [
        await publisher.stage(
            0, push_items(QUEUE, [(n, Row("a", id)) for n, id in enumerate(ids)][start : start + 1000])
        )
        for start in range(0, 6000, 1000)
    ]
    assert not await publisher.publish_dying(0, attempts, dies_at=20)
    published = await publisher.stages.publish(publisher.run, 0, attempts)
    assert (published.messages, published.duplicates) == (3000, 3000)
    stored = await stored_messages(connection, QUEUE, "a")
    assert [message.transaction_id for message in stored] == ids[:3000]


async def test_pushes_pass_while_a_large_batch_is_copied_and_their_ids_count(
    publisher: Publisher, api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.log.stage_moves._COPIED_AHEAD_BYTES", 0)
    await api.push(QUEUE, {}, partition="a", ids=["before"])
    pushed = iter(("id 6", "id 9"))
    fetch = publisher.database.fetch

    async def push_when_copied(name: str, *args: Any) -> list[Any]:
        if name == "stage_flush":
            async with asyncio.timeout(100):
                await api.push(QUEUE, {}, partition="a", ids=[next(pushed)])
        return await fetch(name, *args)

    monkeypatch.setattr(publisher.database, "fetch", push_when_copied)
    # The first batch does not have the id that is pushed; the second has, and is checked under the locks then.
    for batch, numbers, outcome in ((0, range(5), (5, 0)), (1, range(8, 12), (3, 1))):
        attempts = [
            await publisher.stage(batch, push_items(QUEUE, [(n, Row("a", f"id {n}")) for n in numbers])),
        ]
        published = await publisher.stages.publish(publisher.run, batch, attempts)
        assert (published.messages, published.duplicates) == outcome
    ids = [message.transaction_id for message in await stored_messages(connection, QUEUE, "a")]
    assert ids == ["before", "id 6", *(f"id {n}" for n in range(5)), "id 9", "id 8", "id 10", "id 11"]

"""Consumers on WebSockets that do anything at any time: nothing is skipped, lost, or given again after its ack."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.faults.consumers import Record
from tests.support.api import Api
from tests.support.consumer import Consumer, acknowledgments, consuming
from tests.support.database import Connection

PARTITIONS, EACH = 12, 25


class Erratic:
    """Connects, takes a few batches, settles some of what it got in one way or another, and leaves."""

    def __init__(self, api: Api, record: Record, seed: int) -> None:
        self._api = api
        self._record = record
        self._chance = random.Random(seed)
        self._ids = itertools.count()

    async def run(self) -> None:
        while True:
            async with consuming(self._api) as consumer:
                await self._consume(consumer)

    async def _consume(self, consumer: Consumer) -> None:
        chance = self._chance
        await consumer.subscribe(
            "q",
            batch=chance.randint(1, 12),
            partitions=chance.choice((1, 1, 2, 5)),
            credit=chance.randint(1, 4),
            consumerGroup="g",
        )
        for _ in range(chance.randint(1, 8)):
            await consumer.send("credit", id="s", credit=1)
            for frame in await self._take(consumer):
                await self._settle(consumer, frame["messages"])
        end = chance.choice(("close", "cut", "unsubscribe"))
        if end == "cut":
            connection = consumer.socket._response.connection
            assert connection is not None and connection.transport is not None
            connection.transport.abort()
        elif end == "unsubscribe":
            # What lies unread by then goes back, and somebody else may have acked it when it is read here.
            left_at = time.monotonic()
            await consumer.send("unsubscribe", id="s", release=True)
            while (frame := await consumer.next())["type"] != "unsubscribed":
                self._note(frame, given_at=left_at)

    async def _take(self, consumer: Consumer) -> list[dict[str, Any]]:
        """The next batch, if one comes soon."""
        try:
            frame = await consumer.next(patience=0.3)
        except TimeoutError:
            return []
        return self._note(frame)

    def _note(self, frame: dict[str, Any], given_at: float | None = None) -> list[dict[str, Any]]:
        assert frame["type"] in ("batch", "acked"), frame
        if frame["type"] == "acked":
            return []
        self._record.note_given(frame["messages"], asked_at=time.monotonic() if given_at is None else given_at)
        return [frame]

    async def _settle(self, consumer: Consumer, messages: list[dict[str, Any]]) -> None:
        chance = self._chance
        some = messages[: chance.choice((len(messages), len(messages), chance.randint(1, len(messages))))]
        what = chance.choice(("ack", "ack", "ack", "retry", "nothing"))
        if what == "nothing":
            return
        status = "completed" if what == "ack" else "retry"
        id = f"settle-{next(self._ids)}"
        await consumer.send("ack", id=id, acknowledgments=acknowledgments(some), status=status)
        # Not the answer of a `nack`, nor that of an earlier one: what is noted as acked has been answered.
        while (frame := await consumer.next())["type"] != "acked" or frame["id"] != id:
            for other in self._note(frame):
                # Of what came meanwhile, it forgets to ack some.
                if chance.random() < 0.5:
                    await consumer.send("nack", acknowledgments=acknowledgments(other["messages"]), status="retry")
        if what == "ack":
            assert all(result["success"] for result in frame["results"]), frame
            for message in some:
                self._record.note_acked(message)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_consumers_do_every_message_is_consumed_once_and_in_order(
    start_server: StartServer, connection: Connection, seed: int
) -> None:
    servers = [await start_server(worker_id=id, num_workers=2) for id in range(2)]
    record = Record()
    tasks = [asyncio.create_task(Erratic(servers[n % 2], record, seed * 100 + n).run()) for n in range(4)]
    try:
        for number in range(EACH):
            await asyncio.gather(*(servers[p % 2].push("q", number, partition=str(p)) for p in range(PARTITIONS)))
        await asyncio.wait_for(_until_consumed(connection, tasks), 100)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert dict(record.given) == {str(p): EACH for p in range(PARTITIONS)}
    # Nothing that was done here costs a retry.
    assert await connection.fetchval("SELECT max(attempts) FROM queen.cursors") == 0


async def _until_consumed(connection: Connection, tasks: list[asyncio.Task[None]]) -> None:
    query = "SELECT count(*) FROM queen.cursors WHERE committed = $1"
    while await connection.fetchval(query, EACH) < PARTITIONS:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)

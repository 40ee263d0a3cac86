"""More work than PostgreSQL takes: refused in good time, with a word on when to come back, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc

import psutil
import pytest

from queen.log.slices import PushSlice
from tests.conftest import StartServer
from tests.support.ageing import broker_of
from tests.support.api import Answer, Api
from tests.support.database import Connection, stored_messages

MEGABYTE = 1 << 20


async def test_pushes_beyond_what_may_wait_are_refused_at_once_and_the_others_are_stored(
    api: Api, connection: Connection
) -> None:
    await api.push("q", "first")
    payload = "x" * MEGABYTE
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("SELECT FROM queen.partitions FOR UPDATE")

    async def push(number: int) -> tuple[int, Answer]:
        item = {"queue": "q", "payload": payload, "transactionId": str(number)}
        return number, await api.call("POST", "/api/v1/push", {"items": [item]})

    before = psutil.Process().memory_info().rss
    pushes = [asyncio.create_task(push(number)) for number in range(150)]
    done: set[asyncio.Task[tuple[int, Answer]]] = set()
    waiting = set(pushes)
    while len(done) < 50:
        finished, waiting = await asyncio.wait(waiting, timeout=100, return_when=asyncio.FIRST_COMPLETED)
        assert finished, "nobody is refused"
        done |= finished
    for _, answer in (task.result() for task in done):
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert "try again" in answer.body["error"]
    # The client of this test lives in the same process and holds its share of every payload.
    assert psutil.Process().memory_info().rss - before < 1000 * MEGABYTE
    # Others are served meanwhile.
    assert (await api.call("GET", "/api/v1/pop/queue/other")).status == 204
    await transaction.rollback()
    results = await asyncio.gather(*pushes)
    stored = {int(message.transaction_id) for message in (await stored_messages(connection, "q"))[1:]}
    assert stored == {number for number, answer in results if answer.status == 201}
    assert {answer.status for _, answer in results} == {201, 503}
    assert len(stored) >= 50
    (result,) = await api.push("q", "last")
    assert result["status"] == "queued"


async def test_what_waits_too_long_for_a_lock_is_to_be_tried_again(
    start_server: StartServer, connection: Connection
) -> None:
    """Rows are locked for longer than any request may wait: nothing is stored, and the request can be repeated."""
    api = await start_server(db_lock_timeout=300)
    await api.push("q", 1, 2, 3)
    messages = await api.pop("q")
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("SELECT FROM queen.partitions FOR UPDATE")
    await connection.execute("SELECT FROM queen.cursors FOR UPDATE")
    ack = {key: messages[0][key] for key in ("transactionId", "partitionId", "leaseId")}
    push = {"items": [{"queue": "q", "payload": 4}]}
    requests: list[tuple[str, str, object]] = [
        *[("POST", "/api/v1/push", push)] * 20,
        *[("POST", "/api/v1/ack", ack)] * 5,
        ("POST", "/api/v1/ack", ack | {"status": "failed"}),
        ("POST", f"/api/v1/lease/{messages[0]['leaseId']}/extend", {}),
        ("POST", "/api/v1/transaction", {"operations": [{"type": "push", **push}]}),
        ("POST", "/api/v1/transaction", {"operations": [{"type": "ack", **ack}]}),
    ]
    async with asyncio.timeout(100):
        answers = await asyncio.gather(*(api.call(method, path, body) for method, path, body in requests))
    assert {answer.status for answer in answers} == {503}
    assert {answer.headers["Retry-After"] for answer in answers} == {"1"}
    await transaction.rollback()
    assert [message.payload for message in await stored_messages(connection, "q")] == [b"1", b"2", b"3"]
    assert all(result["success"] for result in await api.ack(messages))
    assert [message["data"] for message in await api.pop("q")] == [2]


def slices_left() -> int:
    """Slices of pushes that are still in memory, reachable or not."""
    return sum(isinstance(one, PushSlice) for one in gc.get_objects())


async def test_what_is_refused_leaves_nothing_for_the_collector(
    start_server: StartServer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_server(db_lock_timeout=100)
    await api.push("q", 1)
    item = {"queue": "q", "payload": "x" * 100_000}
    batcher = broker_of(api).pusher.batcher
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as full:
            full.setattr(batcher, "_weight", 1 << 40)
            for _ in range(5):
                assert (await api.call("POST", "/api/v1/push", {"items": [item]})).status == 503
        assert slices_left() == 0
        async with connection.transaction():
            await connection.execute("SELECT FROM queen.partitions FOR UPDATE")
            answers = await asyncio.gather(*(api.call("POST", "/api/v1/push", {"items": [item]}) for _ in range(5)))
        assert {answer.status for answer in answers} == {503}
        await broker_of(api).pusher.join()
        assert slices_left() == 0
    finally:
        gc.enable()

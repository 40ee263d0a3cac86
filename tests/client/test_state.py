"""Keys, locks, timers, ephemeral queues, conflation and reading by offset, with the client."""

from __future__ import annotations

import asyncio

import pytest

from queen import Queen
from queen.client.errors import LockLostError, QueenError, RequestError
from tests.client.conftest import MakeClient
from tests.support.ageing import Connection, until
from tests.support.api import Api


async def test_keys(queen: Queen) -> None:
    keys = queen.kv("orders")
    assert await keys.get("a", "nothing") == "nothing"
    first = await keys.put("a", {"n": 1}, ttl=60)
    assert (await keys.put("a", 2, expect=first["version"]))["applied"]
    assert not (await keys.put("a", 3, expect=first["version"]))["applied"]
    assert await keys.get("a") == 2 and (await keys.entry("a"))["expiresAt"] is None
    assert [await keys.put_if_absent("b", True) for _ in range(2)] == [True, False]
    assert [await keys.incr("n"), await keys.incr("n", 4)] == [1, 5]
    assert await keys.get_many(["a", "b", "c"]) == {"a": 2, "b": True}
    with pytest.raises(QueenError, match="holds no number"):
        await keys.incr("b")
    assert [await keys.delete("a") for _ in range(2)] == [True, False]
    with pytest.raises(RequestError, match="key"):
        await keys.get("")


async def test_a_lock_has_one_holder_who_can_guard_a_transaction(queen: Queen, api: Api) -> None:
    async with queen.lock("report") as lock:
        assert not await queen.lock("report").acquire(wait=False)
        waiting = asyncio.create_task(queen.lock("report", poll_seconds=0.01).acquire())
        push = {"type": "push", "items": [{"queue": "out", "payload": 1}]}
        body = {"operations": [push], "kv": [lock.guard]}
        assert (await queen.request("POST", "/api/v1/transaction", body))["success"]
    assert lock.lost and await waiting
    with pytest.raises(LockLostError):
        _ = lock.guard
    again = await queen.request("POST", "/api/v1/transaction", body)
    assert (again["success"], again["reason"]) == (False, "kv_precondition")


async def test_a_lock_is_renewed_and_says_that_it_was_lost(queen: Queen, connection: Connection) -> None:
    async with queen.lock("report", ttl=1) as lock:
        first = lock.guard["expect"]
        await until(lambda: lock.lost or lock.guard["expect"] > first)
        assert not lock.lost
        await connection.execute("DELETE FROM queen.kv")
        await until(lambda: lock.lost)


async def test_timers(queen: Queen) -> None:
    timers = queen.timers("reminders")
    await timers.schedule("a", {"order": 1}, seconds=3600, partition="p")
    await timers.schedule("b", "now", seconds=0, transaction_id="t1")
    (message,) = await queen.queue("reminders").timeout_millis(20_000).pop()
    assert (message["data"], message["transactionId"]) == ("now", "t1")
    assert [one["timerKey"] for one in await timers.pending()] == ["a"]
    assert [await timers.cancel("a") for _ in range(2)] == [True, False]


async def test_ephemeral_queues(queen: Queen) -> None:
    presence = queen.ephemeral("presence")
    await presence.configure(maxLength=3)
    assert await presence.push([1, {"user": "ü"}], partition="room") == 2
    messages = await presence.pop(group="g", batch=9, wait_seconds=20)
    assert [(one["payload"], one["partition"]) for one in messages] == [(1, "room"), ({"user": "ü"}, "room")]
    assert await presence.ack(messages[:1], group="g") == ["acked"]
    assert await presence.ack(messages[1:], "retry", group="g") == ["redelivered"]
    assert (await presence.depth())["groups"] == [{"group": "g", "pending": 0, "leased": 1}]
    with pytest.raises(RequestError, match="is full"):
        await presence.push([1, 2, 3])
    assert await presence.pop(auto_ack=True) and await presence.reset() == 1
    assert [await presence.delete() for _ in range(2)] == [True, False]


async def test_conflation_and_reading_by_offset(queen: Queen, make_client: MakeClient) -> None:
    await queen.queue("tasks").partition("p").push([{"data": n} for n in range(5)])
    builder = queen.queue("tasks").group("g").conflation().batch(10).wait(False)
    messages = await builder.pop()
    assert [message["data"] for message in messages] == [4]
    await queen.ack(messages, True, {"group": "g"})
    assert await builder.pop() == []
    found = await queen.fetch("tasks", partition="p", offset=3)
    assert [record["payload"] for record in found["records"]] == [3, 4] and found["highWatermark"] == 5
    assert (await queen.fetch("tasks", partition="p", offset=9))["error"] == "OFFSET_OUT_OF_RANGE"
    with pytest.raises(ValueError, match="transport"):
        await builder.consume(lambda message: None, transport="websocket")

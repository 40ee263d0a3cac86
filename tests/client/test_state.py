"""Keys, locks, timers, ephemeral queues, conflation and reading by offset, with the client."""

from __future__ import annotations

import asyncio

import pytest

from queen import LockLostError, Message, PreconditionError, Queen, QueenError, RequestError, TransactionError
from queen.client.transaction import Transaction
from tests.client.conftest import MakeClient, url_of
from tests.support.ageing import Connection, until
from tests.support.proxy import TcpProxy


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
    await keys.put("an", 7)
    rows = await keys.scan("a")
    assert [(row["key"], row["value"]) for row in rows] == [("a", 2), ("an", 7)]
    assert [row["key"] for row in await keys.scan("a", after="a", limit=5)] == ["an"]
    with pytest.raises(QueenError, match="holds no number"):
        await keys.incr("b")
    assert [await keys.delete("a") for _ in range(2)] == [True, False]
    with pytest.raises(RequestError, match="key"):
        await keys.get("")


async def test_a_lock_has_one_holder_who_can_guard_a_transaction(queen: Queen) -> None:
    async with queen.lock("report") as lock:
        assert not await queen.lock("report").acquire(wait=False)
        waiting = asyncio.create_task(queen.lock("report", poll_seconds=0.01).acquire())
        assert (await queen.transaction().guard(lock).queue("out").push({"data": 1}).commit())["success"]
        late = queen.transaction().guard(lock).queue("out").push({"data": 2})
    assert lock.lost and await waiting
    with pytest.raises(LockLostError):
        queen.transaction().guard(lock)
    with pytest.raises(PreconditionError, match="rolled back"):
        await late.commit()
    assert [message["data"] for message in await queen.queue("out").batch(9).pop()] == [1]


async def test_keys_and_timers_change_with_a_transaction_or_not_at_all(queen: Queen) -> None:
    def once() -> Transaction:
        transaction = queen.transaction().kv("orders").put_if_absent("invoiced-7", ttl=60)
        transaction.kv("orders").incr("count").kv("orders").put("state", "sent", expect=0, required=False)
        return transaction.timers("late").schedule("order-7", 7, seconds=3600).queue("out").push({"data": 7})

    await once().commit()
    with pytest.raises(PreconditionError) as refused:
        await once().commit()
    assert (refused.value.reason, refused.value.value) == ("exists", True)
    keys, version = queen.kv("orders"), refused.value.version
    assert (await keys.entry("invoiced-7"))["version"] == version and await keys.get("count") == 1
    await queen.transaction().kv("orders").check("invoiced-7", version or 0).timers("late").cancel("order-7").commit()
    assert await queen.timers("late").pending() == []
    with pytest.raises(PreconditionError, match="rolled back"):
        await (
            queen.transaction().kv("orders").delete("invoiced-7", expect=10**9).queue("out").push({"data": 8}).commit()
        )
    assert [message["data"] for message in await queen.queue("out").batch(9).pop()] == [7]
    with pytest.raises(TransactionError, match="no operations"):
        await queen.transaction().commit()


async def test_a_lock_is_renewed_and_says_that_it_was_lost(queen: Queen, connection: Connection) -> None:
    async with queen.lock("report", ttl=3) as lock:
        first = lock.guard["expect"]
        await until(lambda: lock.lost or lock.guard["expect"] > first)
        assert not lock.lost
        await connection.execute("DELETE FROM queen.kv")
        await until(lambda: lock.lost)


async def test_a_lock_that_cannot_be_renewed_is_lost_in_time(wire: TcpProxy, make_client: MakeClient) -> None:
    lock = make_client(url_of(wire), retry_attempts=1).lock("report", ttl=1)
    await lock.acquire()
    assert not lock.lost
    async with wire.away():
        await until(lambda: lock.lost)
        with pytest.raises(LockLostError):
            _ = lock.guard


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


async def test_conflation_and_reading_by_offset(queen: Queen) -> None:
    await queen.queue("tasks").partition("p").push([{"data": n} for n in range(5)])
    builder = queen.queue("tasks").group("g").conflation().batch(10).wait(False)
    messages = await builder.pop()
    assert [message["data"] for message in messages] == [4]
    await queen.ack(messages, True, {"group": "g"})
    assert await builder.pop() == []
    found = await queen.fetch("tasks", partition="p", offset=3)
    assert [record["payload"] for record in found["records"]] == [3, 4] and found["highWatermark"] == 5
    assert (await queen.fetch("tasks", partition="p", offset=9))["error"] == "OFFSET_OUT_OF_RANGE"


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_consumers_with_conflation_get_the_newest_message(queen: Queen, transport: str) -> None:
    seen: list[object] = []
    enough = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.append(message["data"])
        if len(seen) == 1:
            await queen.queue("tasks").partition("p").push([{"data": n} for n in range(5, 8)])
        else:
            enough.set()

    await queen.queue("tasks").partition("p").push([{"data": n} for n in range(5)])
    await queen.queue("tasks").group("g").conflation().consume(handle, signal=enough, transport=transport)
    assert seen == [4, 7]

"""The client without `await`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from queen import LeaseLostError, Message, PreconditionError, Queen, QueenSync, UnsentError
from queen.client.admin import DlqQuery
from queen.client.queue import QueueBuilder
from queen.client.state import EphemeralQueue, KeyValues, Lock, Timers
from queen.client.sync import (
    DlqSync,
    EphemeralQueueSync,
    KeyValuesSync,
    LockSync,
    QueueSync,
    TimersSync,
    TransactionSync,
)
from queen.client.topics.sync import TopicSync
from queen.client.topics.topic import TopicBuilder
from queen.client.transaction import Transaction
from tests.support.api import Api


async def in_thread(work: Any) -> None:
    """The server of the test runs in this thread's event loop, so the one that waits is another."""
    await asyncio.to_thread(work)


async def test_grammar_is_the_same_without_await(api: Api) -> None:
    def script() -> None:
        with QueenSync(api.url) as queen:
            assert queen.queue("q").config({"retryLimit": 0}).create()["configured"] is True
            results = queen.queue("q").partition("p").push([{"data": n} for n in range(3)])
            assert [result["status"] for result in results] == ["queued"] * 3
            first, second, third = queen.queue("q").partition("p").batch(3).pop()
            assert [first["data"], second["data"], third["data"]] == [0, 1, 2]
            assert queen.renew(first)["success"] is True
            assert queen.ack(first)["success"] is True
            queen.transaction().ack(second).queue("out").partition("o").push({"data": "moved"}).commit()
            assert queen.ack([third], False, {"error": "bad"})["success"] is True
            found = queen.queue("q").dlq().limit(5).get()
            assert [letter["errorMessage"] for letter in found["messages"]] == ["bad"]
            assert queen.admin.get_queue("out")["name"] == "out"
            assert queen.request("GET", "/health")["status"] == "healthy"
            assert queen.queue("q").wait(False).pop() == []
            queen.queue("b").buffer({"message_count": 100, "time_millis": 60_000}).push({"data": 1})
            assert queen.get_buffer_stats()["totalBufferedMessages"] == 1
            queen.queue("b").flush_buffer()
            queen.queue("b").buffer({"message_count": 100, "time_millis": 60_000}).push({"data": 2})
            assert queen.delete_consumer_group("nobody")["success"] is True
            assert queen.queue("q").delete()["deleted"] is True

    await in_thread(script)
    assert [message["data"] for message in await api.pop("out", partition="o")] == ["moved"]
    assert [message["data"] for message in await api.pop("b", batch=5)] == [1, 2]


async def test_keys_locks_timers_and_ephemeral_queues_without_await(api: Api) -> None:
    def script() -> None:
        with QueenSync(api.url) as queen:
            keys = queen.kv("orders")
            assert keys.put("a", 1, ttl=60)["applied"] and keys.incr("a", 2) == 3
            assert keys.get("a") == 3 and keys.get("b", "none") == "none"
            with queen.lock("report") as lock:
                assert not queen.lock("report").acquire(wait=False)
                queen.transaction().guard(lock).kv("orders").put_if_absent("done").queue("out").push(
                    {"data": 1}
                ).commit()
            assert lock.lost
            with pytest.raises(PreconditionError):
                queen.transaction().kv("orders").put_if_absent("done").commit()
            queen.timers("reminders").schedule("r", {"order": 7}, seconds=0)
            assert [message["data"] for message in queen.queue("reminders").pop()] == [{"order": 7}]
            presence = queen.ephemeral("presence")
            assert presence.push(["ada"]) == 1
            assert presence.ack(presence.pop(group="screen", wait_seconds=20), group="screen") == ["acked"]
            queen.queue("q").push([{"data": n} for n in range(3)])
            assert [record["payload"] for record in queen.fetch("q", offset=1)["records"]] == [1, 2]
            newest = queen.queue("q").group("g").conflation().batch(9).pop()
            assert [message["data"] for message in newest] == [2]

    await in_thread(script)


def test_the_synchronous_client_has_every_method() -> None:
    pairs: list[tuple[type, type]] = [(Queen, QueenSync), (QueueBuilder, QueueSync), (TopicBuilder, TopicSync)]
    pairs += [(KeyValues, KeyValuesSync), (Lock, LockSync), (Timers, TimersSync), (EphemeralQueue, EphemeralQueueSync)]
    pairs += [(Transaction, TransactionSync), (DlqQuery, DlqSync)]
    for awaited, blocking in pairs:
        missing = {name for name in dir(awaited) if not name.startswith("_")} - {*dir(blocking)} - {"engine"}
        assert not missing, blocking


async def test_handlers_run_in_threads_and_trace_without_await(api: Api) -> None:
    got: list[Any] = []
    threads: set[int] = set()
    meeting = threading.Barrier(2, timeout=100)

    def handle(message: Message) -> None:
        threads.add(threading.get_ident())
        meeting.wait()
        traced: Any = message["trace"]({"traceName": "seen", "data": {"n": message["data"]}})
        got.append((message["data"], traced["success"]))

    def script() -> None:
        with QueenSync(api.url) as queen:
            queen.queue("q").partition("a").push({"data": 1})
            queen.queue("q").partition("b").push({"data": 2})
            queen.queue("q").concurrency(2).limit(1).consume(handle)
            assert queen.admin.get_traces_by_name("seen")["total"] == 2

    await in_thread(script)
    assert sorted(got) == [(1, True), (2, True)]
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_failing_handler_gets_its_message_again(api: Api) -> None:
    calls: list[Any] = []
    enough = threading.Event()

    def handle(message: Message) -> None:
        calls.append(message["data"])
        if len(calls) < 3:
            raise ValueError("not yet")
        enough.set()

    def script() -> None:
        with QueenSync(api.url) as queen:
            queen.queue("q").config({"retryDelay": 0}).create()
            queen.queue("q").push({"data": 1})
            queen.queue("q").timeout_millis(1000).consume(handle, signal=enough)
            assert queen.queue("q").wait(False).pop() == []

    await in_thread(script)
    assert calls == [1, 1, 1]


async def test_errors_are_those_of_the_other_client(api: Api) -> None:
    def script() -> None:
        with QueenSync(api.url, strict=True) as queen, pytest.raises(LeaseLostError):
            queen.renew("00000000-0000-7000-8000-000000000000")
        away = QueenSync("http://127.0.0.1:1", retry_attempts=1)
        away.queue("q").buffer({"time_millis": 60_000}).push({"data": 1})
        with pytest.raises(UnsentError):
            away.close()
        away.close()

    await in_thread(script)


async def test_it_works_where_an_event_loop_runs(api: Api) -> None:
    """As in a notebook: the thread that calls it is inside a running event loop."""

    async def cell() -> list[Message]:
        with QueenSync(api.url) as queen:
            queen.queue("q").push({"data": 1})
            return queen.queue("q").pop()

    [message] = await asyncio.to_thread(asyncio.run, cell())
    assert message["data"] == 1

"""Consuming: acknowledgment, leases, cancelling, stopping."""

from __future__ import annotations

import asyncio
import sys
from decimal import Decimal
from typing import Any

import pytest
from aiohttp import web

from queen import LeaseLostError, Message, NotFoundError, Queen
from tests.client.conftest import MakeClient, url_of
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.ports import free_port
from tests.support.proxy import TcpProxy


async def push_numbers(queen: Queen, queue: str, count: int, partition: str = "Default") -> None:
    await queen.queue(queue).partition(partition).push([{"data": n} for n in range(count)])


async def left(queen: Queen, queue: str, group: str | None = None) -> list[Any]:
    """Messages that the group has not consumed and that are not leased."""
    builder = queen.queue(queue).batch(100).partitions(10).wait(False)
    return [message["data"] for message in await (builder.group(group) if group else builder).pop()]


async def test_error_of_a_handler_is_the_error_of_its_dead_letter(queen: Queen) -> None:
    await queen.queue("q").config({"retryLimit": 0}).create()
    await push_numbers(queen, "q", 1)

    async def handle(message: Message) -> None:
        raise ValueError("no such customer")

    await queen.queue("q").limit(1).consume(handle)
    found = await queen.queue("q").dlq().get()
    assert [letter["errorMessage"] for letter in found["messages"]] == ["ValueError: no such customer"]


async def test_error_of_a_handler_may_have_any_text(queen: Queen) -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    errors = [FileNotFoundError("caf\udce9\0"), ValueError("x" * 5_000_000), Speechless()]
    await queen.queue("q").config({"retryLimit": 0}).create()
    await push_numbers(queen, "q", 3)
    await queen.topic("n", "t").configure(max_retries=0)
    await queen.topic("n", "t").enqueue([{"data": n} for n in range(3)])

    async def handle(message: Message) -> None:
        raise errors[message["data"]]

    async def handle_item(item: Any) -> None:
        raise errors[item["data"]]

    await queen.queue("q").limit(3).consume(handle)
    texts = {letter["data"]: str(letter["errorMessage"]) for letter in (await queen.queue("q").dlq().get())["messages"]}
    assert texts[0].startswith(r"FileNotFoundError: caf\udce9")
    assert len(texts[1]) == 10_000
    assert texts[2] == "Speechless"
    await queen.topic("n", "t").limit(3).consume(handle_item)
    counts = await queen.topic("n", "t").counts()
    assert counts is not None and counts["dead"] == 3


async def push_deep(api: Api, body: bytes) -> None:
    limit = sys.getrecursionlimit()
    # As a server of its own has it, which this process is as well.
    sys.setrecursionlimit(20_000)
    try:
        assert (await api.call("POST", "/api/v1/push", data=body)).status == 201
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_a_message_that_is_nested_deeply_ends_no_consumer(queen: Queen, api: Api, transport: str) -> None:
    # Deeper than Python 3.11 goes by itself, and not deeper than 3.12 ever does.
    depth, limit = 1_400, sys.getrecursionlimit()
    body = b'{"items": [{"queue": "deep", "payload": %b}, {"queue": "deep", "payload": "next"}]}'
    await push_deep(api, body % (b"[" * depth + b"]" * depth))
    handled: list[int] = []

    async def handle(message: Message) -> None:
        data, levels = message["data"], 0
        while isinstance(data, list):
            data, levels = data[0] if data else None, levels + 1
        handled.append(levels)

    await queen.queue("deep").limit(2).consume(handle, transport=transport)
    assert handled == [depth, 0]
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_a_number_of_any_size_ends_no_consumer(queen: Queen, api: Api, transport: str) -> None:
    numbers = ("-" + "7" * 5_000, "2.5e400", "[" * 1_400 + "9" * 5_000 + "]" * 1_400)
    items = b",".join(b'{"queue": "large", "payload": %b}' % number.encode() for number in (*numbers, "3"))
    await push_deep(api, b'{"items": [%b]}' % items)
    handled: list[Any] = []

    async def handle(message: Message) -> None:
        data = message["data"]
        while isinstance(data, list):
            data = data[0]
        handled.append(data)

    await queen.queue("large").limit(4).consume(handle, transport=transport)
    assert handled == [Decimal("-" + "7" * 5_000), Decimal("2.5e400"), Decimal("9" * 5_000), 3]


async def test_handler_may_be_a_plain_function(queen: Queen) -> None:
    await push_numbers(queen, "q", 3)
    got: list[Any] = []

    def handle(messages: list[Message]) -> None:
        got.extend(message["data"] for message in messages)

    await queen.queue("q").batch(3).limit(3).consume(handle)
    assert got == [0, 1, 2]
    assert await left(queen, "q") == []


async def test_handler_whose_lease_runs_out_gets_its_message_again(queen: Queen) -> None:
    await queen.queue("q").config({"leaseTime": 1}).create()
    await push_numbers(queen, "q", 1)
    calls: list[str] = []

    async def handle(message: Message) -> None:
        calls.append(message["leaseId"])
        if len(calls) == 1:
            # Somebody else gets it meanwhile, as it would be with a second consumer.
            [taken] = await queen.queue("q").timeout_millis(5000).pop()
            await queen.ack(taken, "retry")

    await queen.queue("q").limit(2).consume(handle)
    assert len(set(calls)) == 2
    assert await left(queen, "q") == []


async def test_lease_is_renewed_without_an_interval(queen: Queen) -> None:
    await queen.queue("q").config({"leaseTime": 1}).create()
    await push_numbers(queen, "q", 1)
    others: list[Message] = []

    async def handle(message: Message) -> None:
        others.extend(await queen.queue("q").timeout_millis(1500).pop())

    await queen.queue("q").renew_lease().limit(1).consume(handle)
    assert others == []
    assert await left(queen, "q") == []


async def test_failed_message_of_each_holds_back_its_partition_alone(queen: Queen) -> None:
    await queen.queue("q").config({"retryDelay": 0}).create()
    await push_numbers(queen, "q", 3, "a")
    await push_numbers(queen, "q", 3, "b")
    calls: list[tuple[str, int]] = []
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        calls.append((message["partition"], message["data"]))
        if calls.count(("a", 1)) == 1 and calls[-1] == ("a", 1):
            raise ValueError("not yet")
        if len(calls) == 7:
            done.set()

    await queen.queue("q").batch(6).partitions(2).each().consume(handle, signal=done)
    assert [n for partition, n in calls if partition == "a"] == [0, 1, 1, 2]
    assert [n for partition, n in calls if partition == "b"] == [0, 1, 2]
    assert await left(queen, "q") == []


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_what_follows_a_dead_letter_in_a_batch_of_each_is_given_back_at_once(
    queen: Queen, transport: str
) -> None:
    await queen.queue("q").config({"retryLimit": 0, "leaseTime": 300}).create()
    await push_numbers(queen, "q", 3)
    calls: list[int] = []
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        calls.append(message["data"])
        if message["data"] == 0:
            raise ValueError("never")
        if message["data"] == 2:
            done.set()

    async with asyncio.timeout(100):
        await queen.queue("q").batch(3).each().consume(handle, signal=done, transport=transport)
    assert calls == [0, 1, 2]
    assert (await queen.queue("q").dlq().get())["total"] == 1


async def test_a_server_that_keeps_the_lease_of_what_follows_a_dead_letter_is_given_it_back(
    make_client: MakeClient,
) -> None:
    """As servers of the published clients do: without the client, the rest came again after the whole lease."""
    batch = [{"transactionId": f"t{n}", "partitionId": "p", "leaseId": "l", "data": n} for n in range(3)]
    acks: list[tuple[str, str]] = []
    released = asyncio.Event()

    async def pop(request: web.Request) -> web.Response:
        some, batch[:] = batch[:], []
        return web.json_response({"messages": some})

    async def ack(request: web.Request) -> web.Response:
        sent = (await request.json())["acknowledgments"]
        acks.extend((one["transactionId"], one.get("status", "completed")) for one in sent)
        if any(one.get("status") == "retry" for one in sent):
            released.set()
        return web.json_response([{"success": True, "dlq": True, "leaseReleased": False} for _ in sent])

    async def handle(message: Message) -> None:
        raise ValueError("never")

    app = web.Application()
    app.add_routes([web.get("/api/v1/pop/queue/q", pop), web.post("/api/v1/ack/batch", ack)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", free_port())
        await site.start()
        async with asyncio.timeout(100):
            await make_client(site.name).queue("q").batch(3).each().consume(handle, signal=released)
    finally:
        await runner.cleanup()
    assert acks == [("t0", "failed"), ("t2", "retry")]


async def test_what_can_be_awaited_can_be_a_task(queen: Queen) -> None:
    await asyncio.create_task(queen.queue("q").create())
    await asyncio.create_task(queen.queue("q").push([{"data": 1}]))
    await asyncio.create_task(queen.queue("q").buffer({"message_count": 1}).push([{"data": 2}]))
    got: list[int] = []

    async def handle(message: Message) -> None:
        got.append(message["data"])

    await asyncio.create_task(queen.queue("q").limit(2).consume(handle))
    assert got == [1, 2]
    waiting = asyncio.create_task(queen.queue("q").consume(handle))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    queen.queue("q").push([{"data": 3}]).close()


async def test_limit_is_not_passed_by_a_batch(queen: Queen) -> None:
    await push_numbers(queen, "q", 10)
    got: list[int] = []

    async def handle(messages: list[Message]) -> None:
        got.append(len(messages))

    await queen.queue("q").batch(4).limit(6).consume(handle)
    assert got == [4, 2]
    assert await left(queen, "q") == [6, 7, 8, 9]


async def test_cancelled_consumer_cancels_its_handler_and_gives_the_messages_back(queen: Queen) -> None:
    await push_numbers(queen, "q", 3)
    begun = asyncio.Event()
    cancelled: list[bool] = []

    async def handle(messages: list[Message]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    consuming = asyncio.ensure_future(queen.queue("q").batch(2).consume(handle))
    await begun.wait()
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert cancelled == [True]
    # At once, and not after the 300 seconds of the lease.
    assert await left(queen, "q") == [0, 1, 2]


async def test_cancelled_consumer_that_waits_for_messages_ends_at_once(queen: Queen) -> None:
    async def handle(message: Message) -> None:
        raise AssertionError(message)

    consuming = asyncio.ensure_future(queen.queue("q").concurrency(3).consume(handle))
    await queen.request("GET", "/health")
    consuming.cancel()
    async with asyncio.timeout(100):
        await asyncio.wait([consuming])
    assert consuming.cancelled()


async def test_handler_that_cancels_something_of_its_own_has_failed(queen: Queen) -> None:
    await queen.queue("q").config({"retryLimit": 0}).create()
    await push_numbers(queen, "q", 1)

    async def handle(message: Message) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    await queen.queue("q").limit(1).consume(handle)
    assert (await queen.queue("q").dlq().get())["total"] == 1


async def test_close_lets_handlers_finish_and_acknowledges(api: Api, queen: Queen, make_client: MakeClient) -> None:
    await push_numbers(queen, "q", 2)
    closing = make_client(api.url)
    begun, go_on = asyncio.Event(), asyncio.Event()
    finished: list[Any] = []

    async def handle(message: Message) -> None:
        begun.set()
        await go_on.wait()
        finished.append(message["data"])

    consuming = asyncio.ensure_future(closing.queue("q").consume(handle))
    await begun.wait()
    ending = asyncio.create_task(closing.close())
    await asyncio.sleep(0)
    assert not ending.done()
    go_on.set()
    await ending
    await consuming
    assert finished == [0]
    assert await left(queen, "q") == [1]


async def test_handler_may_close_its_client(api: Api, queen: Queen, make_client: MakeClient) -> None:
    await push_numbers(queen, "q", 2)
    closing = make_client(api.url)

    async def handle(message: Message) -> None:
        await closing.close()

    async with asyncio.timeout(100):
        await closing.queue("q").auto_ack(False).consume(handle)


async def test_stopping_consumer_that_waits_does_not_wait_out_its_poll(queen: Queen) -> None:
    stop = asyncio.Event()

    async def handle(message: Message) -> None:
        raise AssertionError(message)

    consuming = asyncio.ensure_future(queen.queue("q").timeout_millis(30_000).consume(handle, signal=stop))
    await queen.request("GET", "/health")
    stop.set()
    async with asyncio.timeout(100):
        await consuming


async def test_error_of_a_handler_that_acknowledges_itself_ends_the_consumer(queen: Queen) -> None:
    await push_numbers(queen, "q", 1)

    async def handle(message: Message) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await queen.queue("q").auto_ack(False).concurrency(3).consume(handle)


async def test_consumer_goes_on_when_the_server_was_away(
    queen: Queen, make_client: MakeClient, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    await push_numbers(queen, "q", 1)
    far = make_client(url_of(wire))
    got: list[Any] = []
    first, last = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        got.append(message["data"])
        (last if message["data"] == "last" else first).set()

    consuming = asyncio.ensure_future(far.queue("q").limit(2).consume(handle))
    await first.wait()
    async with wire.away():
        await queen.queue("q").push([{"data": "last"}])
        await until(lambda: "fetch failed" in caplog.text or "ack of" in caplog.text)
    await asyncio.wait_for(last.wait(), 100)
    await consuming
    assert got == [0, "last"]
    assert await left(queen, "q") == []


async def test_acknowledgment_waits_for_the_server_to_return(
    queen: Queen, make_client: MakeClient, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    await push_numbers(queen, "q", 1)
    far = make_client(url_of(wire))
    calls: list[Any] = []

    async def handle(message: Message) -> None:
        calls.append(message["data"])
        wire.refusing = True
        wire.cut()

    consuming = asyncio.ensure_future(far.queue("q").limit(1).consume(handle))
    await until(lambda: "ack of" in caplog.text)
    wire.refusing = False
    await asyncio.wait_for(consuming, 100)
    assert calls == [0]
    assert await left(queen, "q") == []


async def test_strict_client_raises_what_others_answer_with_nothing(
    api: Api, queen: Queen, make_client: MakeClient
) -> None:
    await queen.queue("q").config({"leaseTime": 1}).create()
    await push_numbers(queen, "q", 1)
    strict = make_client(api.url, strict=True)
    [late] = await strict.queue("q").pop()
    [held] = await strict.queue("q").timeout_millis(5000).pop()
    with pytest.raises(LeaseLostError, match="Invalid or expired lease"):
        await strict.ack(late)
    with pytest.raises(LeaseLostError, match="Invalid or expired lease"):
        await strict.ack([late])
    with pytest.raises(LeaseLostError):
        await strict.renew(late)
    with pytest.raises(NotFoundError, match="Message not found"):
        await strict.ack({**held, "transactionId": "nobody"})
    assert (await queen.ack(late)) == {"success": False, "error": "Invalid or expired lease"}
    with pytest.raises(LeaseLostError):
        await queen.transaction().ack(late).queue("other").push([{"data": 1}]).commit()
    assert await left(queen, "other") == []


async def test_unknown_transport_is_refused(queen: Queen) -> None:
    with pytest.raises(ValueError, match="transport must be one of http"):
        await queen.queue("q").consume(lambda message: None, transport="pigeon")

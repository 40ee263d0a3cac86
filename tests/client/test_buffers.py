"""Buffers: bounded, in order, and nothing is lost while the server is unavailable."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from queen import BadRequestError, ClientClosedError, PushError, Queen, QueenConnectionError, UnsentError
from queen.client.types import BufferOptions
from tests.client.conftest import MakeClient, url_of
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import TcpProxy

SLOW: BufferOptions = {"message_count": 1000, "time_millis": 60_000}


async def stored(api: Api, queue: str) -> list[Any]:
    return [message["data"] for message in await api.pop(queue, batch=10_000)]


async def test_messages_wait_while_the_server_is_away_and_then_arrive_in_order(
    api: Api, make_client: MakeClient, wire: TcpProxy
) -> None:
    queen = make_client(url_of(wire), retry_attempts=1)
    async with wire.away():
        for n in range(250):
            await queen.queue("q").buffer({"message_count": 10, "time_millis": 20}).push([{"data": n}])
        await until(lambda: queen.get_buffer_stats()["failedFlushes"] >= 3)
        assert queen.get_buffer_stats()["totalBufferedMessages"] == 250
    await queen.flush_all_buffers()
    assert await stored(api, "q") == list(range(250))
    assert queen.get_buffer_stats()["totalBufferedMessages"] == 0


@pytest.mark.parametrize("bound", [{"max_messages": 20}, {"max_bytes": 2000}])
async def test_push_waits_when_the_buffer_is_full(
    api: Api, make_client: MakeClient, wire: TcpProxy, bound: BufferOptions
) -> None:
    queen = make_client(url_of(wire), retry_attempts=1)
    bounded: BufferOptions = {"message_count": 5, "time_millis": 60_000, **bound}

    async def produce() -> None:
        for n in range(30):
            await queen.queue("q").buffer(bounded).push({"data": n})

    async with wire.away():
        producing = asyncio.create_task(produce())
        await until(lambda: queen.get_buffer_stats()["failedFlushes"] >= 3)
        assert not producing.done()
        assert 15 <= queen.get_buffer_stats()["totalBufferedMessages"] <= 20
    await asyncio.wait_for(producing, 100)
    await queen.flush_all_buffers()
    assert await stored(api, "q") == list(range(30))


async def test_failed_flush_raises_and_keeps_the_messages(api: Api, make_client: MakeClient, wire: TcpProxy) -> None:
    queen = make_client(url_of(wire), retry_attempts=1)
    await queen.queue("q").buffer(SLOW).push([{"data": n} for n in range(3)])
    async with wire.away():
        with pytest.raises(QueenConnectionError):
            await queen.queue("q").flush_buffer()
        with pytest.raises(QueenConnectionError):
            await queen.flush_all_buffers()
    await queen.flush_all_buffers()
    assert await stored(api, "q") == [0, 1, 2]


async def test_lost_answer_to_a_flush_stores_nothing_twice(api: Api, make_client: MakeClient, wire: TcpProxy) -> None:
    queen = make_client(url_of(wire))
    await queen.queue("q").buffer(SLOW).push([{"data": n} for n in range(3)])
    wire.lose_answers(1, lambda sent: b"/push" in sent)
    await queen.flush_all_buffers()
    assert wire.lost_answers == 1
    assert await stored(api, "q") == [0, 1, 2]


async def test_lost_answer_to_a_push_is_no_duplicate(api: Api, make_client: MakeClient, wire: TcpProxy) -> None:
    queen = make_client(url_of(wire))
    wire.lose_answers(1, lambda sent: b"/push" in sent)
    results = await queen.queue("q").push([{"data": 1}, {"data": 2, "transactionId": "given"}])
    assert wire.lost_answers == 1
    # An id that the program chose may have been there before; it has to be reported.
    assert [result["status"] for result in results] == ["queued", "duplicate"]
    assert await stored(api, "q") == [1, 2]


async def test_close_reports_what_could_not_be_sent(make_client: MakeClient, wire: TcpProxy) -> None:
    queen = Queen(url_of(wire), retry_attempts=1, retry_delay_millis=10)
    await queen.queue("q").partition("p").buffer(SLOW).push([{"data": n, "transactionId": f"t{n}"} for n in range(3)])
    async with wire.away():
        with pytest.raises(UnsentError, match="3 buffered messages were not sent") as caught:
            await queen.close()
    assert [(one.queue, one.partition, one.transaction_id, one.data) for one in caught.value.messages] == [
        ("q", "p", "t0", 0),
        ("q", "p", "t1", 1),
        ("q", "p", "t2", 2),
    ]
    assert "connection failed" in caught.value.messages[0].error


async def test_report_of_unsent_messages_does_not_hide_the_error_of_the_block(wire: TcpProxy) -> None:
    async with wire.away():
        with pytest.raises(LookupError, match="mine") as caught:
            async with Queen(url_of(wire), retry_attempts=1) as queen:
                await queen.queue("q").buffer(SLOW).push({"data": 1})
                raise LookupError("mine")
    assert any("1 buffered messages were not sent" in note for note in caught.value.__notes__)


async def test_refused_message_does_not_hold_up_the_others(api: Api, queen: Queen) -> None:
    items: list[dict[str, Any]] = [{"data": n} for n in range(10)]
    items[3]["transactionId"] = "x" * 300
    items[7]["transactionId"] = 12
    await queen.queue("q").buffer(SLOW).push(items)
    with pytest.raises(UnsentError) as caught:
        await queen.flush_all_buffers()
    assert [message.data for message in caught.value.messages] == [3, 7]
    assert all(message.error for message in caught.value.messages)
    assert await stored(api, "q") == [0, 1, 2, 4, 5, 6, 8, 9]
    await queen.flush_all_buffers()
    assert queen.get_buffer_stats()["activeBuffers"] == 0


async def test_full_queue_makes_the_buffer_wait(api: Api, queen: Queen) -> None:
    await queen.queue("q").config({"max_size": 4}).create()
    await queen.queue("q").buffer(SLOW).push([{"data": n} for n in range(10)])
    got: list[Any] = []
    with pytest.raises(PushError, match="max capacity"):
        await queen.flush_all_buffers()
    while len(got) < 10:
        messages = await api.pop("q", batch=10, wait=True, timeout=60_000)
        got += [message["data"] for message in messages]
        await api.ack(messages)
    assert got == list(range(10))


async def test_message_is_buffered_as_it_was_when_it_was_pushed(api: Api, queen: Queen) -> None:
    payload = {"n": 1}
    await queen.queue("q").buffer(SLOW).push({"data": payload})
    payload["n"] = 2
    await queen.flush_all_buffers()
    assert await stored(api, "q") == [{"n": 1}]


async def test_payload_that_is_no_json_is_refused_when_it_is_pushed(queen: Queen) -> None:
    not_all_dicts: Any = [{"data": 1}, "text"]
    with pytest.raises(TypeError, match="object"):
        await queen.queue("q").buffer(SLOW).push({"data": object()})
    with pytest.raises(TypeError, match="item 1 to push must be a dict"):
        await queen.queue("q").push(not_all_dicts)
    with pytest.raises(ValueError, match="message_count must be a number above 0"):
        await queen.queue("q").buffer({"message_count": 0}).push({"data": 1})
    assert queen.get_buffer_stats()["totalBufferedMessages"] == 0


async def test_closed_client_takes_nothing(api: Api, make_client: MakeClient) -> None:
    queen = make_client(api.url)
    await queen.close()
    with pytest.raises(ClientClosedError):
        await queen.queue("q").buffer(SLOW).push({"data": 1})
    with pytest.raises(ClientClosedError):
        await queen.queue("q").push({"data": 1})


async def test_callbacks_hear_what_became_of_the_items(api: Api, queen: Queen) -> None:
    called: list[tuple[str, list[Any]]] = []

    async def succeeded(items: list[dict[str, Any]]) -> None:
        called.append(("queued", [item["payload"] for item in items]))

    async def duplicated(items: list[dict[str, Any]], error: Exception) -> None:
        called.append(("duplicate", [item["payload"] for item in items]))

    async def failed(items: list[dict[str, Any]], error: Exception) -> None:
        called.append((str(error), [item["payload"] for item in items]))

    await queen.queue("q").push({"data": 0, "transactionId": "same"})
    pushing = queen.queue("q").push([{"data": 1, "transactionId": "same"}, {"data": 2}])
    await pushing.on_success(succeeded).on_duplicate(duplicated).on_error(failed)
    assert called == [("duplicate", [1]), ("queued", [2])]
    called.clear()
    answer = await queen.queue("q").push({"data": 3, "transactionId": "x" * 300}).on_error(failed)
    assert answer is None and called[0][1] == [3] and "TransactionId" in called[0][0]
    with pytest.raises(BadRequestError, match="TransactionId"):
        await queen.queue("q").push({"data": 3, "transactionId": "x" * 300})

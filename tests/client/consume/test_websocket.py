"""Consuming over a WebSocket: the same as over HTTP, and messages go back the moment a consumer is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from queen import Message, Queen
from queen.client.config import ClientLog, read_config
from queen.client.consume.websocket import WebSocketTransport
from queen.client.http import HttpClient
from queen.client.types import Subscription
from tests.client.conftest import MakeClient, url_of
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import TcpProxy


def transport_to(url: str, batch: int = 10) -> WebSocketTransport:
    source = Subscription(
        queue="q",
        partition=None,
        namespace=None,
        task=None,
        group="g",
        batch=batch,
        partitions=1,
        wait=True,
        timeout_millis=1000,
        mode=None,
        start=None,
    )
    log = ClientLog()
    return WebSocketTransport(HttpClient(read_config(url, {}), log), source, log)


async def test_several_workers_consume_in_order_and_miss_nothing(api: Api, queen: Queen) -> None:
    for partition in "abcdef":
        await queen.queue("q").partition(partition).push([{"data": number} for number in range(50)])
    seen: dict[str, list[int]] = {partition: [] for partition in "abcdef"}
    stop = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        for message in messages:
            seen[message["partition"]].append(message["data"])
        if sum(map(len, seen.values())) >= 300:
            stop.set()

    builder = queen.queue("q").group("g").batch(7).concurrency(3)
    await asyncio.wait_for(builder.consume(handle, signal=stop, transport="websocket"), 100)
    assert all(numbers == list(range(50)) for numbers in seen.values())
    assert await api.pop("q", consumerGroup="g") == []


async def test_a_message_that_is_pushed_while_a_consumer_waits_comes_at_once(queen: Queen) -> None:
    got: list[Any] = []

    async def handle(message: Message) -> None:
        got.append(message["data"])

    consuming = asyncio.ensure_future(
        asyncio.wait_for(queen.queue("q").limit(2).consume(handle, transport="websocket"), 100)
    )
    await asyncio.sleep(0.3)
    for number in (1, 2):
        await queen.queue("q").push([{"data": number}])
    await consuming
    assert got == [1, 2]


async def test_what_is_left_of_a_batch_beyond_the_limit_goes_back_at_once(api: Api, queen: Queen) -> None:
    await api.push("q", *range(10))
    got: list[Any] = []

    async def handle(messages: list[Message]) -> None:
        got.extend(message["data"] for message in messages)

    await queen.queue("q").batch(4).limit(6).consume(handle, transport="websocket")
    assert got == list(range(6))
    rest = await api.pop("q", batch=10)
    assert [message["data"] for message in rest] == [6, 7, 8, 9]


async def test_a_fetch_that_times_out_leaves_its_credit_to_the_next(api: Api) -> None:
    transport = transport_to(api.url)
    try:
        for _ in range(3):
            assert await transport.fetch(10, 50) == []
        await api.push("q", 1, partition="a")
        await api.push("q", 2, partition="b")
        assert [message["data"] for message in await transport.fetch(10, 5000)] == [1]
        # Only one batch was asked for.
        other = await api.pop("q", consumerGroup="g", wait=True, timeout=2000)
        assert [message["data"] for message in other] == [2]
    finally:
        await transport.close()


async def test_a_consumer_whose_connection_is_cut_connects_again(
    make_client: MakeClient, queen: Queen, wire: TcpProxy
) -> None:
    far = make_client(url_of(wire))
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(message["data"])
        if len(seen) in (3, 6):
            wire.cut()

    await queen.queue("q").push([{"data": number} for number in range(10)])
    consuming = far.queue("q").idle_millis(1500).consume(handle, transport="websocket")
    await asyncio.wait_for(consuming, 100)
    # What was cut off before its ack came again; nothing is skipped.
    assert list(dict.fromkeys(seen)) == list(range(10))


async def test_a_consumer_moves_to_another_server_when_its_own_stops(
    start_server: StartServer, make_client: MakeClient
) -> None:
    servers = [await start_server(worker_id=id, num_workers=2) for id in range(2)]
    client = make_client(*(server.url for server in servers), health_retry_after_millis=60_000)
    seen: list[int] = []
    stop = asyncio.Event()

    async def handle(message: Message) -> None:
        seen.append(message["data"])
        if message["data"] == 2:
            stop.set()

    consuming = asyncio.ensure_future(client.queue("q").consume(handle, signal=stop, transport="websocket"))
    await servers[1].push("q", 1)
    await until(lambda: bool(seen))
    workers = [server.worker for server in servers]
    (used,) = [worker for worker in workers if worker is not None and worker.consumers.connections]
    await used.stop()
    (other,) = [server for server in servers if server.worker is not used]
    await other.push("q", 2)
    await asyncio.wait_for(consuming, 100)
    assert seen == [1, 2]


async def test_a_namespace_cannot_be_consumed_over_a_websocket(queen: Queen) -> None:
    with pytest.raises(ValueError, match="consumes one queue"):
        await queen.queue().namespace("n").consume(print, transport="websocket")

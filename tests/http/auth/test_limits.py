"""What one client may hold of the server, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import pytest

from queen.bus.packets import Heartbeat, PacketSigner, PacketWriter
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.raw_websocket import shake_hands

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(api: Api) -> Streams:
    place = urlsplit(api.url)
    return await asyncio.open_connection(place.hostname, place.port)


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def test_unfinished_bodies_have_a_budget_and_give_it_back(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    budget = api.worker.shell.budget
    most = budget.limits.incoming_bytes_per_address
    head = b"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6000000\r\n\r\n"
    opened: list[Streams] = []
    statuses = []
    for _ in range(3):
        reader, writer = await connect(api)
        opened.append((reader, writer))
        writer.write(head + b"x" * 5_000_000)
        await writer.drain()
    async with asyncio.timeout(30):
        await until(lambda: budget.refused["incoming"] > 0)
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(status_of(reader)) for reader, _ in opened], return_when=asyncio.FIRST_COMPLETED
        )
        statuses = [task.result() for task in done]
        assert set(statuses) == {503}
        assert budget.incoming <= most
        for _, writer in opened:
            writer.close()
        await until(lambda: budget.incoming == 0)
    await api.push("q", 1)
    assert budget.incoming == 0
    assert budget.addresses.keys() <= {"127.0.0.1"}


async def send_chunks(api: Api, size: int) -> int:
    """Push 200 kB in chunks of a size; the status of the answer."""
    reader, writer = await connect(api)
    writer.write(b"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    body = b'{"items":[{"queue":"q","payload":"' + b"x" * 200_000 + b'"}]}'
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    writer.write(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
    try:
        return await status_of(reader)
    finally:
        writer.close()


async def test_a_body_may_come_in_chunks_but_not_in_crumbs(api: Api) -> None:
    assert await send_chunks(api, 20) == 201
    (message,) = await api.pop("q")
    assert message["data"] == "x" * 200_000
    assert await send_chunks(api, 2) == 400
    assert api.worker is not None
    assert api.worker.shell.budget.incoming == 0


async def test_answers_that_nobody_reads_have_a_budget(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    shell = api.worker.shell
    for _ in range(20):
        await api.push("q", *["x" * 100_000] * 5)
    opened = []
    async with asyncio.timeout(60):
        while not shell.budget.is_flooded:
            reader, writer = await connect(api)
            opened.append((reader, writer))
            # A reader that is not asked for anything lets the kernel's buffers fill.
            cast(asyncio.Transport, writer.transport).pause_reading()
            group = f"group{len(opened)}"
            writer.write(
                f"GET /api/v1/pop/queue/q?batch=100&consumerGroup={group} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            await asyncio.sleep(0.05)
        refused = await api.call("GET", "/api/v1/status")
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "1"
        assert (await api.call("GET", "/livez")).status == 200
        # Whoever reads nothing is cut, and then there is room again.
        await until(lambda: not shell.budget.is_flooded)
        assert (await api.call("GET", "/api/v1/status")).status == 200
    for _, writer in opened:
        writer.transport.abort()


@pytest.mark.parametrize(("setting", "status"), [("max_connections", 503), ("max_connections_per_ip", 429)])
async def test_connections_are_limited(start_server: StartServer, setting: str, status: int) -> None:
    api = await start_server(**{setting: 3})
    opened = [await connect(api) for _ in range(3)]
    for _, writer in opened:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for reader, _ in opened:
        assert await status_of(reader) == 200
    reader, writer = await connect(api)
    assert await status_of(reader) == status
    writer.close()
    opened.pop()[1].close()
    async with asyncio.timeout(10):
        while True:
            reader, writer = await connect(api)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answered = await status_of(reader)
            writer.close()
            if answered == 200:
                break
    for _, writer in opened:
        writer.close()


async def test_pipelined_requests_leave_turns_to_others(api: Api) -> None:
    reader, writer = await connect(api)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
    other_reader, other_writer = await connect(api)
    other_writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await status_of(other_reader) == 200
    for _ in range(5000):
        await reader.readuntil(b"HTTP/1.1 200")
    writer.close()
    other_writer.close()


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/pop/queue/q?autoAck=true",
        "/api/v1/pop/queue/q/partition/Default",
        "/api/v1/pop?namespace=q",
        "/dequeue?namespace=n&topic=t",
        "/api/v1/topics/dequeue?namespace=n&topic=t",
        "/api/v1/topics/dequeue/many?namespace=n",
    ],
)
async def test_head_changes_nothing(api: Api, path: str) -> None:
    await api.push("q", 1)
    await api.call("POST", "/enqueue", [{"namespace": "n", "topic": "t", "payload": "aGk="}])
    reader, writer = await connect(api)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert await status_of(reader) == 405
    writer.close()
    assert len(await api.pop("q")) == 1
    assert len((await api.call("GET", "/dequeue", namespace="n", topic="t")).body) == 1


async def test_websockets_count_for_the_limit_of_an_address(start_server: StartServer) -> None:
    api = await start_server(ip_limit_per_minute=3)
    statuses = [(await shake_hands(api.url))[0] for _ in range(5)]
    assert statuses == [101, 101, 101, 429, 429]


async def test_packets_of_hosts_that_nobody_named_are_refused(api: Api) -> None:
    for boot in range(20):
        packet = PacketWriter(boot, PacketSigner(())).heartbeat(Heartbeat(f"host {boot}", "here"))
        answer = await api.call("POST", "/internal/api/events", data=packet)
        assert answer.status == 409
    assert api.worker is not None
    assert api.worker.broker.peers.stats().servers_tracked == 0


async def test_nobody_waits_longer_than_the_server_allows(start_server: StartServer) -> None:
    api = await start_server(max_wait_ms=50)
    forever = 3_600_000_000
    async with asyncio.timeout(30):
        assert await api.pop("empty", wait=True, timeout=forever) == []
        waited = await api.call("GET", "/dequeue", namespace="n", topic="t", wait=True, timeout=forever)
    assert waited.body == []

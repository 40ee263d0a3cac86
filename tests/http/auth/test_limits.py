"""What one client may hold of the server, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from queen.broker.pop.requests import PopRequest
from queen.bus.packets import Heartbeat, PacketSigner, PacketWriter
from queen.errors import Overloaded
from queen.http.api.limits import Unpacking
from queen.http.server.limits import Address, Budget, Limits
from queen.http.server.message import Request, Response
from queen.http.server.protocol import REQUESTS_AT_A_TIME
from queen.wire.binary.push import unpacked_bytes
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.frames import Group, binary_push
from tests.support.raw_websocket import CONTINUATION, TEXT, frame, raw_socket, shake_hands

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(api: Api, receive_bytes: int = 0) -> Streams:
    """A connection; `receive_bytes` is the size of the kernel's receive buffer."""
    place = urlsplit(api.url)
    if not receive_bytes:
        return await asyncio.open_connection(place.hostname, place.port)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (place.hostname, place.port))
    return await asyncio.open_connection(sock=connection)


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


async def test_unfinished_bodies_have_a_budget_and_give_it_back(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    budget = api.worker.http.budget
    most = budget.limits.incoming_bytes_per_address
    head = b"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6000000\r\n\r\n"
    opened: list[Streams] = []
    statuses = []
    for _ in range(3):
        reader, writer = await connect(api)
        opened.append((reader, writer))
        writer.write(head + b"x" * 5_000_000)
        await writer.drain()
    async with asyncio.timeout(100):
        await until(lambda: budget.refused["incoming"] > 0)
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(status_of(reader)) for reader, _ in opened], return_when=asyncio.FIRST_COMPLETED
        )
        statuses = [task.result() for task in done]
        assert set(statuses) == {503}
        # One alone may be as large as any, and then others find no room.
        assert budget.incoming <= 6_000_000 + most
        for _, writer in opened:
            writer.close()
        await until(lambda: budget.incoming == 0)
    await api.push("q", 1)
    assert budget.incoming == 0
    assert budget.addresses.keys() <= {"127.0.0.1"}


async def test_websocket_messages_that_have_not_all_come_are_part_of_that_budget(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    budget = api.worker.http.budget
    async with AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(raw_socket(api.url)) for _ in range(6)]
        for number, socket in enumerate(sockets):
            # In one frame that has not all come, or in fragments.
            whole = frame(b"x" * 3_000_000, last=number % 2 == 0)
            socket.write(whole[:-1] if number % 2 == 0 else whole)
        reasons = [asyncio.ensure_future(socket.closed()) for socket in sockets]
        done, waiting = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        assert {one.result()[0] for one in done} == {1013}
        # Who is refused leaves its room to others at once.
        await api.push("q", 1)
        for one in waiting:
            one.cancel()
    async with asyncio.timeout(30):
        await until(lambda: budget.incoming == 0)
    await api.push("q", 1)
    assert budget.incoming == 0


def test_large_bodies_leave_room_for_small_ones() -> None:
    budget = Budget(Limits(incoming_bytes=64 << 20))
    first, second = Address(), Address()
    for address in (first, second):
        for _ in range(32):
            assert budget.take_in(address, 1 << 20, 1 << 20)
    for address in (first, second, Address()):
        assert not budget.take_in(address, 1 << 20, 1 << 20)
        budget.give_back(address, 1 << 20)
        assert budget.take_in(address, 1000, 1000)
        budget.give_back(address, 1000)
    # Nor do small ones fill it without end.
    assert not all(budget.take_in(first, 1000, 1000) for _ in range(10_000))
    # Those that have come as a whole have room beside those that may never end, and it has an end, too.
    assert budget.take_in(first, 1000, 1000, whole=True)
    assert not all(budget.take_in(first, 1000, 1000, whole=True) for _ in range(10_000))


async def test_messages_that_never_end_leave_room_for_small_pushes(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    budget = api.worker.http.budget
    room = budget.limits.incoming_bytes_per_address
    async with AsyncExitStack() as stack:
        # After the first of them, each is small enough for the room that is left.
        sizes = [room // 8] * 8 + [60_000] * 8 + [4000] * 32
        sockets = [await stack.enter_async_context(raw_socket(api.url)) for _ in sizes]
        async with asyncio.timeout(30):
            for size, socket in zip(sizes, sockets, strict=True):
                expected = budget.incoming + size
                socket.write(frame(bytes(size))[:-1])
                refused = budget.refused["incoming"]
                await until(lambda: budget.incoming >= expected or budget.refused["incoming"] > refused)  # noqa: B023
        assert budget.refused["incoming"]
        # And what still comes of a message that was refused takes no room.
        for socket in sockets:
            socket.write(bytes(room // 8))
        for _ in range(20):
            await api.push("q", "x" * 2000)


async def test_a_websocket_message_comes_in_fragments_but_not_in_crumbs(api: Api) -> None:
    async with raw_socket(api.url) as socket:
        for size, count in ((20, 5000), (1, 5000)):
            pieces = [b'{"type":"ping","id":"', *[b"x" * size] * count, b'"}']
            parts = [frame(piece, TEXT if not at else CONTINUATION, last=False) for at, piece in enumerate(pieces[:-1])]
            socket.write(b"".join(parts) + frame(pieces[-1], CONTINUATION))
            if size == 20:
                assert (await socket.next_json())["type"] == "pong"
        assert await socket.closed() == (1008, "the fragments of the message are too small")


async def test_what_bodies_unpack_to_has_a_budget_too(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=64)
    assert api.worker is not None
    small, large = (
        binary_push([Group("q", "p", [("", b'"%b"' % (b"x" * size))])], compress=True) for size in (1 << 20, 9 << 20)
    )
    answer = await api.call("POST", "/api/v1/push", data=large)
    assert answer.status == 413, "it is larger than a body may be, unpacked"
    assert (await api.call("POST", "/api/v1/push", data=small)).status == 201
    unpacking, answers = Unpacking(api.worker.settings), []

    def serve(request: Request) -> asyncio.Future[Response]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    handler = unpacking.around(serve)
    request = Request("POST", "/api/v1/push", {}, {}, {}, small, "127.0.0.1", None, None)
    room = api.worker.settings.unpacked_bytes // unpacked_bytes(small)
    for _ in range(room):
        handler(request)
    with pytest.raises(Overloaded):
        handler(request)
    answers[0].set_result(Response(201))
    await asyncio.sleep(0)
    handler(request)


async def test_a_head_does_not_repeat_headers_without_end(api: Api) -> None:
    for repeated, status in ((200, 200), (16_000, 431)):
        reader, writer = await connect(api)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * repeated + b"\r\n")
        assert await status_of(reader) == status
        writer.close()


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
    assert api.worker.http.budget.incoming == 0


async def test_unread_answers_have_a_budget(start_server: StartServer) -> None:
    api = await start_server(queen_memory_mb=256)
    assert api.worker is not None
    server = api.worker.http
    for _ in range(20):
        await api.push("q", *["x" * 100_000] * 5)
    opened = []
    async with asyncio.timeout(100):
        while server.budget.outgoing <= server.budget.alarm:
            reader, writer = await connect(api, receive_bytes=4096)
            opened.append((reader, writer))
            # A reader that is not asked for anything lets the kernel's buffers fill.
            cast(asyncio.Transport, writer.transport).pause_reading()
            group = f"group{len(opened)}"
            writer.write(
                f"GET /api/v1/pop/queue/q?batch=100&consumerGroup={group} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            await asyncio.sleep(0.05)
        refused = await api.call("GET", "/api/v1/status")
        # All of them are of one address: it has more than its share.
        assert refused.status == 429
        assert refused.headers["Retry-After"] == "1"
        assert (await api.call("GET", "/livez")).status == 200
        # Whoever pushes gets short answers, and is served.
        await api.push("other", 1)
        # Whoever reads nothing is cut, and then there is room again.
        await until(lambda: server.budget.outgoing <= server.budget.alarm)
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
    async with asyncio.timeout(100):
        while True:
            reader, writer = await connect(api)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answered = await status_of(reader)
            writer.close()
            if answered == 200:
                break
    for _, writer in opened:
        writer.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Opening as many as are usually allowed would take a while.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1, hard)
    )
    held: list[int] = []
    with suppress(OSError):
        while True:
            held.append(os.dup(0))
    try:
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_worker_without_descriptors_says_so_and_answers(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    # The first push of a worker among others opens a file of their host.
    api = await start_server(num_workers=2)
    assert (await api.call("GET", "/livez")).status == 200
    push = {"items": [{"queue": "q", "payload": 1}]}
    async with asyncio.timeout(100):
        with no_descriptors():
            statuses = [(await api.call("POST", "/api/v1/push", push)).status for _ in range(3)]
            await until(lambda: "new connections are dropped" in caplog.text)
        await until(lambda: "files can be opened again" in caplog.text)
        assert set(statuses) <= {201, 503}
        assert "Too many open files" in caplog.text

    async def is_stored() -> bool:
        return (await api.call("POST", "/api/v1/push", push)).status == 201

    await until(is_stored)


async def test_pipelined_requests_leave_turns_to_others(api: Api) -> None:
    assert api.worker is not None
    server, answered = api.worker.http, [0]

    async def read_all(reader: asyncio.StreamReader) -> None:
        for _ in range(5000):
            await reader.readuntil(b"HTTP/1.1 204")

    reader, writer = await connect(api)
    # What is answered at once would be answered without a pause.
    writer.write(b"OPTIONS /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
    reading = asyncio.create_task(read_all(reader))
    other_reader, other_writer = await connect(api)
    other_writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(100):
        while answered[-1] < 5000:
            # Counted in every turn of the event loop.
            await asyncio.sleep(0)
            answered.append(server.statuses.get(204, 0))
        assert await status_of(other_reader) == 200
        await reading
    assert max(after - before for before, after in itertools.pairwise(answered)) <= 10 * REQUESTS_AT_A_TIME
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
        "/api/v1/ephemeral/pop?queue=e",
    ],
)
async def test_head_changes_nothing(api: Api, path: str) -> None:
    await api.push("q", 1)
    assert (
        await api.call("POST", "/api/v1/ephemeral/push", {"queue": "e", "messages": [{"payload": 1}]})
    ).status == 201
    await api.call("POST", "/enqueue", [{"namespace": "n", "topic": "t", "payload": "aGk="}])
    reader, writer = await connect(api)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert await status_of(reader) == 405
    writer.close()
    assert len(await api.pop("q")) == 1
    assert len((await api.call("GET", "/dequeue", namespace="n", topic="t")).body) == 1
    assert len((await api.call("GET", "/api/v1/ephemeral/pop", queue="e")).body["messages"]) == 1


async def test_websockets_count_for_the_limit_of_an_address(start_server: StartServer) -> None:
    api = await start_server(ip_limit_per_minute=3)
    statuses = [(await shake_hands(api.url))[0] for _ in range(5)]
    assert statuses == [101, 101, 101, 429, 429]


async def test_packets_of_unknown_hosts_are_refused(api: Api) -> None:
    for boot in range(20):
        packet = PacketWriter(boot, PacketSigner(())).heartbeat(Heartbeat(f"host {boot}", "here"))
        answer = await api.call("POST", "/internal/api/events", data=packet)
        assert answer.status == 409
    assert api.worker is not None
    assert api.worker.broker.peers.stats().servers_tracked == 0


async def test_no_request_waits_longer_than_the_server_allows(start_server: StartServer) -> None:
    api = await start_server(max_wait_ms=50)
    forever = 3_600_000_000
    async with asyncio.timeout(100):
        assert await api.pop("empty", wait=True, timeout=forever) == []
        waited = await api.call("GET", "/dequeue", namespace="n", topic="t", wait=True, timeout=forever)
    assert waited.body == []


async def test_an_answer_ends_at_a_size_and_the_rest_comes_with_the_next(start_server: StartServer) -> None:
    api = await start_server(max_answer_bytes=1 << 20)
    payloads = [f"{number}" * 250_000 for number in range(8)]
    for payload in payloads:
        await api.push("q", payload)
    got: list[list[str]] = []
    while messages := await api.pop("q", batch=100, consumerGroup="leased"):
        got.append([message["data"][0] for message in messages])
        await api.ack(messages, group="leased")
    assert [one for some in got for one in some] == [str(number) for number in range(8)]
    assert all(1 <= len(some) <= 5 for some in got)
    at_once: list[str] = []
    while messages := await api.pop("q", batch=100, consumerGroup="at once", autoAck="true"):
        assert len(messages) <= 5
        at_once += [message["data"][0] for message in messages]
    assert at_once == [str(number) for number in range(8)]


async def test_a_message_larger_than_an_answer_comes_alone(start_server: StartServer) -> None:
    api = await start_server(max_answer_bytes=65_536)
    for payload in ("x" * 500_000, "y" * 500_000):
        await api.push("q", payload)
    for expected in ("x", "y"):
        (message,) = await api.pop("q", batch=10)
        assert message["data"] == expected * 500_000
        await api.ack([message])
    assert await api.pop("q", batch=10) == []


async def test_a_pop_from_many_partitions_ends_at_a_size(start_server: StartServer, connection: Connection) -> None:
    """Those whose messages do not fit are not leased: another consumer has them at once."""
    api = await start_server(max_answer_bytes=1 << 20)
    for number in range(6):
        await api.push("q", f"{number}" * 400_000, partition=f"p{number}")
    first = await api.pop("q", batch=100, partitions=6)
    assert 1 <= len(first) < 6
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors WHERE lease_until > now()") == len(first)
    seen = [message["data"][0] for message in first]
    while messages := await api.pop("q", batch=100, partitions=6):
        seen += [message["data"][0] for message in messages]
    assert sorted(seen) == [str(number) for number in range(6)]


async def test_views_that_show_payloads_end_at_a_size(start_server: StartServer) -> None:
    """Whatever number of entries is asked for: none of them may fill the memory."""
    api = await start_server(max_answer_bytes=1 << 20)
    big = "x" * 300_000
    for number in range(8):
        item = {"namespace": "n", "topic": "t", "data": big}
        assert (await api.call("POST", "/api/v1/topics/enqueue", [item])).status == 200
        body = {"queue": "e", "messages": [{"payload": big}]}
        assert (await api.call("POST", "/api/v1/ephemeral/push", body)).status == 201
        await api.push("q", big, ids=[f"m{number}"])
    topic: dict[str, Any] = {**_TOPIC, "limit": 1000}

    async def seen(path: str, **query: Any) -> int:
        answer = await api.call("GET", path, **query)
        assert answer.status == 200, answer
        found = answer.body if isinstance(answer.body, list) else answer.body["messages"]
        assert 1 <= len(found) <= 5
        return len(found)

    await seen("/api/v1/topics/peek", **topic)
    assert await seen("/api/v1/ephemeral/pop", queue="e", batch=100) == await seen(
        "/api/v1/ephemeral/pop", queue="e", batch=100
    ), "the rest comes with the next"
    found = await api.call("GET", "/api/v1/messages/search", queue="q", limit=100)
    names = [one["transactionId"] for one in found.body["messages"]]
    assert 1 <= len(names) <= 5
    while found.body["cursor"] is not None:
        found = await api.call("GET", "/api/v1/messages/search", queue="q", limit=100, cursor=found.body["cursor"])
        names += [one["transactionId"] for one in found.body["messages"]]
    assert names == [f"m{number}" for number in reversed(range(8))]
    await api.call("POST", "/api/v1/topics/configure", {**_TOPIC, "options": {"max_retries": 0}})
    while leased := (await api.call("GET", "/api/v1/topics/dequeue", **topic)).body:
        refs = [{"id": one["id"], "error": "no", **_TOPIC} for one in leased]
        assert (await api.call("POST", "/api/v1/topics/nack", refs)).status == 200
    await seen("/api/v1/topics/dlq", **topic)
    # Pages by number are refused, not cut: what was left out would be on none of them.
    while (await api.call("POST", "/api/v1/messages/dlq", _ALL_OF_IT)).body["cursor"] is not None:
        pass
    assert await seen("/api/v1/dlq", queue="q", limit=3) == 3
    refused = await api.call("GET", "/api/v1/dlq", queue="q", limit=100)
    assert (refused.status, "ask for fewer" in refused.body["error"]) == (400, True)


_TOPIC = {"namespace": "n", "topic": "t"}
_ALL_OF_IT = {"queue": "q", "filter": {"status": "pending"}, "limit": 100}


async def test_values_of_keys_have_a_size_together(start_server: StartServer) -> None:
    api = await start_server(max_answer_bytes=1 << 20)

    async def run(*operations: dict[str, Any]) -> tuple[int, Any]:
        answer = await api.call("POST", "/api/v1/kv", {"operations": [{"ns": "n", **one} for one in operations]})
        return answer.status, answer.body

    keys = [f"k{number}" for number in range(8)]
    for key in keys:
        put = {"op": "put", "key": key, "value": "x" * 300_000, "forever": True}
        assert (await run(put))[0] == 200
    for reading in ({"op": "getMany", "keys": keys}, {"op": "getPrefix", "prefix": "k"}):
        status, body = await run(reading)
        (result,) = body["results"]
        assert (status, result["truncated"], 1 <= len(result["rows"]) <= 4) == (200, True, True), reading
    _, body = await run({"op": "getPrefix", "prefix": "k", "keysOnly": True})
    assert [row["key"] for row in body["results"][0]["rows"]] == keys
    # All or nothing, where nothing can be left out: also of what is written meanwhile, and of what stands in the way.
    one = {"op": "put", "key": "one", "value": "y" * 300_000, "forever": True}
    for operations in (
        [{"op": "get", "key": key} for key in keys],
        [{"op": "getPrefix", "prefix": "k"}] * 8,
        [{"op": "put", "key": key, "value": 1, "forever": True, "expect": 1} for key in keys],
        [one] + [{"op": "get", "key": "one"}] * 8,
    ):
        status, body = await run(*operations)
        assert (status, "fewer" in body["error"]) == (400, True), operations[0]
    status, body = await run({"op": "get", "key": "one"})
    assert (status, body["results"][0]["found"]) == (200, False), "nothing was written"


async def test_state_of_a_stream_that_is_too_large_comes_in_pages(start_server: StartServer) -> None:
    api = await start_server(max_body_bytes=1 << 20)
    await api.push("q", 1)
    (message,) = await api.pop("q", consumerGroup="g")
    registered = await api.call("POST", "/streams/v1/queries", {"name": "s", "source_queue": "q", "config_hash": "x"})
    place = {"query_id": registered.body["query_id"], "partition_id": message["partitionId"]}
    for number in range(8):
        write = [{"type": "upsert", "key": f"k{number}", "value": "x" * 300_000}]
        cycle = await api.call("POST", "/streams/v1/cycle", {**place, "consumer_group": "g", "state_ops": write})
        assert cycle.body["success"]
    whole = await api.call("POST", "/streams/v1/state/get", place)
    assert (whole.status, "ask for fewer" in whole.body["error"]) == (400, True)
    keys: list[str] = []
    while True:
        after = {"after": keys[-1]} if keys else {}
        page = (await api.call("POST", "/streams/v1/state/get", {**place, **after, "limit": 100})).body
        assert 1 <= len(page["rows"]) <= 5
        keys += [row["key"] for row in page["rows"]]
        if not page["more"]:
            break
    assert keys == [f"k{number}" for number in range(8)]


async def test_bytes_are_counted_as_they_are_sent_and_not_as_they_are_stored(start_server: StartServer) -> None:
    """A megabyte of one letter is stored in a few hundred bytes."""
    api = await start_server(max_answer_bytes=2 << 20, segment_cache_mb=0)
    for _ in range(6):
        await api.push("q", "x" * (1 << 20))
    messages = await api.pop("q", batch=100)
    assert 1 <= len(messages) <= 3


async def test_pops_are_refused_before_they_lease_while_answers_are_unread(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server()
    assert api.worker is not None
    await api.push("q", 1)
    budget = api.worker.http.budget
    budget.outgoing += budget.limits.outgoing_bytes + 1
    for path in ("/api/v1/pop/queue/q", "/api/v1/topics/dequeue?namespace=n&topic=t"):
        refused = await api.call("GET", path)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    pop = api.worker.broker.popper.pop(PopRequest(("q",)), lambda body: body)
    with pytest.raises(Overloaded, match="unread"):
        await pop
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors WHERE lease_until IS NOT NULL") == 0
    budget.outgoing -= budget.limits.outgoing_bytes + 1
    assert len(await api.pop("q")) == 1


async def test_an_answer_that_reads_only_is_given_up_when_there_is_no_room_for_it(
    api: Api, connection: Connection
) -> None:
    assert api.worker is not None
    budget = api.worker.http.budget
    await api.push("q", *range(400))
    server = api.worker.http
    async with connection.transaction():
        # It reads until there is no more room.
        await connection.execute("LOCK TABLE queen.segments")
        reading = asyncio.ensure_future(api.call("GET", "/api/v1/messages?queue=q&limit=400"))
        await until(lambda: server.in_flight() > 0)
        budget.outgoing += budget.limits.outgoing_bytes + 1
    try:
        assert (await reading).status == 503
    finally:
        budget.outgoing -= budget.limits.outgoing_bytes + 1


@pytest.mark.parametrize(
    ("path", "body", "setting"),
    [
        ("/api/v1/push", {"items": [{"queue": "q"}] * 11}, "max_push_items"),
        ("/api/v1/push", {"items": [{"queue": "q", "payload": {"a": [{}, {}]}}] * 11}, "max_push_items"),
        (
            "/api/v1/ack/batch",
            {"acknowledgments": [{"transactionId": "t", "partitionId": "p"}] * 11},
            "max_ack_items",
        ),
        (
            "/api/v1/transaction",
            {
                "operations": [
                    {"type": "push", "items": [{"queue": "q"}] * 10},
                    {"type": "push", "items": [{"queue": "q"}]},
                ]
            },
            "max_transaction_operations",
        ),
    ],
)
async def test_a_request_has_so_many_items_and_no_more(
    start_server: StartServer, connection: Connection, path: str, body: dict[str, object], setting: str
) -> None:
    api = await start_server(**{setting: 10})
    answer = await api.call("POST", path, body)
    assert answer.status == 413
    assert answer.body["error"] == (
        f"The request has more than the 10 items allowed ({setting.upper()}): send several requests"
    )
    assert await connection.fetchval("SELECT count(*) FROM queen.queues") == 0


async def test_braces_in_payloads_are_no_items(start_server: StartServer) -> None:
    api = await start_server(max_push_items=3)
    await api.push("q", [{}] * 20, {"a": {"b": {}}}, 3)
    assert (await api.call("POST", "/api/v1/push", '{"items":[{"queue":"q"},{"queue":"q"},{},{]}')).status == 400


async def test_topics_take_as_many_items_as_they_say_before_any_is_decoded(api: Api) -> None:
    items = [{"namespace": "n", "topic": "t", "data": 1}] * 10_001
    answer = await api.call("POST", "/api/v1/topics/enqueue", items)
    assert answer.status == 413
    assert answer.body["error"] == "The request has more than the 10000 items allowed: send several requests"


async def test_a_configuration_is_no_place_for_megabytes(api: Api) -> None:
    answer = await api.call("POST", "/api/v1/configure", {"queue": "q", "options": {"leaseTime": "9" * (5 << 20)}})
    assert answer.status == 413
    # What begins like a binary push is none elsewhere.
    assert (await api.call("POST", "/api/v1/configure", data=b"QPB1" + bytes(5 << 20))).status == 413
    assert (await api.call("POST", "/api/v1/push", data=b"QPB1\1" + bytes(5 << 20))).status == 400


async def test_what_unpacks_to_too_much_is_not_unpacked_to_see_whose_queues_it_names(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_server(queen_memory_mb=64, jwt_enabled=True, jwt_secret=SECRET)
    body = binary_push([Group("q", "p", [("", b'"%b"' % os.urandom(5_000_000).hex().encode())])], compress=True)
    assert unpacked_bytes(body) > 9 << 20
    unpacked: list[bytes] = []
    monkeypatch.setattr("queen.http.auth.names.decode_binary_push", unpacked.append)
    limited = api.bearing(issue("read-write", queues=["q"]))
    assert (await limited.call("POST", "/api/v1/push", data=body)).status == 413
    assert not unpacked
    await limited.close()


async def test_a_large_push_is_stored_in_parts_and_answered_in_order(api: Api, connection: Connection) -> None:
    count = 5000
    items = [{"queue": "q", "partition": f"p{number}", "payload": number} for number in range(count)]
    items += [{"queue": "q", "partition": "p0", "payload": number} for number in range(count)]
    large = asyncio.create_task(api.call("POST", "/api/v1/push", {"items": items}))
    between = 0
    while not large.done():
        # Others come in between the parts.
        await api.push("small", between)
        between += 1
    assert between >= 4
    answer = await large
    assert answer.status == 201
    assert [one["index"] for one in answer.body] == list(range(2 * count))
    assert {one["status"] for one in answer.body} == {"queued"}
    assert len({one["partition_id"] for one in answer.body[:count]}) == count
    assert len({one["message_id"] for one in answer.body}) == 2 * count
    assert await connection.fetchval("SELECT count(*) FROM queen.partitions") == count + 1
    messages = await api.pop("q", partition="p0", batch=10_000)
    assert [message["data"] for message in messages] == [0, *range(count)]


async def test_large_bodies_are_read_in_turns_and_all_of_them(api: Api) -> None:
    body = {"items": [{"queue": "q", "payload": "x" * 3_000_000}]}
    answers = await asyncio.gather(*(api.call("POST", "/api/v1/push", body) for _ in range(12)), api.push("small", 1))
    assert [answer.status for answer in answers[:-1]] == [201] * 12
    assert len(await api.pop("q", batch=100)) >= 1

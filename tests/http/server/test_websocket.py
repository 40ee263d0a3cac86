"""The WebSocket itself: who may connect, what is no request, and clients that are slow, silent or hostile."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec
import pytest

from queen.http.auth.guard import bearer_token
from queen.http.server.message import Access, Request, Response, error_response
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api, payloads
from tests.support.consumer import PATH, acknowledgments, consuming
from tests.support.raw_http import exchange
from tests.support.raw_websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    RawSocket,
    frame,
    raw_socket,
    shake_hands,
)

SUBSCRIBE = b'{"type":"subscribe","id":"s","queue":"q"}'


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> object:
    """Whatever a client does, it is not the server's failure."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# Who may connect.


async def test_a_plain_request_is_answered_426(api: Api) -> None:
    status, body = await exchange(api.url, "GET", PATH)
    assert status == 426
    assert msgspec.json.decode(body) == {"error": "This route takes WebSocket connections only"}


async def test_a_query_parameter_that_is_unknown_is_refused_with_the_nearest_one(api: Api) -> None:
    status, _, body = await shake_hands(api.url, f"{PATH}?tokn=any")
    assert status == 400
    assert msgspec.json.decode(body) == {"error": "unknown query parameter 'tokn'; did you mean 'token'?"}
    status, _, _ = await shake_hands(api.url, f"{PATH}?token=any")
    assert status == 101


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_WebSocket_Version": "8"}, 400),
        ({"Sec_WebSocket_Key": ""}, 400),
        ({"Sec_WebSocket_Key": "short"}, 400),
        ({"Upgrade": "h2c"}, 426),
        ({"Sec_WebSocket_Protocol": "mqtt"}, 400),
        ({"Sec_WebSocket_Protocol": "bearer.abc"}, 400),
    ],
)
async def test_a_handshake_that_is_wrong_is_refused_and_says_why(
    api: Api, headers: dict[str, str], status: int
) -> None:
    answered, _, body = await shake_hands(api.url, **headers)
    assert answered == status
    assert msgspec.json.decode(body)["error"]


async def test_the_protocol_that_is_spoken_is_named(api: Api) -> None:
    status, fields, _ = await shake_hands(api.url, Sec_WebSocket_Protocol="bearer.a.b.c, queen.v1")
    assert (status, fields["sec-websocket-protocol"]) == (101, "queen.v1")
    status, fields, _ = await shake_hands(api.url)
    assert (status, fields.get("sec-websocket-protocol")) == (101, None)


@pytest.mark.parametrize(
    ("origins", "host", "origin", "status"),
    [
        ("", "queen.example:6632", "", 101),
        ("", "queen.example:6632", "http://queen.example:6632", 101),
        ("", "queen.example", "https://queen.example", 101),
        ("", "queen.example:443", "https://QUEEN.example", 101),
        ("", "queen.example:6632", "http://queen.example:8080", 403),
        ("", "queen.example:6632", "https://evil.example", 403),
        ("", "queen.example:6632", "null", 403),
        ("", "queen.example:6632", "http://[", 403),
        ("https://app.example, http://localhost:5173", "queen.example", "http://localhost:5173", 101),
        ("https://app.example", "queen.example", "https://app.example.evil.example", 403),
        ("*", "queen.example", "https://anywhere.example", 101),
    ],
)
async def test_a_page_of_another_origin_is_kept_out_unless_it_is_admitted(
    start_server: StartServer, origins: str, host: str, origin: str, status: int
) -> None:
    api = await start_server(websocket_origins=origins, allowed_hosts="queen.example")
    answered, _, _ = await shake_hands(api.url, Host=host, Origin=origin)
    assert answered == status


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        (PATH, {}, 401),
        (PATH, {"Authorization": "Bearer sesame"}, 101),
        (PATH, {"Authorization": "Basic sesame"}, 401),
        (PATH, {"Sec_WebSocket_Protocol": "queen.v1, bearer.sesame"}, 101),
        (PATH, {"Sec_WebSocket_Protocol": "queen.v1, bearer.wrong"}, 401),
        (PATH + "?token=sesame", {}, 101),
        (PATH + "?token=wrong", {}, 401),
    ],
)
async def test_a_connection_passes_the_gate_that_all_requests_pass(
    api: Api, target: str, headers: dict[str, str], status: int
) -> None:
    def gate(request: Request) -> Response | None:
        assert request.route is not None
        assert request.route.access is Access.READ_WRITE
        return None if bearer_token(request) == b"sesame" else error_response(401, "Unauthorized")

    assert api.worker is not None
    api.worker.http.gate = gate
    assert (await shake_hands(api.url, target, **headers))[0] == status


async def test_a_token_in_the_query_counts_for_a_websocket_alone(api: Api) -> None:
    assert api.worker is not None
    tokens: list[bytes | None] = []

    def gate(request: Request) -> None:
        tokens.append(bearer_token(request))

    api.worker.http.gate = gate
    await api.call("GET", "/api/v1/pop/queue/q", token="sesame")
    assert tokens == [None]


# What is no request.


_NO_REQUESTS = [
    (b"garbage", "Invalid JSON"),
    (b"", "Invalid JSON"),
    (b'{"type":"ping"', "Invalid JSON"),
    (b"[" * 100_000, "Invalid JSON"),
    (b"[]", "must be a JSON object"),
    (b"{}", "type is required"),
    (b'{"type":"pop"}', "unknown type 'pop': it must be one of subscribe, credit"),
    (b'{"type":{"a":1}}', "unknown type"),
    (b'{"type":"subscribe","id":"s"}', "queue"),
    (b'{"type":"subscribe","queue":"q"}', "id"),
    (b'{"type":"subscribe","id":"","queue":"q"}', "(at id)"),
    (b'{"type":"subscribe","id":"s","queue":""}', "Queue must not be empty"),
    (b'{"type":"subscribe","id":"s","queue":"a\\u0000b"}', "control characters"),
    (b'{"type":"subscribe","id":"s","queue":"q","partition":""}', "Partition must not be empty"),
    (b'{"type":"subscribe","id":"s","queue":"q","batch":0}', "batch must be a whole number"),
    (b'{"type":"subscribe","id":"s","queue":"q","batch":10001}', "batch must be a whole number"),
    (b'{"type":"subscribe","id":"s","queue":"q","batch":"5"}', "batch must be a whole number"),
    (b'{"type":"subscribe","id":"s","queue":"q","credit":-1}', "credit must be a whole number"),
    (b'{"type":"subscribe","id":"s","queue":"q","bach":5}', "unknown field 'bach'; did you mean 'batch'?"),
    (b'{"type":"subscribe","id":"s","queue":"q","subscriptionFrom":"yesterday"}', "subscriptionFrom"),
    (b'{"type":"subscribe","id":"s","queue":"q","subscriptionMode":"newest"}', "(at subscriptionMode)"),
    (b'{"type":"credit","id":"nobody","credit":1}', "no subscription 'nobody'"),
    (b'{"type":"unsubscribe","id":"nobody"}', "no subscription 'nobody'"),
    (b'{"type":"ack","id":1}', "transactionId is required"),
    (b'{"type":"ack","id":1,"transactionId":"t"}', "partitionId is required"),
    (b'{"type":"ack","id":1,"acknowledgments":{}}', "acknowledgments must be an array"),
    (b'{"type":"ack","id":1,"acknowledgments":[{}]}', "transactionId"),
    (b'{"type":"ack","id":1,"acknowledgments":[],"transactionId":"t"}', "not both"),
    (b'{"type":"ack","id":1,"acknowledgments":[],"credit":1}', "credit needs"),
    (b'{"type":"ack","id":1,"acknowledgments":[],"subscription":"nobody"}', "no subscription"),
    (b'{"type":"renew","id":1}', "leaseId"),
    (b'{"type":"renew","id":1,"leaseId":"x","seconds":0}', "seconds must be a number"),
    (b'{"type":"renew","id":1,"leaseId":"x"}', "Lease not found"),
    (b'{"type":"ping","id":[]}', "(at id)"),
]


async def test_an_invalid_request_is_reported_and_the_connection_stays_open(api: Api) -> None:
    async with raw_socket(api.url) as socket:
        for text, said in _NO_REQUESTS:
            socket.send(text)
            error = await socket.next_json()
            assert (error["type"], error["status"] in (400, 404)) == ("error", True), (text[:100], error)
            assert said in error["error"], (text[:100], error)
            socket.send(b'{"type":"ping","id":"still there"}')
            assert await socket.next_json() == {"type": "pong", "id": "still there"}


async def test_an_error_names_the_request_it_is_about(api: Api) -> None:
    async with raw_socket(api.url) as socket:
        socket.send(b'{"type":"renew","id":"r7","leaseId":5}')
        error = await socket.next_json()
        assert (error["id"], error["request"], error["status"]) == ("r7", "renew", 400)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(b"{}", BINARY), 1003),
        (frame(b'{"type":"\xff"}'), 1007),
        (frame(b'{"type":"\xc3', last=False) + frame(b"\x28", CONTINUATION), 1007),
        (frame(b" " * 2000), 1009),
        (frame(b" " * 1000, last=False) + frame(b" " * 1000, CONTINUATION), 1009),
        (frame(b"{}", masked=False), 1002),
        (frame(b"{}", 0x3), 1002),
        (frame(b"{}", CONTINUATION), 1002),
        (frame(b"{}", last=False) + frame(b"{}"), 1002),
        (frame(b"", PING, last=False), 1002),
        (frame(b"x" * 126, PING), 1002),
        (b"\xff" * 100, 1002),
    ],
    ids=(
        "binary",
        "no UTF-8",
        "UTF-8 broken by a fragment",
        "too long",
        "fragments that are too long together",
        "not masked",
        "unknown opcode",
        "continuation of nothing",
        "a message within fragments",
        "a fragmented ping",
        "a ping that is too long",
        "noise",
    ),
)
async def test_a_frame_that_is_wrong_closes_the_connection_with_its_code(
    start_server: StartServer, sent: bytes, code: int
) -> None:
    api = await start_server(websocket_max_message_bytes=1024)
    await api.push("q", 1)
    async with consuming(api) as neighbour, raw_socket(api.url) as socket:
        socket.send(SUBSCRIBE)
        assert (await socket.next_json())["type"] == "subscribed"
        assert (await socket.next_json())["type"] == "batch"
        await neighbour.subscribe("q")
        socket.write(sent)
        closed, reason = await socket.closed()
        assert closed == code
        assert reason
        # What it held is released, as with every other end.
        assert payloads(await neighbour.batch()) == [1]


async def test_a_request_may_come_in_pieces(api: Api) -> None:
    whole = '{"type":"ping","id":"Grüße"}'.encode()
    async with raw_socket(api.url) as socket:
        socket.send(whole[:1], last=False)
        socket.send(b"between", PING)
        for position in range(1, len(whole) - 1):
            socket.send(whole[position : position + 1], CONTINUATION, last=False)
            socket.send(b"", CONTINUATION, last=False)
        assert await socket.next() == (PONG, b"between")
        socket.send(whole[-1:], CONTINUATION)
        assert await socket.next_json() == {"type": "pong", "id": "Grüße"}
        raw = frame(whole)
        for position in range(len(raw)):
            socket.write(raw[position : position + 1])
            await asyncio.sleep(0)
        assert await socket.next_json() == {"type": "pong", "id": "Grüße"}


async def test_requests_right_behind_the_handshake_are_served(api: Api) -> None:
    many = b"".join(frame(b'{"type":"ping","id":%d}' % number) for number in range(2000))
    async with raw_socket(api.url, first=many) as socket:
        for number in range(2000):
            assert (await socket.next_json())["id"] == number


async def test_one_connection_has_so_many_subscriptions_and_no_more(start_server: StartServer) -> None:
    api = await start_server(websocket_max_subscriptions=2)
    async with consuming(api) as consumer:
        await consumer.subscribe("q", id="a")
        await consumer.subscribe("q", id="b")
        await consumer.send("subscribe", id="c", queue="q")
        error = await consumer.next("error")
        assert (error["id"], error["status"]) == ("c", 400)
        await consumer.send("subscribe", id="a", queue="q")
        assert (await consumer.next("error"))["status"] == 409
        await consumer.send("unsubscribe", id="a")
        await consumer.next("unsubscribed")
        await consumer.subscribe("q", id="c")


async def test_compression_is_used_when_both_sides_want_it(start_server: StartServer) -> None:
    offer = {"Sec_WebSocket_Extensions": "permessage-deflate"}
    plain = await start_server()
    assert "sec-websocket-extensions" not in (await shake_hands(plain.url, **offer))[1]
    api = await start_server(websocket_compression=True)
    assert "permessage-deflate" in (await shake_hands(api.url, **offer))[1]["sec-websocket-extensions"]
    await api.push("q", "x" * 10_000)
    async with consuming(api, compress=15) as consumer:
        assert consumer.socket.compress
        await consumer.subscribe("q")
        assert payloads(await consumer.batch()) == ["x" * 10_000]


# Slow, silent, hostile.


async def test_a_client_that_does_not_read_holds_up_itself_alone(start_server: StartServer) -> None:
    partitions, size = 200, 100_000
    api = await start_server(websocket_buffer_bytes=65536)
    for first in range(0, partitions, 50):
        items = [{"queue": "q", "partition": str(n), "payload": "x" * size} for n in range(first, first + 50)]
        assert (await api.call("POST", "/api/v1/push", {"items": items})).status == 201
    async with raw_socket(api.url, receive_buffer=1024) as slow:
        slow.send(b'{"type":"subscribe","id":"s","queue":"q","credit":1000}')
        others: list[str] = []
        while messages := await api.pop("q", partitions=50, batch=50):
            others += [message["partition"] for message in messages]
            await api.ack(messages)
            await asyncio.sleep(0.05)
        # What it got is what fits between the two ends, and no more.
        assert len(others) > partitions // 2
        mine: list[str] = []
        while len(mine) + len(others) < partitions:
            received = await slow.next_json()
            if received["type"] == "batch":
                mine += [message["partition"] for message in received["messages"]]
        assert sorted(mine + others) == sorted(map(str, range(partitions)))
        # It has caught up, and is delivered to as before.
        await api.push("q", "next", partition="new")
        assert payloads((await slow.next_json())["messages"]) == ["next"]


async def test_a_client_that_reads_no_answers_is_not_read_from(
    start_server: StartServer,
) -> None:
    api = await start_server(websocket_buffer_bytes=65536, websocket_ping_ms=200, websocket_pong_ms=600)
    async with consuming(api) as neighbour, raw_socket(api.url, receive_buffer=1024) as greedy:
        await neighbour.subscribe("q")
        # It answers pings only while it waits for something.
        waiting = asyncio.create_task(neighbour.next("batch", patience=100))
        questions = frame(b'{"type":"x"}') * 1000

        async def flood() -> None:
            while True:
                greedy.write(questions)
                await greedy.writer.drain()

        # It comes to a stop, and then is taken for dead.
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), 100)
        await api.push("q", 1)
        assert payloads((await waiting)["messages"]) == [1]


async def test_a_connection_that_has_gone_dead_is_found_out_by_pings(start_server: StartServer) -> None:
    api = await start_server(websocket_ping_ms=200, websocket_pong_ms=400)
    await api.push("q", 1)
    async with _stalling(api.url) as (url, flowing), consuming(url) as consumer:
        await consumer.subscribe("q")
        await consumer.batch()
        # As long as it answers pings it may be as silent as it likes.
        alive = asyncio.create_task(consumer.nothing(1.0))
        assert await api.pop("q", wait=True, timeout=900) == []
        await alive
        flowing.clear()
        began = time.monotonic()
        assert payloads(await api.pop("q", wait=True, timeout=60_000)) == [1]
        assert time.monotonic() - began > 0.3


async def test_random_frames_do_no_harm(api: Api) -> None:
    source = random.Random(20260101)
    requests = [
        SUBSCRIBE,
        b'{"type":"credit","id":"s","credit":5}',
        b'{"type":"ack","id":1,"acknowledgments":[{"transactionId":"t","partitionId":"p","leaseId":"l"}]}',
        b'{"type":"nack","id":2,"transactionId":"t","partitionId":"51756565-0000-8000-8000-000000000001"}',
        b'{"type":"renew","id":3,"leaseId":"018f0000-0000-7000-8000-000000100001","seconds":5}',
        b'{"type":"unsubscribe","id":"s"}',
        b'{"type":"ping","id":null}',
    ]

    def noise() -> bytes:
        text = bytearray(source.choice(requests))
        for _ in range(source.choice((0, 0, 1, 1, 3))):
            text[source.randrange(len(text))] = source.randrange(256)
        opcode = source.choice((TEXT, TEXT, TEXT, TEXT, CONTINUATION, PING, PONG, source.randrange(16)))
        raw = frame(bytes(text), opcode, last=source.random() < 0.9)
        if source.random() < 0.1:
            raw = raw[: source.randrange(len(raw))] + source.randbytes(source.randrange(20))
        return raw

    async def annoy() -> None:
        async with raw_socket(api.url) as socket:
            for _ in range(source.randrange(1, 30)):
                socket.write(noise())
            await _drain(socket, 0.05)

    async with consuming(api) as neighbour:
        await neighbour.subscribe("neighbours", credit=1000)
        for number in range(30):
            await asyncio.gather(*(annoy() for _ in range(10)), return_exceptions=False)
            await api.push("neighbours", number)
            messages = await neighbour.batch()
            assert payloads(messages) == [number]
            (result,) = (await neighbour.ask("ack", acknowledgments=acknowledgments(messages)))["results"]
            assert result["success"]
    assert api.worker is not None
    consumers = api.worker.consumers
    await until(lambda: consumers.connections == 0)


async def _drain(socket: RawSocket, seconds: float) -> None:
    """Read whatever comes for a while, or until the connection ends."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                await socket.next()
    except (TimeoutError, EOFError, ConnectionError):
        pass


@asynccontextmanager
async def _stalling(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A connection to a server that can stall without either side being closed."""
    place = urlsplit(url)
    flowing = asyncio.Event()
    flowing.set()
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            await flowing.wait()
            writer.write(chunk)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(place.hostname, place.port)
        writers.extend((writer, up_writer))
        await asyncio.gather(carry(reader, up_writer), carry(up_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flowing
    finally:
        server.close()
        flowing.set()
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize("end", [frame(b"\x03\xe8", CLOSE), b"\xff" * 8], ids=["a close", "no frame"])
@pytest.mark.parametrize("first", [b"not JSON", SUBSCRIBE, b'{"type":"ping","id":1}'])
async def test_a_request_that_comes_together_with_the_end_of_the_connection_needs_no_answer(
    api: Api, first: bytes, end: bytes
) -> None:
    """Frames that were read at once: the end is known before what came earlier is answered."""
    async with raw_socket(api.url, first=frame(first) + end) as socket:
        code, _ = await socket.closed()
    assert code in (1000, 1002)

"""What the proxy passes on, how, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
from yarl import URL

from queen.proxy import sessions
from tests.proxy.conftest import Site, StartProxy
from tests.support.ageing import until

PUSH = {"items": [{"queue": "q", "payload": 1}]}


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked up is looked up again, instead of some seconds later."""
    monkeypatch.setattr(sessions, "_LIVE_SECONDS", 0.0)


class Behind:
    """A server that shows what reaches it, and gives prepared answers."""

    def __init__(self) -> None:
        self.received = b""
        self.lost = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self._news = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        if self.writer is not None:
            self.writer.transport.abort()

    async def until(self, text: bytes) -> None:
        async with asyncio.timeout(100), self._news:
            await self._news.wait_for(lambda: text in self.received)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        try:
            while some := await reader.read(65536):
                async with self._news:
                    self.received += some
                    self._news.notify_all()
        except ConnectionError:
            pass
        self.lost.set()


@pytest.fixture
async def behind() -> AsyncIterator[Behind]:
    behind = Behind()
    await behind.start()
    yield behind
    await behind.stop()


async def token_of(site: Site, name: str = "alice", role: str = "admin") -> str:
    await site.add_user(name, role)
    return (await site.log_in(name)).cookies["token"].value


def head(token: str, line: str, *more: str) -> bytes:
    return "\r\n".join([line, "Host: localhost", f"Authorization: Bearer {token}", *more, "", ""]).encode()


async def test_bodies_pass_piece_by_piece(start_proxy: StartProxy, behind: Behind) -> None:
    """Neither a body that comes nor one that goes is kept until it is whole."""
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    reader, writer = await site.connect()
    writer.write(head(token, "POST /api/v1/push HTTP/1.1", "Content-Length: 1000000") + b"first piece")
    await behind.until(b"first piece")
    writer.write(b"second piece")
    await behind.until(b"second piece")
    writer.write(b"x" * (1_000_000 - 23))
    await behind.until(b"x" * 1000)
    assert behind.writer is not None
    behind.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nanswer begins")
    assert b"answer begins" in await asyncio.wait_for(reader.readuntil(b"answer begins"), 100)
    behind.writer.write(b"and goes on")
    assert await asyncio.wait_for(reader.readuntil(b"goes on"), 100) == b"and goes on"
    writer.transport.abort()


async def test_chunks_pass_piece_by_piece(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    reader, writer = await site.connect()
    writer.write(head(token, "POST /x HTTP/1.1", "Transfer-Encoding: chunked") + b"5\r\nfirst\r\n")
    await behind.until(b"first")
    writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
    await behind.until(b"0\r\n\r\n")
    assert behind.writer is not None
    behind.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
    await asyncio.wait_for(reader.readuntil(b"one"), 100)
    behind.writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
    rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 100)
    assert b"two" in rest
    writer.close()


async def test_a_slow_reader_delays_no_others_and_fills_no_memory(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    _, writer = await site.connect()
    cast(asyncio.Transport, writer.transport).pause_reading()
    writer.write(head(token, "GET /large HTTP/1.1"))
    await behind.until(b"GET /large")
    assert behind.writer is not None
    behind.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    sent = 0
    while sent < 100_000_000:
        behind.writer.write(b"x" * 1_000_000)
        sent += 1_000_000
        try:
            await asyncio.wait_for(behind.writer.drain(), 1)
        except TimeoutError:
            break
    assert sent < 50_000_000, "the proxy has taken more than the client reads"
    async with site.client.get(f"{site.url}/health") as answer:
        assert answer.status == 200
    writer.transport.abort()


async def test_a_client_that_disconnects_ends_its_long_poll(site: Site) -> None:
    """Otherwise the next message would be leased to a client that is gone, or lost with autoAck."""
    token = (await site.log_in("alice")).cookies["token"].value
    _, writer = await site.connect()
    worker = site.server.worker
    assert worker is not None
    line = "GET /api/v1/pop/queue/q?wait=true&timeout=30000&autoAck=true HTTP/1.1"
    writer.write(head(token, line))
    await until(lambda: any(connection.busy for connection in worker.http.connections))
    writer.transport.abort()
    await until(lambda: not any(connection.busy for connection in worker.http.connections))
    bearer = site.server.bearing(token)
    await bearer.push("q", "kept")
    assert [message["data"] for message in await bearer.pop("q")] == ["kept"]
    await bearer.close()


async def test_a_long_poll_is_answered_as_soon_as_a_message_comes(site: Site) -> None:
    await site.log_in("alice")
    worker = site.server.worker
    assert worker is not None
    query = {"wait": "true", "timeout": "30000"}
    polling = asyncio.create_task(_pop(site, query))
    await until(lambda: any(connection.busy for connection in worker.http.connections))
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}) as answer:
        assert answer.status == 201
    assert [message["data"] for message in await polling] == [1]


async def _pop(site: Site, query: dict[str, str]) -> list[dict[str, Any]]:
    async with site.client.get(f"{site.url}/api/v1/pop/queue/q", params=query) as answer:
        messages: list[dict[str, Any]] = (await answer.json())["messages"]
        return messages


async def test_a_websocket_delivers_acknowledges_and_ends_at_both_sides(site: Site) -> None:
    await site.log_in("alice")
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}):
        pass
    worker = site.server.worker
    assert worker is not None
    url = f"{site.url}/ws/v1/consume"
    async with site.client.ws_connect(url, protocols=["queen.v1"], headers={"Origin": site.url}) as socket:
        assert socket.protocol == "queen.v1"
        await socket.send_json({"type": "subscribe", "id": "s", "queue": "q"})
        assert (await socket.receive_json())["type"] == "subscribed"
        (message,) = (await socket.receive_json())["messages"]
        assert message["producerSub"] == "alice"
        ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
        await socket.send_json({"type": "ack", "id": 1, "acknowledgments": [ack]})
        assert (await socket.receive_json())["results"][0]["success"]
        assert worker.http.upgraded
    await until(lambda: not worker.http.upgraded)


async def test_a_websocket_may_carry_its_token_as_a_protocol(site: Site) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    site.client.cookie_jar.clear()
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{site.url}/ws/v1/consume", protocols=["queen.v1", f"bearer.{token}"]) as socket,
    ):
        assert socket.protocol == "queen.v1"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await site.client.ws_connect(f"{site.url}/ws/v1/consume", protocols=["queen.v1", "bearer.a.b.c"])
    assert refused.value.status == 401


async def test_a_websocket_ends_with_its_session(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queen.proxy.app._LOOK_SECONDS", 0.05)
    await site.log_in("alice")
    url = f"{site.url}/ws/v1/consume"
    async with site.client.ws_connect(url, protocols=["queen.v1"], headers={"Origin": site.url}) as socket:
        users = site.proxy.login.users
        await users.revoke_sessions(await users.named("alice"))
        assert (await socket.receive(timeout=100)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_another_role_counts_at_once_at_the_server_too(site: Site) -> None:
    await site.log_in("alice")
    own = {"Origin": site.url}
    url = f"{site.url}/api/v1/resources/queues/q"
    async with site.client.delete(url, headers=own) as answer:
        assert answer.status == 200
    users = site.proxy.login.users
    await users.set_role(await users.named("alice"), "read-write")
    async with site.client.delete(url, headers=own) as answer:
        assert answer.status == 403, "although the token was issued to an administrator"
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers=own) as answer:
        assert answer.status == 201


async def test_a_link_on_another_site_takes_no_message(site: Site) -> None:
    await site.log_in("alice")
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}):
        pass
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Accept": "text/html"}
    script = {"Origin": "https://evil.example"}
    for path in (
        "/api/v1/pop/queue/q?autoAck=true",
        "/dequeue?namespace=n&topic=t",
        "/dequeue/?namespace=n&topic=t",
        "/d%65queue/?namespace=n&topic=t",
        "/sqs?Action=DeleteQueue&QueueUrl=q",
        "/sqs/000000000000/q?Action=DeleteQueue",
    ):
        for headers in (link, script, {"Origin": "null"}):
            async with site.client.get(URL(f"{site.url}{path}", encoded=True), headers=headers) as answer:
                assert answer.status == 403, (path, headers)
    async with site.client.get(f"{site.url}/docs", headers=link) as answer:
        assert answer.status == 200, "pages may be linked to"
    assert [message["data"] for message in await _pop(site, {})] == [1]


async def test_every_answer_has_the_security_headers(start_proxy: StartProxy, site: Site) -> None:
    own = {"Origin": site.url}
    await site.log_in("alice")
    for method, path in (
        ("GET", "/health"),
        ("GET", "/login"),
        ("GET", "/api/me"),
        ("POST", "/api/login"),
        ("GET", "/api/auth/nothing"),
        ("GET", "/api/v1/status"),
        ("GET", "/nothing/here"),
        ("GET", "/"),
        ("DELETE", "/api/v1/dlq"),
    ):
        async with site.client.request(method, f"{site.url}{path}", headers=own) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff", path
            assert answer.headers["X-Frame-Options"] == "DENY", path
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"], path
    reader, writer = await site.connect()
    writer.write(b"NONSENSE\r\n\r\n")
    refused = await asyncio.wait_for(reader.read(), 100)
    assert refused.startswith(b"HTTP/1.1 400")
    assert b"x-content-type-options: nosniff" in refused.lower()
    writer.close()


NEXT = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
AMBIGUOUS = {
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello": 400,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n": 501,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 501,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n": 501,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n": 400,
    b"GET / HTTP/1.1\nHost: a\n\n": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n": 400,
    b"GET / HTTP/2.0\r\nHost: a\r\n\r\n": 505,
    b"GET http://elsewhere.example/ HTTP/1.1\r\nHost: a\r\n\r\n": 400,
    b"CONNECT elsewhere.example:443 HTTP/1.1\r\nHost: a\r\n\r\n": 400,
    b"GET /ws/v1/consume HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Content-Length: 5\r\n\r\nhello": 400,
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n": 431,
}


async def test_what_could_be_read_in_two_ways_is_refused_and_what_follows_is_not_read(site: Site) -> None:
    for request, expected in AMBIGUOUS.items():
        reader, writer = await site.connect()
        writer.write(request + NEXT)
        answers = await asyncio.wait_for(reader.read(), 100)
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answers)
        assert statuses == [b"%d" % expected], (request[:100], statuses)
        writer.close()


async def test_a_body_that_makes_no_sense_is_refused(site: Site) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    for body in (b" 2\r\n{}\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n", b"F" * 17 + b"\r\n{}"):
        reader, writer = await site.connect()
        writer.write(head(token, "POST /api/v1/push HTTP/1.1", "Transfer-Encoding: chunked") + body + NEXT)
        answers = await asyncio.wait_for(reader.read(), 100)
        assert re.findall(rb"HTTP/1\.1 (\d+) ", answers) == [b"400"], body
        writer.close()


async def test_a_line_that_never_ends_is_refused(site: Site) -> None:
    """In the head, in a trailer, and in the extension of a chunk."""
    token = (await site.log_in("alice")).cookies["token"].value
    chunked = head(token, "POST /api/v1/push HTTP/1.1", "Transfer-Encoding: chunked")
    for start in (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", chunked + b"1\r\n[\r\n0\r\nX: ", chunked + b"1;x="):
        reader, writer = await site.connect()
        writer.write(start)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000 and not reader.at_eof():
                writer.write(b"y" * 100_000)
                sent += 100_000
                await writer.drain()
                await asyncio.sleep(0)
        assert sent < 20_000_000, start
        writer.transport.abort()


async def test_what_follows_a_body_as_a_trailer_is_in_no_request(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    reader, writer = await site.connect()
    for number in range(2):
        writer.write(head(token, f"POST /number{number} HTTP/1.1", "Transfer-Encoding: chunked"))
        writer.write(b"1\r\nx\r\n0\r\nX-Smuggled: yes\r\nHost: evil.example\r\n\r\n")
        await behind.until(b"/number%d" % number)
        assert behind.writer is not None
        # The answer has a trailer as well.
        behind.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Smuggled: yes\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 100)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"smuggled" not in answer.lower()
    assert b"smuggled" not in behind.received.lower()
    writer.close()


async def test_an_upgrade_to_what_is_not_spoken_keeps_its_body(start_proxy: StartProxy, behind: Behind) -> None:
    """As curl --http2 sends it; the body is none of a request that comes next."""
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    reader, writer = await site.connect()
    body = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    writer.write(head(token, "POST /first HTTP/1.1", f"Content-Length: {len(body)}", *upgrade) + body)
    await behind.until(b"/smuggled")
    assert behind.received.startswith(b"POST /first HTTP/1.1\r\n")
    assert behind.received.endswith(b"\r\n\r\n" + body)
    assert b"upgrade: h2c" not in behind.received.lower()
    assert behind.writer is not None
    behind.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 100)
    writer.close()


async def test_a_request_that_does_not_arrive_in_time_is_refused(
    start_proxy: StartProxy, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it comes meanwhile."""
    monkeypatch.setattr("queen.proxy.front._ARRIVAL_SECONDS", 0.3)
    monkeypatch.setattr("queen.proxy.app._SWEEP_SECONDS", 0.05)
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    login = b"POST /api/login HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n"
    for start in (b"GET / HTTP/1.1\r\nX: ", login, head(token, "POST /x HTTP/1.1", "Content-Length: 60000")):
        reader, writer = await site.connect()
        writer.write(start)
        answer = asyncio.create_task(reader.readline())
        async with asyncio.timeout(100):
            while not answer.done():
                writer.write(b"y")
                await asyncio.sleep(0.01)
        assert (await answer).startswith(b"HTTP/1.1 408"), start
        writer.transport.abort()


async def test_unread_answers_delay_later_requests_of_the_connection(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    _, writer = await site.connect()
    cast(asyncio.Transport, writer.transport).pause_reading()
    writer.write(head(token, "GET /large HTTP/1.1") * 400)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 150000\r\n\r\n" + b"x" * 150_000
    asked = 0
    with contextlib.suppress(TimeoutError):
        while asked < 400:
            async with asyncio.timeout(1):
                await behind.until(b"/large")
            behind.received = b""
            asked += 1
            assert behind.writer is not None
            behind.writer.write(answer)
            await asyncio.wait_for(behind.writer.drain(), 1)
    assert asked < 200, "answers pile up in the proxy"
    writer.transport.abort()


async def test_connections_have_a_limit(start_proxy: StartProxy) -> None:
    site = await start_proxy(max_connections=3, max_connections_per_ip=2)
    opened = [await site.connect() for _ in range(2)]
    for _, writer in opened:
        writer.write(NEXT)
    assert [(await reader.readline()).split()[1] for reader, _ in opened] == [b"200", b"200"]
    reader, _ = await site.connect()
    assert (await asyncio.wait_for(reader.read(), 100)).startswith(b"HTTP/1.1 429")
    opened.pop()[1].transport.abort()
    await until(lambda: len(site.proxy.fronts) == 1)
    reader, writer = await site.connect()
    writer.write(NEXT)
    assert (await reader.readline()).split()[1] == b"200"
    for _, each in [*opened, (reader, writer)]:
        each.transport.abort()


async def test_an_unsolicited_answer_is_not_given_to_the_next_request(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    reader, writer = await site.connect()
    writer.write(head(token, "GET /first HTTP/1.1"))
    await behind.until(b"/first")
    first = behind.writer
    assert first is not None
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
    first.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + poison[:10])
    await asyncio.wait_for(reader.readuntil(b"ok"), 100)
    first.write(poison[10:])
    writer.write(head(token, "GET /second HTTP/1.1"))
    await behind.until(b"/second")
    await until(lambda: behind.writer is not first)
    assert behind.writer is not None
    behind.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
    assert b"poison" not in await asyncio.wait_for(reader.readuntil(b"no"), 100)
    writer.close()


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_requests_sent_ahead_are_answered_in_their_order(site: Site, size: int) -> None:
    """However they are cut into packets."""
    token = (await site.log_in("alice")).cookies["token"].value
    body = b'{"items":[{"queue":"q","payload":"first"}]}'
    requests = (
        head(token, "GET /health HTTP/1.1")
        + head(token, "POST /api/v1/push HTTP/1.1", f"Content-Length: {len(body)}")
        + body
        + head(token, "POST /api/v1/push HTTP/1.1", "Transfer-Encoding: chunked")
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body.replace(b"first", b"other"))
        + head(token, "HEAD /api/v1/status HTTP/1.1")
        + head(token, "GET /api/v1/pop/queue/q?batch=10 HTTP/1.1")
        + head(token, "GET /api/v1/nothing HTTP/1.1", "Connection: close")
    )
    reader, writer = await site.connect()
    for at in range(0, len(requests), size):
        writer.write(requests[at : at + size])
        await asyncio.sleep(0)
    answers = await asyncio.wait_for(reader.read(), 100)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answers)
    assert statuses == [b"200", b"201", b"201", b"200", b"200", b"404"]
    assert answers.index(b'"first"') < answers.index(b'"other"')
    writer.close()


async def test_half_a_request_is_not_stored(site: Site) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    _, writer = await site.connect()
    worker = site.server.worker
    assert worker is not None
    opened = len(worker.http.connections)
    writer.write(head(token, "POST /api/v1/push HTTP/1.1", "Content-Length: 1000") + b'{"items":[{"queue":"q"')
    await until(lambda: len(worker.http.connections) > opened)
    writer.transport.abort()
    await until(lambda: len(worker.http.connections) <= opened)
    assert await _status(site, "/api/v1/resources/queues/q") == 404


async def _status(site: Site, path: str) -> int:
    async with site.client.get(f"{site.url}{path}") as answer:
        return answer.status


async def test_an_answer_that_breaks_off_is_not_taken_for_whole(start_proxy: StartProxy, behind: Behind) -> None:
    site = await start_proxy(queen_server_url=behind.url)
    token = await token_of(site)
    for answer in (b"Content-Length: 100\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n64\r\nhalf"):
        reader, writer = await site.connect()
        writer.write(head(token, "GET /x HTTP/1.1"))
        await behind.until(b"GET /x")
        behind.received = b""
        assert behind.writer is not None
        behind.writer.write(b"HTTP/1.1 200 OK\r\n" + answer)
        await asyncio.wait_for(reader.readuntil(b"half"), 100)
        behind.writer.transport.abort()
        with contextlib.suppress(ConnectionResetError):
            assert b"0\r\n\r\n" not in await asyncio.wait_for(reader.read(), 100)
        writer.close()

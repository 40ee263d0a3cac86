"""The HTTP server over real sockets: what a client sees, however its bytes arrive and whatever handlers do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, ParamSpec, cast

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queen.concurrency import EagerFuture as PromptAnswer
from queen.errors import QueenError
from queen.http.auth.browser import CORS_FOR_ALL
from queen.http.server.message import Access, Connection, HttpError, Request, Response, json_response
from queen.http.server.protocol import HttpServer
from queen.http.server.reader import RequestReader
from queen.http.server.router import Router, upgrade_required

P = ParamSpec("P")
either_kind = pytest.mark.parametrize("prompt", [False, True], ids=["heard in turn", "heard at once"])
GET_HELLO = b"GET /hello HTTP/1.1\r\nHost: test\r\n\r\n"


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on the event loop that the server uses."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 100))

    return run


class EagerFuture(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Client:
    """A socket that sends bytes as they are, and understands just enough of answers to tell them apart."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, to_head: bool = False) -> EagerFuture:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        assert len(headers) == len(lines), "a header was sent twice"
        length = 0 if to_head else int(headers.get("content-length", 0))
        return EagerFuture(int(status_line.split()[1]), headers, await self.reader.readexactly(length))

    async def ask(self, data: bytes) -> EagerFuture:
        await self.send(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait until the server has closed; false when it sends something first."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Site:
    """A running server with routes that tests can steer."""

    def __init__(self, *, prompt: bool = False, **options: Any) -> None:
        """`prompt`: handlers return futures that are heard at once."""
        self.prompt = prompt
        self.router = Router()
        self.http = HttpServer(self.router, **{"header_lines": CORS_FOR_ALL} | options)
        self.seen: list[Request] = []
        self.parked: asyncio.Queue[tuple[Request, asyncio.Future[Response]]] = asyncio.Queue()
        self.add("GET", "/hello", lambda request: json_response(200, {"hello": "world"}))
        self.add("POST", "/echo", lambda request: Response(200, request.body, b"application/octet-stream"))
        self.add("GET", "/parked/{name}", self._park)
        self.add("GET", "/slow/{name}", self._answer_soon)
        self.add("GET", "/items/{item}", _show)
        self.add("GET", "/seen", self._see)
        self.add("POST", "/seen", self._see)

    def add(self, method: str, pattern: str, handler: Callable[[Request], Any]) -> None:
        self.router.add(method, pattern, handler, Access.PUBLIC)

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def start(self) -> None:
        server = await self.http.serve("127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def _see(self, request: Request) -> Response:
        self.seen.append(request)
        return Response(204)

    def _park(self, request: Request) -> asyncio.Future[Response]:
        future = self._future()
        self.parked.put_nowait((request, future))
        return future

    def _answer_soon(self, request: Request) -> asyncio.Future[Response]:
        future = self._future()
        asyncio.get_running_loop().call_soon(future.set_result, json_response(200, request.params))
        return future

    def _future(self) -> asyncio.Future[Response]:
        return PromptAnswer() if self.prompt else asyncio.get_running_loop().create_future()


def _show(request: Request) -> Response:
    return json_response(200, {"item": request.params["item"], "query": request.query, "path": request.path})


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Site]:
    site = Site(**options)
    await site.start()
    try:
        yield site
    finally:
        await site.http.shutdown(0)


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Site, Client]]:
    async with running(**options) as site:
        client = await site.connect()
        try:
            yield site, client
        finally:
            await client.close()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /echo HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x;note=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n" + trailer + b"\r\n"


# Connections that stay and connections that end.


@on_uvloop
async def test_one_connection_serves_many_requests() -> None:
    async with connected() as (_, client):
        for _ in range(3):
            answer = await client.ask(GET_HELLO)
            assert (answer.status, answer.json()) == (200, {"hello": "world"})
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["content-length"] == "17"
            assert "connection" not in answer.headers


@on_uvloop
async def test_a_client_that_asks_to_close_is_answered_and_closed() -> None:
    async with connected() as (_, client):
        answer = await client.ask(get("/hello", "Connection: close") + GET_HELLO)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.is_closed()


@on_uvloop
async def test_http_1_0_closes_unless_it_asks_to_stay() -> None:
    async with connected() as (_, client):
        answer = await client.ask(b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.headers["connection"] == "keep-alive"
        answer = await client.ask(b"GET /hello HTTP/1.0\r\n\r\n")
        assert answer.headers["connection"] == "close"
        assert await client.is_closed()


@on_uvloop
async def test_an_idle_connection_is_closed() -> None:
    async with connected(idle_seconds=0.05, sweep_seconds=0.01) as (_, client):
        await client.ask(GET_HELLO)
        assert await client.is_closed()


@on_uvloop
async def test_a_connection_with_a_parked_request_is_not_idle() -> None:
    async with connected(idle_seconds=0.02, arrival_seconds=0.02, sweep_seconds=0.01) as (site, client):
        await client.send(get("/parked/a"))
        _, future = await site.parked.get()
        other = await site.connect()
        assert await other.is_closed()
        future.set_result(Response(200, b"late"))
        assert (await client.answer()).body == b"late"


@pytest.mark.parametrize("part", [b"G", b"GET /hello HTTP/1.1\r\nHost:", post(b"body")[:-1], chunked(b"a")[:-2]])
@on_uvloop
async def test_a_request_that_does_not_arrive_in_time_is_refused(part: bytes) -> None:
    async with connected(arrival_seconds=0.05, sweep_seconds=0.01) as (_, client):
        await client.ask(GET_HELLO)
        answer = await client.ask(part)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert answer.json() == {"error": "The request did not arrive within 0.05 seconds"}
        assert await client.is_closed()


@on_uvloop
async def test_a_client_that_lingers_after_a_refusal_is_cut() -> None:
    async with connected(linger_seconds=0.05, sweep_seconds=0.01) as (site, client):
        assert (await client.ask(b"nonsense\r\n\r\n")).status == 400
        assert await client.is_closed()
        await site.http.until_empty()


# Pipelining.


@either_kind
@on_uvloop
async def test_pipelined_requests_are_answered_in_order_though_the_first_is_slow(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/first") + get("/parked/second") + get("/nothing") + GET_HELLO)
        request, future = await site.parked.get()
        assert request.params["name"] == "first"
        other = await site.connect()
        await other.ask(GET_HELLO)
        assert site.parked.empty(), "the second request was begun before the first was answered"
        future.set_result(Response(200, b"1"))
        assert site.parked.empty(), "the second request was begun in the midst of whoever answered the first"
        _, future = await site.parked.get()
        future.set_result(Response(200, b"2"))
        answers = [await client.answer() for _ in range(4)]
        assert [(answer.status, answer.body[:2]) for answer in answers] == [
            (200, b"1"),
            (200, b"2"),
            (404, b'{"'),
            (200, b'{"'),
        ]
        await other.close()


@either_kind
@on_uvloop
async def test_thousands_of_pipelined_requests_wait_their_turn_and_are_all_answered(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        count, padding = 20_000, "X-Padding: " + "x" * 1000
        wanted = [get("/parked/first"), *(get(f"/items/{number}", padding) for number in range(count))]
        sending = asyncio.create_task(client.send(b"".join(wanted)))
        _, future = await site.parked.get()
        other = await site.connect()
        for _ in range(500):
            await other.ask(GET_HELLO)
        assert not sending.done(), "the server went on reading requests that it cannot serve yet"
        await other.close()
        future.set_result(Response(200, b"first"))
        assert (await client.answer()).body == b"first"
        assert [(await client.answer()).json()["item"] for _ in range(count)] == [str(n) for n in range(count)]
        await sending


def test_a_pipelining_client_cannot_pile_up_requests() -> None:
    reader = RequestReader(Site().router, 65536, 2**20, "test")
    stream = GET_HELLO * 50_000
    reader.feed(stream)
    assert reader.is_backlogged()
    assert len(reader.pending) < 1500
    served = 0
    while reader.pending or reader.resume():
        while reader.pending:
            reader.take()
            served += 1
    assert served == 50_000


def test_waiting_bodies_count_as_backlog() -> None:
    reader = RequestReader(Site().router, 65536, 2**21, "test")
    reader.feed(post(bytes(2**20)))
    assert reader.is_backlogged()
    reader.take()
    assert not reader.is_backlogged()


@on_uvloop
async def test_a_client_that_does_not_read_holds_up_only_its_own_requests() -> None:
    async with connected() as (site, client):
        calls = 0

        def big(request: Request) -> Response:
            nonlocal calls
            calls += 1
            return Response(200, bytes(8_000_000))

        site.add("GET", "/big", big)
        await client.send(get("/big") * 8)
        other = await site.connect()
        for _ in range(20):
            assert (await other.ask(GET_HELLO)).status == 200
        assert calls < 8
        assert [len((await client.answer()).body) for _ in range(8)] == [8_000_000] * 8
        assert calls == 8
        await other.close()


@on_uvloop
async def test_a_client_that_never_reads_its_answer_is_cut() -> None:
    async with connected(idle_seconds=0.05, sweep_seconds=0.01) as (site, client):
        site.add("GET", "/big", lambda request: Response(200, bytes(50_000_000)))
        await client.send(get("/big"))
        await client.reader.readexactly(1)
        await site.http.until_empty()


# Bodies.


@on_uvloop
async def test_a_chunked_body_is_put_together_and_its_trailer_ignored() -> None:
    async with connected() as (site, client):
        data = chunked(b"one", b"two" * 1000, b"x", trailer=b"Authorization: forged\r\n")
        await client.send(data + data.replace(b"/echo", b"/seen") + GET_HELLO)
        assert (await client.answer()).body == b"one" + b"two" * 1000 + b"x"
        assert (await client.answer()).status == 204
        assert (await client.answer()).status == 200
        assert b"authorization" not in site.seen[0].headers


@on_uvloop
async def test_twenty_megabytes_go_in_and_out() -> None:
    async with connected() as (_, client):
        body = bytes(range(256)) * 80_000
        sending = asyncio.create_task(client.send(post(body) + chunked(body[:9_000_000], body[9_000_000:])))
        assert (await client.answer()).body == body
        assert (await client.answer()).body == body
        await sending


@on_uvloop
async def test_a_request_may_arrive_byte_by_byte() -> None:
    async with connected() as (_, client):
        for byte in post(b"slowly", "X-Empty:", "X-Long: " + "v" * 300) + chunked(b"a", b"bc"):
            await client.send(bytes([byte]))
        assert (await client.answer()).body == b"slowly"
        assert (await client.answer()).body == b"abc"


@on_uvloop
async def test_an_expected_continue_is_sent_before_the_body_arrives() -> None:
    async with connected() as (_, client):
        await client.send(post(b"body", "Expect: 100-continue")[:-4])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(b"body")).body == b"body"
        # A client that does not wait for it needs none.
        assert (await client.ask(post(b"body", "Expect: 100-continue"))).body == b"body"
        assert (await client.ask(GET_HELLO)).status == 200


@either_kind
@on_uvloop
async def test_an_expected_continue_waits_for_the_answers_before_it(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/first") + post(b"body", "Expect: 100-continue")[:-4])
        _, future = await site.parked.get()
        future.set_result(Response(200, b"first"))
        assert (await client.answer()).body == b"first"
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(b"body")).body == b"body"


@on_uvloop
async def test_an_unknown_expectation_is_refused() -> None:
    async with connected() as (_, client):
        assert (await client.ask(post(b"body", "Expect: miracles"))).status == 417
        assert await client.is_closed()


@on_uvloop
async def test_a_declared_body_over_the_limit_is_refused_before_it_arrives() -> None:
    async with connected(max_body_bytes=1000) as (_, client):
        assert (await client.ask(post(bytes(1000)))).status == 200
        await client.send(post(bytes(1001), "Expect: 100-continue")[:-1001])
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert answer.json() == {"error": "The request body of 1001 bytes is larger than the 1000 bytes allowed"}
        assert await client.is_closed()


@on_uvloop
async def test_a_client_that_sends_its_huge_body_before_reading_still_sees_the_refusal() -> None:
    async with connected(max_body_bytes=1000) as (_, client):
        await client.send(GET_HELLO + post(bytes(20_000_000)))
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 413
        assert await client.is_closed()


@on_uvloop
async def test_a_chunked_body_over_the_limit_is_refused_as_soon_as_it_passes_it() -> None:
    async with connected(max_body_bytes=1000) as (_, client):
        assert (await client.ask(chunked(bytes(600), bytes(400)))).status == 200
        unfinished = chunked(bytes(600), bytes(401)).removesuffix(b"\r\n0\r\n\r\n")
        answer = await client.ask(unfinished)
        assert answer.status == 413
        assert answer.json() == {"error": "The request body is larger than the 1000 bytes allowed"}
        assert await client.is_closed()


# What is not HTTP, or too much of it.


@pytest.mark.parametrize(
    "junk",
    [
        b"nonsense\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /hello\xff HTTP/1.1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
@on_uvloop
async def test_malformed_requests_are_refused_after_the_good_ones_before_them(junk: bytes) -> None:
    async with connected() as (_, client):
        await client.send(get("/slow/a") + junk)
        assert (await client.answer()).json() == {"name": "a"}
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.json()["error"].startswith("Malformed HTTP request: ")
        assert await client.is_closed()


@on_uvloop
async def test_transfer_encodings_other_than_chunked_are_not_implemented() -> None:
    async with connected() as (_, client):
        data = chunked(b"x").replace(b"chunked", b"gzip, chunked")
        assert (await client.ask(data)).status == 501
        assert await client.is_closed()


@pytest.mark.parametrize(
    "head",
    [
        get("/hello", "X: " + "v" * 70_000),
        get("/hello", *(f"X-{number}: v" for number in range(10_000))),
        get("/hello?" + "q" * 70_000),
        get("/hello", "X: " + "v" * 300_000)[:-4],
        get("/hello?" + "q" * 300_000)[:-30],
        chunked(b"x", trailer=b"X: " + b"v" * 300_000 + b"\r\n"),
    ],
    ids=["header", "many headers", "target", "unfinished header", "unfinished target", "trailer"],
)
@on_uvloop
async def test_a_head_over_64_kib_is_refused(head: bytes) -> None:
    async with connected() as (_, client):
        answer = await client.ask(head)
        assert (answer.status, answer.headers["connection"]) == (431, "close")
        assert answer.json() == {"error": "The request head is larger than the 65536 bytes allowed"}
        assert await client.is_closed()


@pytest.mark.parametrize("pieces", [1, 7, 1000])
@on_uvloop
async def test_a_head_just_under_64_kib_is_served_however_it_arrives(pieces: int) -> None:
    async with connected() as (_, client):
        head = get("/hello", "X: " + "v" * 65_000)
        size = len(head) // pieces + 1
        await client.send(post(bytes(50_000)))
        for start in range(0, len(head), size):
            await client.send(head[start : start + size])
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]


# Routes, methods, names.


@on_uvloop
async def test_unknown_paths_and_methods_are_answered_and_the_connection_stays() -> None:
    async with connected() as (_, client):
        answer = await client.ask(get("/nothing"))
        assert (answer.status, answer.json()) == (404, {"error": "Not Found"})
        answer = await client.ask(post(b"").replace(b"/echo", b"/hello"))
        assert (answer.status, answer.json()) == (405, {"error": "Method Not Allowed"})
        assert answer.headers["allow"] == "get, head, options"
        assert (await client.ask(GET_HELLO)).status == 200


@on_uvloop
async def test_head_gives_the_length_but_not_the_body() -> None:
    async with connected() as (_, client):
        for path, status in (("/hello", 200), ("/nothing", 404)):
            await client.send(get(path).replace(b"GET", b"HEAD"))
            answer = await client.answer(to_head=True)
            assert answer.status == status
            assert int(answer.headers["content-length"]) > 10
        assert (await client.ask(GET_HELLO)).json() == {"hello": "world"}


@pytest.mark.parametrize("target", ["/hello", "/nothing/at/all", "*"])
@on_uvloop
async def test_options_is_answered_for_every_path(target: str) -> None:
    async with connected(gate=lambda request: Response(401)) as (_, client):
        answer = await client.ask(get(target).replace(b"GET", b"OPTIONS"))
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-max-age"] == "86400"
        assert answer.headers["access-control-allow-origin"] == "*"


@on_uvloop
async def test_every_answer_may_be_read_by_web_pages_of_other_origins() -> None:
    async with connected() as (_, client):
        for request in (GET_HELLO, get("/nothing"), b"nonsense\r\n\r\n"):
            headers = (await client.ask(request)).headers
            assert headers["access-control-allow-origin"] == "*"
            assert headers["access-control-allow-methods"] == "get, post, put, delete, options"
            assert headers["access-control-allow-headers"] == "content-type, authorization"


@on_uvloop
async def test_paths_and_queries_are_percent_decoded() -> None:
    async with connected() as (_, client):
        answer = await client.ask(get("/items/a%2Fb%20caf%C3%A9%F0%9F%91%91/?q=x+y%26z&q=second&empty="))
        assert answer.json() == {
            "item": "a/b café👑",
            "query": {"q": "x y&z", "empty": ""},
            "path": "/items/a%2Fb%20caf%C3%A9%F0%9F%91%91/",
        }


@on_uvloop
async def test_a_repeated_header_is_joined_and_names_are_lower_case() -> None:
    async with connected() as (site, client):
        await client.ask(get("/seen", "X-Many: a", "x-many: b", "X-Empty:"))
        assert site.seen[0].headers == {b"host": b"test", b"x-many": b"a, b", b"x-empty": b""}
        assert site.seen[0].peer == "127.0.0.1"


@on_uvloop
async def test_a_204_has_neither_body_nor_length() -> None:
    async with connected() as (site, client):
        site.add("GET", "/none", lambda request: Response(204, b"never sent"))
        await client.send(get("/none") + GET_HELLO)
        answer = await client.answer()
        assert answer.status == 204
        assert "content-length" not in answer.headers
        assert (await client.answer()).json() == {"hello": "world"}


# What handlers do.


@either_kind
@on_uvloop
async def test_a_handler_that_returns_a_future_costs_no_task(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/a"))
        tasks = asyncio.all_tasks()
        _, future = await site.parked.get()
        assert asyncio.all_tasks() == tasks
        assert not site.http.tasks
        future.set_result(Response(201, b"done"))
        assert (await client.answer()).status == 201


@on_uvloop
async def test_a_handler_may_be_a_coroutine_or_return_a_future_that_is_done() -> None:
    async with connected() as (site, client):
        done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        done.set_result(Response(200, b"done"))

        async def wait(request: Request) -> Response:
            await asyncio.sleep(0)
            return Response(200, b"waited")

        site.add("GET", "/done", lambda request: done)
        site.add("GET", "/wait", wait)
        await client.send(get("/done") + get("/wait") + get("/done"))
        assert [(await client.answer()).body for _ in range(3)] == [b"done", b"waited", b"done"]
        assert not site.http.tasks


def _raise_now(error: Exception) -> Callable[[Request], Response]:
    def handler(request: Request) -> Response:
        raise error

    return handler


def _raise_in_future(error: Exception) -> Callable[[Request], Awaitable[Response]]:
    def handler(request: Request) -> asyncio.Future[Response]:
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, error)
        return future

    return handler


def _raise_in_coroutine(error: Exception) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        await asyncio.sleep(0)
        raise error

    return handler


@pytest.mark.parametrize("failing", [_raise_now, _raise_in_future, _raise_in_coroutine])
@on_uvloop
async def test_errors_of_handlers_become_answers(
    failing: Callable[[Exception], Callable[[Request], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    async with connected() as (site, client):
        site.add("GET", "/busy", failing(HttpError(429, "Slow down", ((b"Retry-After", b"3"),))))
        site.add("GET", "/known", failing(QueenError("The database is read-only; make it writable")))
        site.add("GET", "/bug", failing(KeyError("secret")))
        answer = await client.ask(get("/busy"))
        assert (answer.status, answer.json()) == (429, {"error": "Slow down"})
        assert answer.headers["retry-after"] == "3"
        answer = await client.ask(get("/known"))
        assert (answer.status, answer.json()) == (
            500,
            {"error": "The database is read-only; make it writable"},
        )
        assert not any(record.exc_info for record in caplog.records)
        answer = await client.ask(get("/bug"))
        assert (answer.status, answer.json()) == (500, {"error": "Internal server error"})
        assert [record.getMessage() for record in caplog.records if record.exc_info] == ["GET /bug failed"]
        assert (await client.ask(GET_HELLO)).status == 200


@on_uvloop
async def test_what_a_handler_had_read_before_it_failed_is_freed_at_once() -> None:
    """And not by the garbage collector: until then requests that fail would fill the memory."""

    class Rows:
        pass

    kept: weakref.WeakSet[Rows] = weakref.WeakSet()

    async def fail(request: Request) -> Response:
        rows = Rows()
        kept.add(rows)
        await asyncio.sleep(0)
        raise HttpError(400, f"{rows} are too many")

    async with connected() as (site, client):
        site.add("GET", "/fail", fail)
        gc.disable()
        try:
            assert (await client.ask(get("/fail"))).status == 400
            assert (await client.ask(GET_HELLO)).status == 200
            assert not kept
        finally:
            gc.enable()


@either_kind
@on_uvloop
async def test_a_cancelled_future_is_answered_with_503(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/a"))
        _, future = await site.parked.get()
        future.cancel()
        answer = await client.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await client.ask(GET_HELLO)).status == 200


@on_uvloop
async def test_nonsense_from_a_handler_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (site, client):
        site.add("GET", "/none", lambda request: None)
        split = ((b"X-Name", b"a\r\nSet-Cookie: b"),)
        site.add("GET", "/split", lambda request: Response(200, headers=split))
        with caplog.at_level(logging.ERROR):
            for path in ("/none", "/split"):
                answer = await client.ask(get(path))
                assert (answer.status, answer.json()) == (500, {"error": "Internal server error"})
                assert "set-cookie" not in answer.headers
        assert len(caplog.records) == 2


@on_uvloop
async def test_the_gate_sees_routed_requests_first_and_may_answer_them() -> None:
    seen: list[tuple[str, Access]] = []

    def gate(request: Request) -> Response | None:
        assert request.route is not None
        seen.append((request.path, request.route.access))
        if request.query.get("token") == "wrong":
            raise HttpError(401, "Invalid token signature")
        return None if request.headers.get(b"authorization") else Response(401, b"no")

    async with connected(gate=gate) as (site, client):
        site.router.add("GET", "/admin", lambda request: Response(200, b"welcome"), Access.ADMIN)
        assert (await client.ask(get("/admin"))).body == b"no"
        assert (await client.ask(get("/admin", "Authorization: x"))).body == b"welcome"
        assert (await client.ask(get("/hello?token=wrong"))).json() == {"error": "Invalid token signature"}
        assert (await client.ask(get("/nothing"))).status == 404
        assert seen == [("/admin", Access.ADMIN), ("/admin", Access.ADMIN), ("/hello", Access.PUBLIC)]


@on_uvloop
async def test_the_fallback_serves_unknown_paths() -> None:
    async with connected() as (site, client):
        site.router.fallback = lambda request: Response(200, request.path.encode(), b"text/plain")
        answer = await client.ask(get("/assets/app.js?v=1"))
        assert (answer.body, answer.headers["content-type"]) == (b"/assets/app.js", "text/plain")


# Clients that go away.


@pytest.mark.parametrize("abruptly", [False, True])
@on_uvloop
async def test_a_parked_request_is_notified_when_its_client_disconnects(abruptly: bool) -> None:
    async with connected() as (site, client):
        await client.send(get("/parked/a"))
        request, future = await site.parked.get()
        gone = asyncio.Event()
        request.on_disconnect(lambda: 1 / 0)
        request.on_disconnect(gone.set)
        request.on_disconnect(future.cancel)
        assert not request.disconnected
        if abruptly:
            linger = struct.pack("ii", 1, 0)
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.writer.close()
        await gone.wait()
        assert request.disconnected
        again = asyncio.Event()
        request.on_disconnect(again.set)
        await again.wait()
        await site.http.until_empty()


@on_uvloop
async def test_an_answered_request_is_not_notified_of_a_disconnect() -> None:
    async with connected() as (site, client):
        await client.send(get("/parked/a"))
        request, future = await site.parked.get()
        calls: list[str] = []
        request.on_disconnect(lambda: calls.append("gone"))
        future.set_result(Response(200))
        await client.answer()
        await client.close()
        await site.http.until_empty()
        assert not calls


@either_kind
@on_uvloop
async def test_an_answer_for_a_client_that_is_gone_is_dropped(prompt: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/a") + get("/parked/b"))
        request, future = await site.parked.get()
        gone = asyncio.Event()
        request.on_disconnect(gone.set)
        linger = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.writer.close()
        await gone.wait()
        future.set_result(Response(200, b"x" * 100_000))
        other = await site.connect()
        assert (await other.ask(GET_HELLO)).status == 200
        assert site.parked.empty(), "a request of a client that is gone was begun"
        assert not caplog.records
        await other.close()


@either_kind
@on_uvloop
async def test_a_client_that_only_stops_sending_is_still_answered(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        await client.send(get("/parked/a") + get("/parked/b"))
        client.writer.write_eof()
        request, future = await site.parked.get()
        gone = asyncio.Event()
        request.on_disconnect(gone.set)
        await gone.wait()
        future.set_result(Response(200, b"still here"))
        assert (await client.answer()).body == b"still here"
        request, future = await site.parked.get()
        assert request.disconnected, "a request that had to wait does not know that its client stopped sending"
        future.set_result(Response(200, b"still here"))
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.is_closed()


# Shutting down.


@either_kind
@on_uvloop
async def test_shutdown_lets_running_requests_finish_and_closes_idle_connections(prompt: bool) -> None:
    async with connected(prompt=prompt) as (site, client):
        idle = await site.connect()
        await idle.ask(GET_HELLO)
        arriving = await site.connect()
        await arriving.ask(GET_HELLO)
        await arriving.send(post(b"body")[:-1])
        await client.send(get("/parked/a") + GET_HELLO)
        _, future = await site.parked.get()
        down = asyncio.create_task(site.http.shutdown(20))
        assert await idle.is_closed()
        with pytest.raises(ConnectionError):
            await site.connect()
        assert (await arriving.ask(b"y")).headers["connection"] == "close"
        assert not down.done()
        future.set_result(Response(200, b"finished"))
        answer = await client.answer()
        assert (answer.body, "connection" in answer.headers) == (b"finished", False)
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.is_closed()
        await down
        await idle.close()
        await arriving.close()


@on_uvloop
async def test_shutdown_tells_parked_requests_so_that_they_are_answered_now() -> None:
    async with connected() as (site, client):
        await client.send(get("/parked/a"))
        _, future = await site.parked.get()
        site.http.shutting_down.append(lambda: future.set_result(Response(204)))
        await site.http.shutdown(20)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (204, "close")
        assert await client.is_closed()


@on_uvloop
async def test_shutdown_cuts_what_outlasts_the_grace() -> None:
    async with connected() as (site, client):
        cancelled = asyncio.Event()

        async def forever(request: Request) -> Response:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return Response(200)

        site.add("GET", "/forever", forever)
        other = await site.connect()
        await other.send(get("/forever"))
        await client.send(get("/parked/a"))
        await site.parked.get()
        await site.http.shutdown(0.01)
        assert cancelled.is_set()
        assert await client.is_closed()
        assert await other.is_closed()
        await other.close()


# Upgrades.


class Shout(asyncio.Protocol):
    """Another protocol: greets, and answers everything in capitals."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = cast(asyncio.Transport, transport).write
        self.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self.write(data.upper())


def _upgrade(request: Request, connection: Connection) -> None:
    connection.take_over(Shout())


async def _upgrade_later(request: Request, connection: Connection) -> None:
    await asyncio.sleep(0)
    connection.take_over(Shout())


UPGRADE = ("Connection: Upgrade", "Upgrade: shout")


@pytest.mark.parametrize("handler", [_upgrade, _upgrade_later])
@on_uvloop
async def test_an_upgrade_hands_the_connection_over_with_what_was_sent_already(handler: Any) -> None:
    async with connected() as (site, client):
        site.router.add("GET", "/shout", upgrade_required, Access.PUBLIC, upgrade=handler)
        await client.send(get("/slow/a") + get("/shout", *UPGRADE) + b"first ")
        assert (await client.answer()).json() == {"name": "a"}
        assert (await client.answer()).status == 101
        await client.send(b"second")
        assert await client.reader.readexactly(12) == b"FIRST SECOND"
        assert not site.http.connections


@on_uvloop
async def test_an_upgrade_can_be_refused() -> None:
    def refuse(request: Request, connection: Connection) -> Response:
        raise HttpError(403, "Insufficient permissions")

    async with connected() as (site, client):
        site.router.add("GET", "/shout", upgrade_required, Access.PUBLIC, upgrade=refuse)
        answer = await client.ask(get("/shout", *UPGRADE) + b"first")
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        assert await client.is_closed()


@on_uvloop
async def test_a_route_for_upgrades_refuses_plain_requests() -> None:
    async with connected() as (site, client):
        site.router.add("GET", "/shout", upgrade_required, Access.PUBLIC, upgrade=_upgrade)
        answer = await client.ask(get("/shout"))
        assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
        assert (await client.ask(GET_HELLO)).status == 200


@on_uvloop
async def test_an_upgrade_that_no_route_offers_is_ignored() -> None:
    async with connected() as (_, client):
        wish = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
        upgrading_chunks = chunked(b"more").replace(b"\r\n\r\n", "\r\n".join(["", *wish, "", ""]).encode(), 1)
        await client.send(get("/hello", *wish) + post(b"body", *wish) + upgrading_chunks + GET_HELLO)
        bodies = [(await client.answer()).body for _ in range(4)]
        assert bodies == [b'{"hello":"world"}', b"body", b"more", b'{"hello":"world"}']


@on_uvloop
async def test_connect_is_no_way_through() -> None:
    async with connected() as (_, client):
        answer = await client.ask(b"CONNECT example.org:443 HTTP/1.1\r\nHost: test\r\n\r\n\x16\x03\x01")
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        assert await client.is_closed()


# However the bytes are cut.

MESSAGES = st.sampled_from(
    [
        GET_HELLO,
        get("/items/a%2Fb?q=1"),
        get("/nothing"),
        get("/slow/soon"),
        get("/hello", *UPGRADE),
        post(b"a body"),
        post(b"upgrading", *UPGRADE),
        post(bytes(3000)),
        chunked(b"one", b"two", trailer=b"X-Trailer: x\r\n"),
        chunked(),
        GET_HELLO.replace(b"GET", b"OPTIONS"),
        b"GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ]
)
ENDINGS = st.sampled_from(
    [get("/hello", "Connection: close"), b"nonsense\r\n\r\n", post(bytes(5001)), post(b"", "Expect: more")]
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.lists(MESSAGES, max_size=12), ending=ENDINGS, data=st.data())
def test_any_way_to_cut_a_stream_gives_the_same_answers(
    messages: list[bytes], ending: bytes, data: st.DataObject
) -> None:
    stream = b"".join([*messages, ending])
    cuts = [0, *data.draw(st.lists(st.integers(0, len(stream)), max_size=20).map(sorted)), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        whole = runner.run(_all_answers([stream]))
        cut = runner.run(_all_answers(pieces))
    assert whole.count(b"HTTP/1.1 ") == len(messages) + 1
    assert cut == whole


async def _all_answers(pieces: list[bytes]) -> bytes:
    async with connected(max_body_bytes=5000) as (_, client):
        for piece in pieces:
            await client.send(piece)
            # Two turns of the loop let the server read this piece before the next is sent.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await client.reader.read()

"""The connection of a client of the proxy: requests are read off it one by one, and answered in their order."""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, cast

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from queen.proxy.exchange import SECURITY, Behind, Exchange, Headers

_MOST_HEAD_BYTES: Final = 64 * 1024
_ARRIVAL_SECONDS: Final = 60.0
_IDLE_SECONDS: Final = 75.0
_DRAIN_SECONDS: Final = 2.0
BAD_GATEWAY: Final = {"error": "Bad gateway - Queen server unreachable"}

log = logging.getLogger(__name__)


class Application(Protocol):
    """Decides what becomes of requests."""

    fronts: set[Front]
    closing: bool

    def leave(self, front: Front) -> None:
        """A connection has ended."""

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Pass a request on at once (None), or work for it, with which the answer comes."""

    def watch(self, exchange: Exchange, lost: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """A task that closes a tunnel when its client is no longer authorized."""


class Front(asyncio.Protocol):
    """One connection."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._parser = HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._tunnel: Behind | None = None
        self._early = b""
        self._draining = False
        self.speaks_chunks = True
        self.transport: asyncio.Transport
        self.address = ""
        self.since = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._exchanges and self._tunnel is None

    @property
    def is_tunnel(self) -> bool:
        return self._tunnel is not None

    def keep_time(self, now: float) -> None:
        """Close it where nothing has come for too long. An answer may take as long as it does."""
        if self._tunnel is not None or (self._exchanges and self._exchanges[0].ended):
            return
        if now - self.since > (_ARRIVAL_SECONDS if self._exchanges or self._head_bytes else _IDLE_SECONDS):
            self.transport.close()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "local"
        self.since = asyncio.get_running_loop().time()
        self._application.fronts.add(self)

    def data_received(self, data: bytes) -> None:
        self.since = asyncio.get_running_loop().time()
        if self._tunnel is not None:
            self._tunnel.transport.write(data)
        elif self._draining:
            return
        elif self._exchanges and self._exchanges[-1].upgrade:
            self._early += data
            self._pause()
        else:
            self._feed(data)

    def eof_received(self) -> None:
        # Whoever sends no more is taken for gone, as nearly everybody is.
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._application.leave(self)
        if self._task is not None:
            self._task.cancel()
        if self._tunnel is not None:
            self._tunnel.transport.close()
        for exchange in self._exchanges:
            if exchange.upstream is not None:
                exchange.upstream.abandon()
        self._exchanges.clear()

    def pause_writing(self) -> None:
        """Nothing more is read of what the client does not take."""
        if (upstream := self._upstream) is not None:
            upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        if (upstream := self._upstream) is not None:
            upstream.transport.resume_reading()

    @property
    def _upstream(self) -> Behind | None:
        return self._tunnel or (self._exchanges[0].upstream if self._exchanges else None)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as upgraded:
                rest = data[upgraded.args[0] :]
                if self._exchanges and self._exchanges[-1].upgrade:
                    self._early += rest
                    return
                # To a protocol that is not spoken here: the request is one like others.
                self._parser, data = HttpRequestParser(self), rest
            except HttpParserError as error:
                status, text = self._refusal or (400, f"Invalid HTTP request: {error}")
                self._refuse_rest(status, text)
                return

    def _refuse_rest(self, status: int, text: str) -> None:
        """What comes after those requests that are being served cannot be read."""
        self._refusal = status, text
        self.transport.pause_reading()
        if not self._exchanges:
            self.answer(None, status, {"error": text})
        elif not self._exchanges[0].ended:
            # It is the body of this one that makes no sense.
            self.transport.close()

    # What the parser calls.

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refusal = 431, f"The head of the request is larger than {_MOST_HEAD_BYTES} bytes"
            raise ValueError("head too large")

    def on_headers_complete(self) -> None:
        exchange = Exchange(self, self._parser.get_method(), self._target, self._headers)
        hosts = sum(1 for name, _ in self._headers if name == b"host")
        self.speaks_chunks = self._parser.get_http_version() == "1.1"
        if hosts > 1 or (not hosts and self.speaks_chunks):
            self._refusal = 400, "A request needs one Host header"
            raise ValueError("no host")
        if not self._target.startswith(b"/"):
            self._refusal = 400, "The target of a request has to be a path"
            raise ValueError("no path")
        self._target, self._headers, self._head_bytes = b"", [], 0
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.upgrade = self._parser.should_upgrade() and exchange.named.get(b"upgrade", b"").lower() == b"websocket"
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._begin(exchange)
        else:
            # It is served when those before it are answered.
            self._pause()

    def on_body(self, piece: bytes) -> None:
        self._exchanges[-1].add(piece)

    def on_message_complete(self) -> None:
        if self._exchanges:
            self._exchanges[-1].end()

    def _begin(self, exchange: Exchange) -> None:
        work = self._application.serve(exchange)
        if work is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(exchange, work))

    async def _run(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("%s %s failed", exchange.method.decode(), exchange.target.partition(b"?")[0].decode())
            self.answer(exchange, 500, {"error": "Internal server error"})

    # What exchanges call.

    def hold(self, exchange: Exchange) -> None:
        """Read no more of a body that has no place to go yet."""
        if exchange.whole is None:
            self._pause()
        else:
            exchange.whole.set()

    def want(self, exchange: Exchange) -> None:
        """Its body has a place to go now."""
        if not exchange.ended and exchange.named.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self._exchanges) == 1 and not exchange.upgrade:
            self._go_on()

    def answered(self, exchange: Exchange) -> None:
        """The answer is out; the next request has its turn."""
        if not self._exchanges or self._exchanges[0] is not exchange:
            return
        self._exchanges.popleft()
        self._task = None
        self.since = asyncio.get_running_loop().time()
        if not exchange.ended:
            self._drain()
        elif not exchange.keep_alive or exchange.upgrade or self._application.closing:
            self.transport.close()
        elif self._exchanges:
            if len(self._exchanges) == 1:
                self._go_on()
            self._begin(self._exchanges[0])
        elif self._refusal is not None:
            self.answer(None, self._refusal[0], {"error": self._refusal[1]})
        else:
            self._go_on()

    def _drain(self) -> None:
        """Closing with input unread makes the kernel reset the connection, and the client may lose the answer."""
        self._draining = True
        self._go_on()
        asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self.transport.close)

    def failed(self, exchange: Exchange) -> None:
        if exchange.started:
            self.transport.abort()
        else:
            log.error("%s could not be passed on: the connection was closed", exchange.method.decode())
            self.answer(exchange, 502, BAD_GATEWAY)

    def answer(
        self,
        exchange: Exchange | None,
        status: int,
        value: object = None,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: list[tuple[str, str]] | None = None,
    ) -> None:
        """Answer from here, with a value as JSON or with a body; without an exchange the connection ends with it."""
        if value is not None:
            body = msgspec.json.encode(value)
        named = {name.lower().encode() for name, _ in headers or ()}
        closing = exchange is None or not exchange.keep_alive or not exchange.ended
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n".encode()]
        lines.append(b"Content-Length: %d\r\n" % len(body))
        lines += [f"{name}: {value}\r\n".encode("latin-1", "replace") for name, value in headers or ()]
        lines += [line for name, line in SECURITY if name not in named]
        if closing:
            lines.append(b"Connection: close\r\n")
        lines.append(b"\r\n")
        head_only = exchange is not None and exchange.method == b"HEAD"
        self.transport.write(b"".join(lines) + (b"" if head_only else body))
        if exchange is None:
            self.transport.close()
        else:
            self.answered(exchange)

    def open_tunnel(self, exchange: Exchange, behind: Behind) -> None:
        """From now on bytes go both ways as they are."""
        self._tunnel = behind
        self._exchanges.clear()
        early, self._early = self._early, b""
        if early:
            behind.transport.write(early)
        self._go_on()
        self._task = asyncio.get_running_loop().create_task(self._application.watch(exchange, self.transport.abort))

    def _pause(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

"""The connection of a client of the proxy: requests are read off it one by one, and answered in their order."""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, Protocol, cast

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from queen.http.server.router import Generations
from queen.proxy.exchange import SECURITY, Exchange, Headers, KnownHead, UpstreamConnection

_MOST_HEAD_BYTES: Final = 64 * 1024
_LONGEST_KNOWN: Final = 2048
# A little more than the server behind gives a request, so that it is the server that says so.
_ARRIVAL_SECONDS = 65.0
_IDLE_SECONDS = 75.0
_DRAIN_SECONDS: Final = 2.0
BAD_GATEWAY: Final = {"error": "Bad gateway - Queen server unreachable"}

log = logging.getLogger(__name__)


class Application(Protocol):
    """Decides what becomes of requests."""

    fronts: set[Front]
    closing: bool
    heads: Generations[tuple[str, bytes], KnownHead]

    def join(self, front: Front) -> tuple[int, str] | None:
        """A connection begins; the status and the reason with which it is refused, if it is one too many."""

    def leave(self, front: Front) -> None:
        """A connection has ended."""

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Pass a request on at once (None), or work for it, with which the answer comes."""

    def upstream_for(self, known: KnownHead) -> UpstreamConnection | None:
        """Where a request with a cached head goes; None: the head has to be evaluated again."""

    def watch(self, exchange: Exchange, lost: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """A task that closes a tunnel when its client is no longer authorized."""


class _Refused(Exception):
    """What was read so far is refused, and no more is read."""


class Front(asyncio.Protocol):
    """One connection."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._loop = asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._begun = False
        """Whether the first of them is being served."""
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._receiving = False
        """Whether a request has come in part."""
        self._in_body = False
        self._progressed = False
        self._replay = b""
        self._refusal: tuple[int, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._tunnel: UpstreamConnection | None = None
        self._early = b""
        self._draining = False
        self._read_paused = False
        self._write_paused = False
        self._unsent = 0
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
        """End what has taken too long: to send a request, to read an answer, to do anything at all.

        An answer may take as long as it does.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            if unsent != self._unsent:
                self._unsent, self.since = unsent, now
            elif now - self.since > _IDLE_SECONDS:
                self.transport.abort()
            return
        if self._tunnel is not None or (self._exchanges and self._exchanges[0].ended):
            return
        if not self._receiving:
            if now - self.since > _IDLE_SECONDS:
                self.transport.close()
        elif now - self.since > _ARRIVAL_SECONDS:
            if self._exchanges and self._exchanges[0].started:
                self.transport.close()
            else:
                self.answer(None, 408, {"error": f"The request did not arrive within {_ARRIVAL_SECONDS:g} seconds"})

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "local"
        self.since = self._loop.time()
        refusal = self._application.join(self)
        if refusal is not None:
            self.answer(None, refusal[0], {"error": refusal[1]}, headers=[("Retry-After", "1")])

    def data_received(self, data: bytes) -> None:
        if self._tunnel is not None:
            self._tunnel.transport.write(data)
        elif self._draining or self.transport.is_closing():
            return
        elif self._exchanges and self._exchanges[-1].upgrade:
            self._early += data
            self.pause()
        elif self._receiving or self._exchanges or self._write_paused:
            self._feed(data)
        elif not self._pass_known(data):
            self._feed_first(data)

    def eof_received(self) -> None:
        # A client that has closed its sending side is taken for gone, as nearly all are.
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
        """The client reads slower than the server answers: the answer is read no further."""
        self._write_paused = True
        if (upstream := self._upstream) is not None:
            upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        if (upstream := self._upstream) is not None:
            upstream.transport.resume_reading()
        elif self._exchanges and not self._begun:
            self._begin_first()

    @property
    def _upstream(self) -> UpstreamConnection | None:
        return self._tunnel or (self._exchanges[0].upstream if self._exchanges else None)

    def _pass_known(self, data: bytes) -> bool:
        """Pass on a whole request whose head is known, without parsing it."""
        end = data.find(b"\r\n\r\n") + 4
        known = self._application.heads.get((self.address, data[:end]))
        if known is None or len(data) != end + known.body_bytes:
            return False
        upstream = self._application.upstream_for(known)
        if upstream is None:
            return False
        exchange = Exchange(self, known.method, known.target, [], known.named)
        exchange.ended = True
        exchange.upstream = upstream
        self._exchanges.append(exchange)
        self._begun = True
        upstream.transport.write(known.passed_on + data[end:])
        upstream.begin(exchange)
        return True

    def _feed_first(self, data: bytes) -> None:
        """Read what begins a request; if it is all of one, its head may be known the next time."""
        self._feed(data)
        if len(self._exchanges) != 1 or self._receiving:
            return
        exchange, end = self._exchanges[0], data.find(b"\r\n\r\n") + 4
        if not 3 < end <= _LONGEST_KNOWN or not exchange.keep_alive or exchange.upgrade or exchange.chunked:
            return
        if b"expect" not in exchange.named and int(exchange.named.get(b"content-length", b"0")) == len(data) - end:
            exchange.head = data[:end]

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._progressed = False
                self._parser.feed_data(data)
                if self._receiving and not self._progressed:
                    # The parser keeps a line until it is whole.
                    self._count(len(data))
                return
            except HttpParserUpgrade as upgraded:
                rest = data[upgraded.args[0] :]
                if self._exchanges and self._exchanges[-1].upgrade:
                    self._early += rest
                    return
                # To a protocol that is not spoken here: the request is one like others, and may have a body.
                self._parser, data = HttpRequestParser(self), self._replay + rest
            except (HttpParserError, _Refused) as error:
                status, text = self._refusal or (400, f"Invalid HTTP request: {error}")
                self._refuse_rest(status, text)
                return

    def _refuse_rest(self, status: int, text: str) -> None:
        """What comes after those requests that are being served cannot be read."""
        self._refusal = status, text
        self.pause()
        if not self._exchanges:
            self.answer(None, status, {"error": text})
        elif not self._exchanges[0].ended:
            # It is the body of this one that makes no sense.
            if self._exchanges[0].started:
                self.transport.close()
            else:
                self.answer(None, status, {"error": text})

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._target, self._headers, self._head_bytes, self._replay = b"", [], 0, b""
        self._receiving = self._progressed = True
        self._in_body = False
        self.since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._in_body:
            # What comes after the body, as a trailer, is not passed on.
            self._headers.append((name.lower(), value))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(431, f"The head of the request is larger than {_MOST_HEAD_BYTES} bytes")

    def _refuse(self, status: int, text: str) -> NoReturn:
        self._refusal = status, text
        raise _Refused(text)

    def on_headers_complete(self) -> None:
        self._in_body = self._progressed = True
        self._head_bytes = 0
        exchange = Exchange(self, self._parser.get_method(), self._target, self._headers)
        self._check(exchange)
        exchange.keep_alive = self._parser.should_keep_alive()
        if self._parser.should_upgrade():
            if exchange.named.get(b"upgrade", b"").lower() != b"websocket":
                self._replay = self._head_without_upgrade()
                return
            if exchange.chunked or exchange.named.get(b"content-length", b"0").strip(b"0"):
                self._refuse(400, "A request for a WebSocket has no body")
            exchange.upgrade = True
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1 and not self._write_paused:
            self._begin_first()
        else:
            # It is served when those before it are answered, and their answers read.
            self.pause()

    def _check(self, exchange: Exchange) -> None:
        """Refuse what this proxy and the server behind might read in two ways."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(505, "The only versions of HTTP understood are 1.1 and 1.0")
        self.speaks_chunks = version == "1.1"
        names = [name for name, _ in exchange.headers]
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and self.speaks_chunks):
            self._refuse(400, "A request needs one Host header")
        if not exchange.target.startswith(b"/"):
            self._refuse(400, "The target of a request has to be a path")
        if exchange.chunked and (
            names.count(b"transfer-encoding") > 1 or exchange.named[b"transfer-encoding"].lower() != b"chunked"
        ):
            self._refuse(501, "The only Transfer-Encoding understood is chunked")

    def _head_without_upgrade(self) -> bytes:
        # To the parser an Upgrade header is the end of HTTP, body or not: another is shown the head without it.
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % field for field in self._headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, b"".join(lines))

    def on_body(self, piece: bytes) -> None:
        self._progressed = True
        self._head_bytes = 0
        self._exchanges[-1].add(piece)

    def on_message_complete(self) -> None:
        self._receiving = False
        if self._exchanges and not self._replay:
            self._exchanges[-1].end()

    def _begin_first(self) -> None:
        self._begun = True
        exchange = self._exchanges[0]
        work = self._application.serve(exchange)
        if work is not None:
            self._task = self._loop.create_task(self._run(exchange, work))

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
            self.pause()
        else:
            exchange.whole.set()

    def want(self, exchange: Exchange) -> None:
        """Its body has a place to go now."""
        if not exchange.ended and exchange.named.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self._exchanges) == 1 and not exchange.upgrade:
            self.go_on()

    def answered(self, exchange: Exchange) -> None:
        """The answer is out; the next request has its turn."""
        exchanges = self._exchanges
        if not exchanges or exchanges[0] is not exchange:
            return
        exchanges.popleft()
        self._begun = False
        self._task = None
        self.since = self._loop.time()
        if exchange.head and exchange.known is not None:
            self._application.heads.put((self.address, exchange.head), exchange.known)
        if not exchange.ended:
            self._drain()
        elif not exchange.keep_alive or exchange.upgrade or self._application.closing:
            self.transport.close()
        elif exchanges:
            if len(exchanges) == 1:
                self.go_on()
            if not self._write_paused:
                self._begin_first()
        elif self._refusal is not None:
            self.answer(None, self._refusal[0], {"error": self._refusal[1]})
        else:
            self.go_on()

    def _drain(self) -> None:
        """Closing with input unread makes the kernel reset the connection, and the client may lose the answer."""
        self._draining = True
        self.go_on()
        self._loop.call_later(_DRAIN_SECONDS, self.transport.close)

    def failed(self, exchange: Exchange) -> None:
        if exchange.started:
            self.transport.abort()
        else:
            log.error("%s could not be forwarded: the connection was closed", exchange.method.decode())
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

    def open_tunnel(self, exchange: Exchange, upstream: UpstreamConnection) -> None:
        """From now on bytes go both ways as they are."""
        self._tunnel = upstream
        self._exchanges.clear()
        early, self._early = self._early, b""
        if early:
            upstream.transport.write(early)
        self.go_on()
        self._task = self._loop.create_task(self._application.watch(exchange, self.transport.abort))

    def pause(self) -> None:
        """Read nothing for a while."""
        if not self._read_paused and not self.transport.is_closing():
            self._read_paused = True
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

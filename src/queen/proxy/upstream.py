"""Connections to the server behind: one request at a time on each, and used again."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from queen.http.server.router import Generations
from queen.proxy.exchange import BODILESS, Exchange, Headers, returned_lines

_CONNECT_SECONDS: Final = 10.0
# Less than the server keeps connections that do nothing, so that none is used just as it is closed.
_IDLE_SECONDS: Final = 10.0
# Heads of answers differ little: those that come again need no parser.
_KNOWN_ANSWERS: Final = 512
_LONGEST_KNOWN: Final = 1024

log = logging.getLogger(__name__)


class KnownAnswer(NamedTuple):
    """The head of an answer: what clients are sent in its place, and the length of the body after it."""

    head: bytes
    body_bytes: int


class Upstreams:
    """The connections to one server."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host = place.hostname or "localhost"
        self._tls = ssl.create_default_context() if place.scheme == "https" else None
        self._port = place.port or (443 if self._tls is not None else 80)
        self._idle: deque[tuple[float, Upstream]] = deque()
        self.answers: Generations[bytes, KnownAnswer] = Generations(_KNOWN_ANSWERS)
        self.host_line = b"Host: %b\r\n" % place.netloc.rpartition("@")[2].encode()
        self.prefix = place.path.rstrip("/").encode()

    def idle(self) -> Upstream | None:
        """The idle connection that was used last; None: there is none."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, upstream = self._idle.pop()
            if upstream.transport.is_closing():
                continue
            if now - since < _IDLE_SECONDS:
                return upstream
            upstream.transport.close()
        return None

    async def connect(self) -> Upstream:
        """A connection; raises OSError or TimeoutError."""
        idle = self.idle()
        if idle is not None:
            return idle
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, upstream = await loop.create_connection(lambda: Upstream(self), self._host, self._port, ssl=self._tls)
        return upstream

    def put_back(self, upstream: Upstream) -> None:
        self._idle.append((asyncio.get_running_loop().time(), upstream))

    def close(self) -> None:
        for _, upstream in self._idle:
            upstream.transport.close()
        self._idle.clear()


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self, home: Upstreams) -> None:
        self._home = home
        self._exchange: Exchange | None = None
        self._parser = HttpResponseParser(self)
        self._reason = b""
        self._headers: Headers = []
        self._tunnel: asyncio.Transport | None = None
        self._fresh = True
        self._learning = False
        self._learned: KnownAnswer | None = None
        self.transport: asyncio.Transport

    def begin(self, exchange: Exchange) -> None:
        """The next answer is that to this request."""
        self._exchange = exchange

    def abandon(self) -> None:
        """The client no longer waits for the response; the server behind notices."""
        self._exchange = None
        self.transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if self._tunnel is not None:
            self._tunnel.write(data)
        elif exchange is None:
            # Nothing was asked: what comes now would be taken for the answer to the next request.
            self.transport.abort()
        elif not (self._fresh and exchange.takes_whole_answers):
            self._parse(data)
        else:
            end = data.find(b"\r\n\r\n") + 4
            head = data[:end]
            known = self._home.answers.get(head)
            if known is not None and len(data) == end + known.body_bytes:
                self._exchange = None
                self._home.put_back(self)
                exchange.answer_whole(known.head + data[end:])
                return
            self._learning = True
            self._parse(data)
            self._learning = False
            learned, self._learned = self._learned, None
            if learned is not None and 3 < end <= _LONGEST_KNOWN and len(data) == end + learned.body_bytes:
                self._home.answers.put(head, learned)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgraded:
            self._begin_tunnel(data[upgraded.args[0] :])
        except HttpParserError as error:
            log.error("upstream sent an invalid HTTP response: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if self._tunnel is not None:
            self._tunnel.close()
        elif exchange is not None:
            exchange.fails()

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.front.pause()

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.front.go_on()

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._fresh = False
        self._reason, self._headers = b"", []

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        exchange, status = self._exchange, self._parser.get_status_code()
        reason, headers = self._reason, self._headers
        # Those of a trailer, after the body, go nowhere.
        self._headers = []
        if exchange is None or (100 <= status < 200 and status != 101):
            return
        exchange.answer_begins(status, reason, headers)
        if exchange.method == b"HEAD":
            # The parser would wait for the body that Content-Length announces; the connection is not reused.
            self._exchange = None
            self.transport.close()
            exchange.answer_ends()
        elif self._learning:
            self._learned = _known_answer(status, reason, headers)

    def on_body(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.answer_goes_on(piece)

    def on_message_complete(self) -> None:
        exchange, status = self._exchange, self._parser.get_status_code()
        if exchange is None or 100 <= status < 200:
            return
        self._exchange = None
        self._fresh = True
        # What of the request is still to come would be taken for the next one.
        if self._parser.should_keep_alive() and exchange.ended:
            # A client that reads slowly may have had it paused.
            self.transport.resume_reading()
            self._home.put_back(self)
        else:
            self._learned = None
            self.transport.close()
        exchange.answer_ends()

    def _begin_tunnel(self, rest: bytes) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.upgrade:
            self.transport.abort()
            return
        self._tunnel = exchange.front.transport
        exchange.front.open_tunnel(exchange, self)
        if rest:
            self._tunnel.write(rest)


def _known_answer(status: int, reason: bytes, headers: Headers) -> KnownAnswer | None:
    """None for answers whose end is not known by their length."""
    lines, names = returned_lines(status, reason, headers)
    if status < 200 or status in BODILESS or b"connection" in names or b"transfer-encoding" in names:
        return None
    lengths = [int(value) for name, value in headers if name.lower() == b"content-length"]
    return KnownAnswer(b"".join(lines) + b"\r\n", lengths[0]) if len(lengths) == 1 else None

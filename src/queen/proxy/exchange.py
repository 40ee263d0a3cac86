"""One request of a client, and the answer to it from the server behind."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from queen.proxy.sessions import Identity

Headers = list[tuple[bytes, bytes]]

# Headers of one connection alone, or that the proxy sets itself.
_NOT_RETURNED: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"set-cookie", b"proxy-connection", b"trailer", b"upgrade"}
)
# Bytes of a body that are buffered until there is a connection to send them on.
_MOST_HELD: Final = 64 * 1024
BODILESS: Final = frozenset({204, 304})
SECURITY: Final = (
    (b"x-content-type-options", b"X-Content-Type-Options: nosniff\r\n"),
    (b"x-frame-options", b"X-Frame-Options: DENY\r\n"),
    (b"referrer-policy", b"Referrer-Policy: no-referrer\r\n"),
    (b"content-security-policy", b"Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n"),
)


class UpstreamConnection(Protocol):
    """A connection to the server behind."""

    transport: asyncio.Transport

    def begin(self, exchange: Exchange) -> None:
        """The next answer is that to this request."""

    def abandon(self) -> None:
        """The client no longer waits for the response."""


class Client(Protocol):
    """The connection of the client."""

    transport: asyncio.Transport
    speaks_chunks: bool
    address: str

    def pause(self) -> None:
        """Read nothing for a while."""

    def go_on(self) -> None:
        """Read again."""

    def hold(self, exchange: Exchange) -> None:
        """Read no more of a body that has no place to go yet."""

    def want(self, exchange: Exchange) -> None:
        """Its body has a place to go now."""

    def answered(self, exchange: Exchange) -> None:
        """The answer is out."""

    def failed(self, exchange: Exchange) -> None:
        """The server behind has closed the connection in the middle of it."""

    def open_tunnel(self, exchange: Exchange, upstream: UpstreamConnection) -> None:
        """From now on bytes go both ways as they are."""

    def answer(
        self,
        exchange: Exchange | None,
        status: int,
        value: object = None,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: list[tuple[str, str]] | None = None,
    ) -> None:
        """Answer from here."""


class KnownHead(NamedTuple):
    """The head of a request that was passed on: the next one like it needs neither parser nor decision."""

    method: bytes
    target: bytes
    named: dict[bytes, bytes]
    body_bytes: int
    shown: str
    """The token or cookie in it."""
    identity: Identity
    """Whose credential it is: decisions hold for this identity alone."""
    passed_on: bytes
    """What the server behind is sent in its place."""


class Exchange:
    """A request, and the answer to it as it comes. Its body is passed on piece by piece, and so is the answer."""

    __slots__ = (
        "_pieces",
        "_rechunks",
        "chunked",
        "ended",
        "front",
        "head",
        "headers",
        "held",
        "keep_alive",
        "known",
        "method",
        "named",
        "started",
        "target",
        "token",
        "upgrade",
        "upstream",
        "whole",
    )

    def __init__(
        self,
        front: Client,
        method: bytes,
        target: bytes,
        headers: Headers,
        named: dict[bytes, bytes] | None = None,
    ) -> None:
        self.front = front
        self.method = method
        self.target = target
        self.headers = headers
        self.named = named if named is not None else dict(headers)
        """By lower-case name; of several lines the last."""
        self.keep_alive = True
        self.upgrade = False
        self.chunked = b"transfer-encoding" in self.named
        self.ended = False
        """Whether the whole request has arrived."""
        self.started = False
        """Whether something of the answer has gone out."""
        self.upstream: UpstreamConnection | None = None
        self.token = ""
        self.head = b""
        """Its head as it arrived, if the whole request came in one piece."""
        self.known: KnownHead | None = None
        """How the next request with the same head is passed on."""
        self.held = 0
        self.whole: asyncio.Event | None = None
        self._pieces: list[bytes] = []
        self._rechunks = False

    @property
    def path(self) -> str:
        return unquote(self.target.partition(b"?")[0].decode("latin-1"))

    # The request.

    def add(self, piece: bytes) -> None:
        """Some of its body has arrived."""
        if self.upstream is not None:
            self._send(self.upstream, piece)
            return
        self._pieces.append(piece)
        self.held += len(piece)
        if self.held > _MOST_HELD:
            self.front.hold(self)

    def end(self) -> None:
        self.ended = True
        if self.upstream is not None:
            self._finish_sending(self.upstream)
        if self.whole is not None:
            self.whole.set()

    def take_body(self) -> bytes:
        body, self._pieces, self.held = b"".join(self._pieces), [], 0
        return body

    def pass_on(self, upstream: UpstreamConnection, head: bytes, shown: str, identity: Identity) -> None:
        """Send it to the server behind; the answer comes by itself."""
        self.upstream = upstream
        length = self.named.get(b"content-length", b"0")
        if not self.upgrade and len(length) < 10:
            self.known = KnownHead(self.method, self.target, self.named, int(length), shown, identity, head)
        body = self.take_body()
        if body and not self.chunked:
            upstream.transport.write(head + body)
        else:
            upstream.transport.write(head)
            if body:
                self._send(upstream, body)
        upstream.begin(self)
        if self.ended:
            self._finish_sending(upstream)
        self.front.want(self)

    def _send(self, upstream: UpstreamConnection, piece: bytes) -> None:
        upstream.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)

    def _finish_sending(self, upstream: UpstreamConnection) -> None:
        if self.chunked:
            upstream.transport.write(b"0\r\n\r\n")

    # The answer, as the connection behind reads it.

    def answer_begins(self, status: int, reason: bytes, headers: Headers) -> None:
        front = self.front
        lines, names = returned_lines(status, reason, headers)
        if status == 101:
            lines += [b"%b: %b\r\n" % pair for pair in headers if pair[0].lower() == b"upgrade"]
            lines.append(b"Connection: Upgrade\r\n")
        else:
            bodiless = self.method == b"HEAD" or status in BODILESS
            if b"content-length" not in names and not bodiless:
                # Its end has to be marked in another way.
                self._rechunks = front.speaks_chunks
                self.keep_alive = self.keep_alive and self._rechunks
                if self._rechunks:
                    lines.append(b"Transfer-Encoding: chunked\r\n")
            if not self.keep_alive:
                lines.append(b"Connection: close\r\n")
        self.started = True
        lines.append(b"\r\n")
        front.transport.write(b"".join(lines))

    def answer_goes_on(self, piece: bytes) -> None:
        self.front.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._rechunks else piece)

    @property
    def takes_whole_answers(self) -> bool:
        """Whether an answer that comes in one piece can go out as one."""
        return self.keep_alive and self.ended and self.method != b"HEAD"

    def answer_whole(self, answer: bytes) -> None:
        """All of the answer, as the client is to read it."""
        self.started = True
        self.upstream = None
        self.front.transport.write(answer)
        self.front.answered(self)

    def answer_ends(self) -> None:
        if self._rechunks:
            self.front.transport.write(b"0\r\n\r\n")
        self.upstream = None
        self.front.answered(self)

    def fails(self) -> None:
        """The server behind is gone."""
        self.upstream = None
        self.front.failed(self)


def returned_lines(status: int, reason: bytes, headers: Headers) -> tuple[list[bytes], set[bytes]]:
    """The first lines of an answer for the client, and the names of all headers that the server behind has sent."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
    names = set()
    for name, value in headers:
        lower = name.lower()
        names.add(lower)
        if lower not in _NOT_RETURNED:
            lines.append(b"%b: %b\r\n" % (name, value))
    lines += [line for name, line in SECURITY if name not in names]
    return lines, names

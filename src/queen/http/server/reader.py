"""Parses the bytes of one connection into requests, which wait in order to be served."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from queen.http.server.limits import Address, Budget, Limits
from queen.http.server.message import Handler, Headers, Request, Response, UpgradeHandler, error_response
from queen.http.server.router import Generations, Match, Router

LONGEST_HEAD: Final = 2048
_LONGEST_LENGTH: Final = 19
# A body in more chunks than this has to have some bytes in each: two bytes at a time keep a worker busy for minutes.
MOST_SMALL_CHUNKS: Final = 4096
SMALL_CHUNK_BYTES: Final = 16
CACHED_HEADS: Final = 1024
MOST_REPEATED_HEADERS: Final = 256


class KnownHead(NamedTuple):
    """A parsed head, and the length of the body after it."""

    match: Match
    headers: dict[bytes, bytes]
    body_bytes: int


class HeadCache:
    """Heads by their bytes. Clients repeat theirs, apart from the length of the body, request after request."""

    def __init__(self) -> None:
        self._known: Generations[bytes, KnownHead] = Generations(CACHED_HEADS)
        self.get = self._known.get

    def put(self, head: bytes, known: KnownHead) -> None:
        if len(head) <= LONGEST_HEAD:
            self._known.put(head, known)


KEEP_ALIVE: Final = b"Connection: keep-alive\r\n"

# How much of one read is parsed before its requests are served; bounds what a pipelining client can pile up.
SLICE_BYTES: Final = 32 * 1024
# Past either of these, the requests that wait for the one being served stop the reading of more.
WAITING_REQUESTS: Final = 8
WAITING_BYTES: Final = 1024 * 1024

log = logging.getLogger(__name__)


# A complete request, its handler, the Connection header line of its response, and the handler of an upgrade.
# A plain tuple, because one is made for every request.
PendingRequest = tuple[Request, Handler, bytes, UpgradeHandler | None]


class RequestReader:
    """Parses what one client sends. Knows the limits, but neither the transport nor the time.

    Once `closed`, nothing that arrives is a request any more: the client asked to close, or sent what is to be
    answered with `refusal` after the requests before it, or switched protocols and what it sends is kept in
    `leftover` for the next protocol.
    """

    __slots__ = (
        "_address",
        "_body",
        "_budget",
        "_eventless_bytes",
        "_head",
        "_headers",
        "_heads",
        "_max_body_bytes",
        "_max_head_bytes",
        "_parser",
        "_peer",
        "_pieces",
        "_progressed",
        "_repeated",
        "_replay",
        "_router",
        "_serving_bytes",
        "_target",
        "_unchecked",
        "_upgrade",
        "_waiting_bytes",
        "admits_host",
        "awaits_continue",
        "body_bytes",
        "check_head",
        "closed",
        "excess",
        "leftover",
        "messages_begun",
        "pending",
        "receiving",
        "refusal",
        "unparsed",
    )

    def __init__(
        self,
        router: Router,
        max_head_bytes: int,
        max_body_bytes: int,
        peer: str,
        heads: HeadCache | None = None,
        budget: Budget | None = None,
        address: Address | None = None,
    ) -> None:
        """`heads` may be shared by the readers of one router, and so may the `budget`."""
        self._budget = budget if budget is not None else Budget(Limits())
        self._address = address if address is not None else Address()
        self._serving_bytes = 0
        self._router = router
        self._heads = heads if heads is not None else HeadCache()
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._peer = peer
        self._parser = HttpRequestParser(self)

        self.admits_host: Callable[[bytes], bool] | None = None
        self.check_head: Callable[[Request], Response | None] | None = None
        """The refusal of a request by its head, before its body has arrived; None: none."""
        self.pending: deque[PendingRequest] = deque()
        self._waiting_bytes = 0
        self.unparsed: bytes | memoryview = b""

        self.messages_begun = 0
        self.receiving = False
        self.awaits_continue = False
        self.body_bytes = 0
        self._body: bytes | bytearray = b""
        self._pieces = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head = self._headers
        self._progressed = False
        self._eventless_bytes = 0
        self._replay = False
        self._repeated = 0
        self._unchecked = False
        self._upgrade: UpgradeHandler | None = None

        self.closed = False
        self.excess = False
        self.refusal: Response | None = None
        self.leftover: bytearray | None = None

    def feed(self, data: bytes | memoryview) -> None:
        """Parse what arrived into requests, or keep it unparsed while too many are pending."""
        if self.unparsed:
            self.unparsed = bytes(self.unparsed) + data
        elif self.receiving or self.closed or type(data) is not bytes:
            self._parse_slices(data)
        else:
            self._parse_whole(data)
        if self._unchecked and self.receiving:
            # The usual body comes with its head, and is checked with it when it is served.
            self._unchecked = False
            self._refuse_head_of(self._head)

    def resume(self) -> bool:
        """Parse what was kept unparsed, if few enough are pending; returns whether there was anything to parse."""
        if not self.unparsed or self.is_backlogged():
            return False
        unparsed, self.unparsed = self.unparsed, b""
        self.feed(unparsed)
        return True

    def take(self) -> PendingRequest:
        taken = self.pending.popleft()
        self._serving_bytes = len(taken[0].body)
        self._waiting_bytes -= self._serving_bytes
        return taken

    def served(self) -> None:
        """The request that was taken has been answered: its body is no longer held."""
        if nbytes := self._serving_bytes:
            self._budget.give_back(self._address, nbytes)
            self._serving_bytes = 0

    def is_backlogged(self) -> bool:
        return len(self.pending) >= WAITING_REQUESTS or self._waiting_bytes >= WAITING_BYTES

    def is_drained(self) -> bool:
        """Whether every complete request that arrived was taken."""
        return not self.pending and not self.unparsed

    def refuse(self, status: int, text: str, headers: Headers = ()) -> None:
        """Answer this after the requests before it, and read no more."""
        if not self.closed:
            self.refusal = error_response(status, text, headers)
            self.excess = True
            self.stop()

    def stop(self) -> None:
        """Read no more requests, and drop the one that has arrived only partly."""
        self.closed = True
        self.receiving = False
        self.awaits_continue = False
        self.leftover = None
        self._budget.give_back(self._address, self.body_bytes)
        self.body_bytes = 0
        self._body = b""

    def close(self) -> None:
        """Drop everything, and break the reference cycle with the parser."""
        self.stop()
        self.served()
        self._budget.give_back(self._address, self._waiting_bytes)
        self._waiting_bytes = 0
        self.pending.clear()
        self.unparsed = b""
        self.check_head = None
        del self._parser

    def _parse_whole(self, data: bytes) -> None:
        """The usual read: one whole request. If its head is cached, the parser is not needed."""
        end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD) + 4
        head = data[:end]
        known = self._heads.get(head)
        if known is not None and len(data) == end + known.body_bytes:
            method, path, params, query, handler, route, args = known.match
            request = Request(method, path, params, query, known.headers, data[end:], self._peer, route, args)
            self._waiting_bytes += known.body_bytes
            self.pending.append((request, handler, b"", None))
            nbytes = known.body_bytes
            if nbytes and not self._budget.take_in(self._address, nbytes, nbytes, whole=True):
                self._refuse_waiting()
            return
        before = len(self.pending)
        self._parse_slices(data)
        if known is None and end > 3 and len(self.pending) == before + 1 and not self.receiving and not self.closed:
            self._learn(head, len(data) - end)

    def _learn(self, head: bytes, body_bytes: int) -> None:
        """Cache a head that is followed by `body_bytes`, if nothing else of it matters."""
        request, _, connection_line, upgrade = self.pending[-1]
        headers = request.headers
        if len(request.body) != body_bytes or connection_line or upgrade is not None:
            return
        if b"transfer-encoding" in headers or b"expect" in headers or b"upgrade" in headers:
            return
        match = self._router.match(request.method.encode("latin-1"), self._target)
        if match.route is not None:
            self._heads.put(head, KnownHead(match, headers, body_bytes))

    def _parse_slices(self, data: bytes | memoryview) -> None:
        if len(data) <= SLICE_BYTES and not self.closed:
            self._parse(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            if self.closed:
                self._keep_leftover(view[start:])
                return
            if self.is_backlogged():
                self.unparsed = view[start:]
                return
            self._parse(view[start : start + SLICE_BYTES])

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._leave_http(data[upgrade.args[0] :])
            return
        except HttpParserCallbackError:
            log.exception("a callback of the HTTP parser failed")
            self.refuse(500, "Internal server error")
        except HttpParserError as error:
            # Errors in what follows the last request do not matter.
            self.excess = True
            self.refuse(400, f"Malformed HTTP request: {error}")
        if self.receiving:
            self._measure_overhead(len(data))

    def _keep_leftover(self, data: bytes | memoryview) -> None:
        self.excess = True
        if self.leftover is not None:
            self.leftover += data

    def _measure_overhead(self, arrived: int) -> None:
        # Bytes that bring no event are a head, a trailer or a chunk header that does not come to its end.
        if self._progressed:
            self._progressed = False
            return
        self._eventless_bytes += arrived
        if self._eventless_bytes > self._max_head_bytes:
            self._refuse_head()

    def _leave_http(self, rest: bytes | memoryview) -> None:
        if self._replay:
            # To the parser an Upgrade header is the end of HTTP, body or not. Where nothing can be upgraded
            # it has no meaning, so a new parser is shown the same head without it.
            self._replay = False
            head = self._head_without_upgrade()
            self._parser = HttpRequestParser(self)
            self._parse(head)
            self.feed(rest)
        else:
            # An upgrade, or else CONNECT, whose answer is a 404: either way no request follows.
            self.closed = True
            self._keep_leftover(rest)

    def _head_without_upgrade(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % field for field in self._head.items() if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, b"".join(lines))

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.receiving = not self.closed
        self.messages_begun += 1
        self._target = b""
        self._headers = {}
        self._progressed = True
        self._unchecked = False
        self._eventless_bytes = 0
        self._repeated = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        headers = self._headers
        if name not in headers:
            headers[name] = value
            return
        # Each is joined to those before it: a head full of one name would take its length squared.
        self._repeated += 1
        if self._repeated > MOST_REPEATED_HEADERS:
            self.refuse(431, f"The request head repeats headers more than {MOST_REPEATED_HEADERS} times")
            return
        headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        if self.closed:
            return
        headers = self._head = self._headers
        # Only a head that took several slices can be too long, so the exact count is rarely needed.
        if self._eventless_bytes > self._max_head_bytes - 2 * SLICE_BYTES and self._head_bytes() > self._max_head_bytes:
            self._refuse_head()
            return
        self._progressed = True
        self._eventless_bytes = 0
        host = headers.get(b"host")
        self._check_host(host)
        if host is not None and not self._target.startswith(b"/") and b"://" in self._target:
            # An absolute target names the host itself.
            named = self._target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            self._check_host(named.rpartition(b"@")[2])
        length = headers.get(b"content-length")
        if length is not None and (len(length) > _LONGEST_LENGTH or int(length) > self._max_body_bytes):
            self._refuse_body(f"The request body of {length[:_LONGEST_LENGTH].decode('latin-1')} bytes")
        if b"transfer-encoding" in headers:
            self._expect_chunks(headers[b"transfer-encoding"])
            length = b""
        self._unchecked = length is not None and not self.closed
        if b"expect" in headers:
            self._expect(headers[b"expect"])
        if b"upgrade" in headers and not self.closed and self._parser.should_upgrade():
            self._consider_upgrade()

    def _refuse_head_of(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a body that is still to come by its head if the client may not send it."""
        method, path, params, query, _, route, args = self._router.match(self._parser.get_method(), self._target)
        if route is None or self.check_head is None:
            return
        refusal = self.check_head(Request(method, path, params, query, headers, b"", self._peer, route, args))
        if refusal is not None:
            self.refusal = refusal
            self.excess = True
            self.stop()

    def _check_host(self, host: bytes | None) -> None:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self.refuse(505, "The only versions of HTTP understood are 1.1 and 1.0")
        elif host is None:
            if version == "1.1":
                self.refuse(400, "The Host header is missing")
        elif b"," in host:
            self.refuse(400, "There is more than one Host header")
        elif self.admits_host is not None and not self.admits_host(host):
            self.refuse(421, "This server is not to be called by this name (see ALLOWED_HOSTS)")

    def on_body(self, piece: bytes) -> None:
        if self.closed:
            return
        self._progressed = True
        self._eventless_bytes = 0
        # One piece is the body; of more, however small, only their bytes are kept.
        if not self.body_bytes:
            self._body = piece
        elif type(self._body) is bytearray:
            self._body += piece
        else:
            self._body = bytearray(self._body)
            self._body += piece
        self.body_bytes += len(piece)
        self._pieces += 1
        whole = self._head.get(b"content-length") == b"%d" % self.body_bytes
        if not self._budget.take_in(self._address, len(piece), self.body_bytes, whole=whole):
            self._refuse_waiting()
            return
        if self._pieces > MOST_SMALL_CHUNKS and self.body_bytes < self._pieces * SMALL_CHUNK_BYTES:
            self.refuse(400, "The chunks of the request body are too small")
            return
        if self.body_bytes > self._max_body_bytes:
            self._refuse_body("The request body")

    def on_message_complete(self) -> None:
        if self.closed or self._replay:
            return
        parser = self._parser
        headers = self._head
        method, path, params, query, handler, route, args = self._router.match(parser.get_method(), self._target)
        body = b""
        if self.body_bytes:
            body = self._join_body()
        request = Request(method, path, params, query, headers, body, self._peer, route, args)
        connection_line = b""
        if not parser.should_keep_alive():
            self.closed = True
        elif b"connection" in headers and parser.get_http_version() == "1.0":
            connection_line = KEEP_ALIVE
        self.pending.append((request, handler, connection_line, self._upgrade))
        self.receiving = False
        self.awaits_continue = False

    def _join_body(self) -> bytes:
        body = bytes(self._body)
        self._body = b""
        self._pieces = 0
        self.body_bytes = 0
        self._waiting_bytes += len(body)
        return body

    def _expect_chunks(self, encoding: bytes) -> None:
        if encoding.lower() != b"chunked":
            self.refuse(501, "The only Transfer-Encoding understood is chunked")
        # The fields after the last chunk go to a dict that is never read.
        self._headers = {}

    def _expect(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self.refuse(417, "The only Expect understood is 100-continue")
        elif not self.closed and self._parser.get_http_version() != "1.0":
            self.awaits_continue = True

    def _consider_upgrade(self) -> None:
        route = self._router.match(self._parser.get_method(), self._target).route
        if route is not None and route.upgrade is not None:
            self._upgrade = route.upgrade
            self.leftover = bytearray()
        else:
            self._replay = True

    def _head_bytes(self) -> int:
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers.items())

    def _refuse_waiting(self) -> None:
        self._budget.refused["incoming"] += 1
        self.refuse(503, "The server holds too many request bodies just now; try again", ((b"Retry-After", b"1"),))

    def _refuse_head(self) -> None:
        self.refuse(431, f"The request head is larger than the {self._max_head_bytes} bytes allowed")

    def _refuse_body(self, subject: str) -> None:
        self.refuse(413, f"{subject} is larger than the {self._max_body_bytes} bytes allowed")

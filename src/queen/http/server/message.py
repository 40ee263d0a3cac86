"""Requests, responses, routes, and the error that a handler may raise instead of a response."""

from __future__ import annotations

import asyncio
import enum
import functools
import http
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

BODILESS: Final = frozenset({204, 304})
# The policy for an answer that a browser shows: nothing is allowed. Pages set a policy of their own.
_CSP: Final = b"Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n"

log = logging.getLogger(__name__)


class Request:
    """One request with its whole body. `params`, `query` and `args` are shared among requests: never change them.

    `args` is the query as its route parses it; None where the route does not.
    """

    __slots__ = (
        "_disconnect_callbacks",
        "args",
        "body",
        "client_name",
        "disconnected",
        "headers",
        "method",
        "params",
        "path",
        "peer",
        "principal",
        "query",
        "route",
        "subject",
    )

    def __init__(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        query: Mapping[str, str],
        headers: dict[bytes, bytes],
        body: bytes,
        peer: str = "",
        route: Route | None = None,
        args: Any = None,
    ) -> None:
        self.method = method
        self.path = path
        self.params = params
        self.query = query
        self.headers = headers
        self.body = body
        self.peer = peer
        self.route = route
        self.args = args
        self.client_name: str | None = None
        """The common name in the certificate that the client has shown."""
        self.principal: Any = None
        self.subject: str | None = None
        self.disconnected = False
        self._disconnect_callbacks: list[Callable[[], object]] | None = None

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Call back when the client disconnects before its response; soon, if it already has."""
        if self.disconnected:
            asyncio.get_running_loop().call_soon(callback)
        elif self._disconnect_callbacks is None:
            self._disconnect_callbacks = [callback]
        else:
            self._disconnect_callbacks.append(callback)

    def disconnect(self) -> None:
        """Called by the connection when the client is gone: run the callbacks."""
        self.disconnected = True
        callbacks, self._disconnect_callbacks = self._disconnect_callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                log.exception("a disconnect callback of %s %s failed", self.method, self.path)


class Response:
    """One answer. A 204 or 304 never carries a body, whatever is given here."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        headers: Headers = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


class StreamWriter(Protocol):
    """The sending side of an answer that goes on."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the client has not taken yet."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        """End the answer once all of it is sent."""

    def abort(self) -> None:
        """Drop the connection at once."""


class ResponseStream:
    """An answer of unknown length: `on_open` is given where to write it. It ends when either side closes it."""

    __slots__ = ("content_type", "on_open")

    def __init__(self, content_type: bytes, on_open: Callable[[StreamWriter], object]) -> None:
        self.content_type = content_type
        self.on_open = on_open


Handler: TypeAlias = Callable[[Request], Response | Awaitable[Response]]


class Connection(Protocol):
    """A connection that another protocol may take over."""

    def take_over(self, protocol: asyncio.Protocol) -> None: ...


UpgradeHandler: TypeAlias = Callable[[Request, Connection], Response | Awaitable[Response | None] | None]


class Access(enum.IntEnum):
    """The access level that a route needs; each level includes the ones before it."""

    PUBLIC = 0
    READ_ONLY = 1
    READ_WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the route table.

    `parse_query` turns the query into `Request.args` once per target, and may raise; `declaration` is for layers above.
    """

    method: str
    pattern: str
    handler: Handler
    access: Access
    upgrade: UpgradeHandler | None = None
    parameters: tuple[str, ...] = ()
    parse_query: Callable[[Mapping[str, str]], Any] | None = None
    declaration: Any = None
    streams: bool = False
    """Its handler answers with a `ResponseStream`."""

    @property
    def holds_connection(self) -> bool:
        """Whether a request may have its connection to itself, for as long as it lasts."""
        return self.streams or self.upgrade is not None


class HttpError(Exception):
    """Raised by a handler to answer `{"error": message}` with a status and, say, a Retry-After header."""

    def __init__(self, status: int, message: str, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

    def response(self) -> Response:
        return error_response(self.status, self.message, self.headers)


def json_response(status: int, obj: Any, headers: Headers = ()) -> Response:
    """Answer with `obj` as JSON."""
    return Response(status, msgspec.json.encode(obj), headers=headers)


def error_response(status: int, text: str, headers: Headers = ()) -> Response:
    """Answer with `{"error": text}`."""
    return json_response(status, {"error": text}, headers)


def encode_head(response: Response, connection: bytes = b"", common: bytes = b"") -> bytes:
    """Everything before the body; `connection` is whole header lines or nothing, and so are those `common` to all."""
    policy = not response.headers or all(name != b"Content-Security-Policy" for name, _ in response.headers)
    start = head_start(response.status, response.content_type, common, policy)
    if response.status not in BODILESS:
        if not response.headers:
            return b"%b%d\r\n%b\r\n" % (start, len(response.body), connection)
        start = b"%b%d\r\n" % (start, len(response.body))
    elif not response.headers:
        return b"%b%b\r\n" % (start, connection)
    lines = b"".join([header_line(name, value) for name, value in response.headers])
    return b"%b%b%b\r\n" % (start, connection, lines)


# Handlers use a handful of statuses and content types, so their opening lines are made once.
@functools.lru_cache(maxsize=256)
def head_start(status: int, content_type: bytes, common: bytes, policy: bool = True) -> bytes:
    """The head up to the length of the body, or up to the last line where there never is a body."""
    try:
        reason = http.HTTPStatus(status).phrase.encode()
    except ValueError:
        reason = b"Unknown"
    start = b"HTTP/1.1 %d %b\r\n%b" % (status, reason, common)
    # Pages, and some other answers, set a policy of their own.
    if common and policy and not content_type.startswith(b"text/html"):
        start += _CSP
    if status in BODILESS:
        return start
    return b"%b%bContent-Length: " % (start, header_line(b"Content-Type", content_type))


def encode_stream_head(content_type: bytes, connection: bytes, common: bytes) -> bytes:
    """The head of an answer that ends with its connection, and that no proxy is to keep or to gather."""
    lines = head_start(200, content_type, common).removesuffix(b"Content-Length: ")
    return b"%bCache-Control: no-store\r\nX-Accel-Buffering: no\r\n%b\r\n" % (lines, connection)


def header_line(name: bytes, value: bytes) -> bytes:
    # A line break inside a header would allow header injection and response splitting.
    if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
        raise ValueError(f"a response header holds a line break: {name!r}: {value!r}")
    return b"%b: %b\r\n" % (name, value)

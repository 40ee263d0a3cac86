"""Rules for web pages: which origins may read answers, send changes, and open WebSockets.

None of it holds up a client that is no browser: only browsers send `Origin` and `Sec-Fetch-Site`, and no page can make
them lie.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Collection, Sequence
from typing import Final
from urllib.parse import urlsplit

from queen.http.server.message import Access, Request, Response, Route, error_response
from queen.settings import Settings

_PORTS: Final = {"http": 80, "https": 443}
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
API_PREFIXES: Final = ("/api/", "/streams/", "/ws/", "/internal/")
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})
_CORS_LINES: Final = (
    b"Access-Control-Allow-Methods: GET, POST, PUT, DELETE, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: Content-Type, Authorization\r\n"
)
CORS_FOR_ALL: Final = b"Access-Control-Allow-Origin: *\r\n" + _CORS_LINES
SECURITY_LINES: Final = b"X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n"
HSTS_LINE: Final = b"Strict-Transport-Security: max-age=31536000\r\n"


class BrowserRules:
    """The rules of one server."""

    def __init__(self, settings: Settings) -> None:
        self._tls = bool(settings.tls_cert)
        origins = settings.cors_origins or (() if settings.is_guarded else ("*",))
        self._open_to_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = _host_names(settings)

    @property
    def header_lines(self) -> bytes:
        """The lines that every answer has."""
        lines = SECURITY_LINES + HSTS_LINE if self._tls else SECURITY_LINES
        return lines + CORS_FOR_ALL if self._open_to_all else lines

    def cors_lines(self, request: Request) -> bytes:
        """The lines that the answer to this request has besides."""
        if self._open_to_all:
            return b""
        origin = request.headers.get(b"origin")
        if origin is None:
            return b""
        if origin.lower() not in self._origins:
            return b"Vary: Origin\r\n"
        return b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n%b" % (origin, _CORS_LINES)

    def is_host_admitted(self, host: bytes) -> bool:
        """Whether a client may call this server by this name.

        A page can have its own name lead to this machine (DNS rebinding); the `Host` header then shows that name.
        """
        return self._hosts is None or _host_name(host) in self._hosts

    def check(self, request: Request) -> Response | None:
        """The refusal of a request that a browser sends for a foreign page; None: it may pass."""
        headers = request.headers
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None and site is None:
            return None
        route = request.route
        if route is None or route.access is Access.PUBLIC or route.upgrade is not None:
            return None
        return self.check_page(request, reads=request.method in _READING and not takes_messages(route))

    def check_page(self, request: Request, *, reads: bool) -> Response | None:
        """The same, where it is known whether the request only reads."""
        headers = request.headers
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None:
            # A picture, a form or a link of another site: they show nothing to it, yet would take messages here.
            if site in (b"cross-site", b"same-site") and headers.get(b"sec-fetch-mode") != b"cors":
                return error_response(403, "Requests from pages of other sites are not allowed")
            return None
        host = headers.get(b"host", b"").decode("latin-1")
        if reads or is_same_host(origin.decode("latin-1"), host):
            return None
        if not self._open_to_all and origin.lower() not in self._origins:
            return error_response(403, "Pages of this origin may not change anything here (see CORS_ORIGINS)")
        if b"authorization" not in headers and not _is_json(headers.get(b"content-type", b"")) and request.body:
            return error_response(415, "A request of a web page needs Content-Type: application/json")
        return None


def takes_messages(route: Route) -> bool:
    """Whether a GET takes messages, or leases them."""
    return route.method == "GET" and route.access is Access.READ_WRITE and route.upgrade is None


def is_admitted(origin: str | None, host: str, origins: Collection[str]) -> bool:
    """Whether the page at `origin` may open a WebSocket to the server that it calls `host`.

    Browsers do not let a page forge the header, and other clients need not send it.
    """
    if origin is None or "*" in origins:
        return True
    origin = origin.lower()
    return origin in origins or is_same_host(origin, host.lower())


@functools.lru_cache(maxsize=256)
def is_same_host(origin: str, host: str) -> bool:
    # The scheme is left out of it: a proxy in front may have taken the TLS off.
    try:
        page, server = urlsplit(origin.lower()), urlsplit("//" + host.lower())
        port = page.port or _PORTS.get(page.scheme)
        return (
            page.hostname is not None
            and page.hostname == server.hostname
            and port == (server.port or _PORTS.get(page.scheme))
        )
    except ValueError:
        return False


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json") or kind == b"application/x-msgpack"


def _host_names(settings: Settings) -> frozenset[str] | None:
    """None: any name will do."""
    names: Sequence[str] = settings.allowed_hosts
    if not names:
        if settings.listen_host not in LOOPBACK_NAMES:
            return None
        names = (*LOOPBACK_NAMES, socket.gethostname())
    return None if "*" in names else frozenset(name.lower() for name in names)


def _host_name(host: bytes) -> str:
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    name, colon, port = text.rpartition(":")
    return name if colon and port.isdigit() else text

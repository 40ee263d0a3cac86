"""Serves the built files: hashed assets are cached forever; every path of the dashboard is the page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

from queen.http.server.message import HttpError, Request, Response

# No external resources, no inline scripts, no framing by other pages.
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY: Final = (
    (b"Content-Security-Policy", _POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
)
_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "woff2": b"font/woff2",
}
_ENCODINGS: Final = ((b"br", ".br"), (b"gzip", ".gz"))
_FOREVER: Final = b"public, max-age=31536000, immutable"
_ASK_AGAIN: Final = b"no-cache"
_PAGE: Final = "index.html"
# Below these there are calls and nothing to look at: a wrong one is a 404, and never the page.
_NOT_PAGES: Final = ("api/", "assets/", "internal/", "metrics/", "streams/v1/", "ws/")


@dataclass(slots=True)
class _File:
    """One built file. Its content is read when it is first requested."""

    source: Traversable
    media_type: bytes
    immutable: bool
    encoded: dict[bytes, Traversable] = field(default_factory=dict)
    responses: dict[bytes, tuple[Response, Response]] = field(default_factory=dict)

    def respond(self, request: Request) -> Response:
        accepted = request.headers.get(b"accept-encoding", b"")
        encoding = next((name for name in self.encoded if name in accepted), b"")
        if encoding not in self.responses:
            self.responses[encoding] = self._responses(encoding)
        full, unchanged = self.responses[encoding]
        etag = full.headers[0][1]
        return unchanged if etag in request.headers.get(b"if-none-match", b"") else full

    def _responses(self, encoding: bytes) -> tuple[Response, Response]:
        body = (self.encoded[encoding] if encoding else self.source).read_bytes()
        headers: tuple[tuple[bytes, bytes], ...] = (
            (b"ETag", b'"%b"' % hashlib.sha256(body).hexdigest()[:20].encode()),
            (b"Cache-Control", _FOREVER if self.immutable else _ASK_AGAIN),
            *_SECURITY,
        )
        if self.encoded:
            headers = (*headers, (b"Vary", b"Accept-Encoding"))
        unchanged = Response(304, headers=headers)
        if encoding:
            headers = (*headers, (b"Content-Encoding", encoding))
        return Response(200, body, self.media_type, headers), unchanged


class Dashboard:
    """A handler for every path that no route of the API knows.

    Where there is no login it says so at `/api/me`: there is no user, and a token is wanted or not.
    """

    def __init__(self, *, wants_token: bool = False) -> None:
        self._me = msgspec.json.encode({"username": None, "role": None, "wantsToken": wants_token})
        found = dict(_walk(files("queen.dashboard").joinpath("static"), ""))
        self._files = {name: _file(name, found) for name in found if name.rpartition(".")[2] in _TYPES}

    def __call__(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise HttpError(404, "Not Found")
        if request.path == "/api/me":
            return Response(200, self._me, b"application/json", ((b"Cache-Control", b"no-store"),))
        name = request.path.lstrip("/")
        known = self._files.get(name)
        if known is not None:
            return known.respond(request)
        wants_page = b"text/html" in request.headers.get(b"accept", b"")
        page = self._files.get(_PAGE)
        if page is None or f"{name}/".startswith(_NOT_PAGES) or (name and not wants_page):
            raise HttpError(404, "Not Found")
        return page.respond(request)


def _walk(place: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    if not place.is_dir():
        return
    for entry in place.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _file(name: str, found: dict[str, Traversable]) -> _File:
    return _File(
        found[name],
        _TYPES[name.rpartition(".")[2]],
        immutable=name.startswith("assets/"),
        encoded={encoding: found[name + suffix] for encoding, suffix in _ENCODINGS if name + suffix in found},
    )

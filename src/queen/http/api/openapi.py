"""The description of the HTTP API: for programs at /openapi.json, for people at /docs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from queen.http.server.message import Request, Response
from queen.http.server.router import Access, Route, Router

# The page needs nothing from anywhere else, and must not get it from there either.
_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = ((b"Content-Security-Policy", _POLICY), (b"X-Content-Type-Options", b"nosniff"))


class OpenApiRoutes:
    """Answers with the document of these routes, to which more may be added, and with a page that shows it."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._document: bytes | None = None
        self._page = Response(
            200,
            files("queen.http.openapi").joinpath("docs.html").read_bytes(),
            b"text/html; charset=utf-8",
            _HEADERS,
        )

    def add_to(self, router: Router) -> None:
        router.add("GET", "/openapi.json", self.document, Access.PUBLIC)
        router.add("GET", "/docs", self.page, Access.PUBLIC)

    def document(self, request: Request) -> Response:
        """Made when it is first asked for, after every route has been added."""
        if self._document is None:
            # Megabytes of descriptions, which most workers are never asked for.
            from queen.http.openapi.document import build_document
            from queen.http.operations import TAGS, all_operations

            made = build_document(self._routes, all_operations(), TAGS)
            self._document = msgspec.json.encode(made)
        return Response(200, self._document)

    def page(self, request: Request) -> Response:
        return self._page

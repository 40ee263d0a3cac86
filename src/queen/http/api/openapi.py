"""The description of the HTTP API: for programs at /openapi.json, for people at /docs."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import msgspec

from queen.http.routing.context import Api
from queen.http.routing.route import Media, RouteTable
from queen.http.server.message import Access, Request, Response

routes = RouteTable("Documentation")

# The page needs nothing from anywhere else, and must not get it from there either.
_POLICY: Final = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = ((b"Content-Security-Policy", _POLICY), (b"X-Content-Type-Options", b"nosniff"))


@routes.direct(
    "GET",
    "/openapi.json",
    access=Access.PUBLIC,
    id="openapi",
    summary="This document",
    returns={200: dict[str, Any]},
    cached=True,
)
async def document(api: Api, request: Request) -> Response:
    # Schemas are megabytes that most workers are never asked for.
    from queen.http.routing.document import build_document

    return Response(200, msgspec.json.encode(build_document(api.routes)))


@routes.direct(
    "GET",
    "/docs",
    access=Access.PUBLIC,
    id="docs",
    summary="This document as a page",
    returns={200: Media("text/html")},
)
def page(api: Api, request: Request) -> Response:
    html = files("queen.http.api").joinpath("docs.html").read_bytes()
    return Response(200, html, b"text/html; charset=utf-8", _HEADERS)

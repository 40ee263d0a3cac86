"""The token a request carries."""

from __future__ import annotations

from typing import Final

from queen.http.server.message import Request

_OFFER: Final = "bearer."


def bearer_token(request: Request) -> str | None:
    """The token of `Authorization: Bearer <token>`; for a WebSocket also of its protocols or its query.

    A browser cannot set headers on a WebSocket. It can offer the protocols `queen.v1` and `bearer.<token>`, or, where
    the token is no word that a protocol may be called by, ask for `?token=<token>`.
    """
    scheme, _, token = request.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if request.route is None or request.route.upgrade is None:
        return None
    for offered in offered_protocols(request):
        if offered.startswith(_OFFER) and len(offered) > len(_OFFER):
            return offered.removeprefix(_OFFER)
    return request.query.get("token") or None


def offered_protocols(request: Request) -> list[str]:
    """What the client of a WebSocket offers to speak."""
    header = request.headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    return [offered.strip() for offered in header.split(",") if offered.strip()]

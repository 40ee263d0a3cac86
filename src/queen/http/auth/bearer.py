"""The token a request carries."""

from __future__ import annotations

from typing import Final

from queen.http.server.message import Request

_OFFER: Final = "bearer."


def bearer_token(request: Request) -> bytes | None:
    """The token of `Authorization: Bearer <token>`; for WebSockets and event streams also of the query.

    The word `Bearer` may be left out. A browser cannot set headers on these. It can offer the protocols
    `queen.v1` and `bearer.<token>`, or, where the token is no word that a protocol may be called by, ask for
    `?token=<token>`.
    """
    header = request.headers.get(b"authorization")
    if header is not None:
        token = header[7:].strip() if header[:7].lower() == b"bearer " else header.strip()
        if token:
            return token
    if request.route is None or not request.route.holds_connection:
        return None
    for offered in offered_protocols(request):
        if offered.startswith(_OFFER) and len(offered) > len(_OFFER):
            return offered.removeprefix(_OFFER).encode("latin-1")
    return request.query.get("token", "").encode() or None


def offered_protocols(request: Request) -> list[str]:
    """What the client of a WebSocket offers to speak."""
    header = request.headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    return [offered.strip() for offered in header.split(",") if offered.strip()]

"""Which web pages may open a WebSocket."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}


def is_admitted(origin: str | None, host: str, origins: Collection[str]) -> bool:
    """Whether the page at `origin` may connect to the server that it calls `host`.

    No browser lets a page forge the header, and nobody else need send it: without one there is no page to keep out.
    """
    if origin is None or "*" in origins:
        return True
    origin = origin.lower()
    return origin in origins or _is_same_host(origin, host.lower())


def _is_same_host(origin: str, host: str) -> bool:
    # The scheme is left out of it: a proxy in front may have taken the TLS off.
    try:
        page, server = urlsplit(origin), urlsplit("//" + host)
        port = page.port or _PORTS.get(page.scheme)
        return (
            page.hostname is not None
            and page.hostname == server.hostname
            and port == (server.port or _PORTS.get(page.scheme))
        )
    except ValueError:
        return False

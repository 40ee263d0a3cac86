"""Addresses and protocols of clients, as the proxies in front of the server forward them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import TypeVar

from queen.http.server.message import Request

T = TypeVar("T")


def client_address(forwarded_for: str, peer: str, hops: int) -> str:
    """The address in `X-Forwarded-For`; only the entries that the `hops` proxies themselves have added count."""
    chain = [entry.strip() for entry in forwarded_for.split(",") if entry.strip()]
    return _address(chain[-hops]) or peer if 0 < hops <= len(chain) else peer


def _address(entry: str) -> str | None:
    """An address without its port; None for what is none, as where fewer proxies stand in front than are trusted."""
    bare = entry[1:].partition("]")[0] if entry.startswith("[") else entry
    for text in (bare, bare.rpartition(":")[0]):
        try:
            # The zone of a link-local address is any text: it would reach logs, and count as another address.
            return str(ipaddress.ip_address(text.partition("%")[0]))
        except ValueError:
            continue
    return None


def came_by_https(forwarded_proto: str, hops: int, secure: bool) -> bool:
    """Whether the client reached the first of the `hops` proxies by HTTPS; `secure` without `X-Forwarded-Proto`."""
    schemes = [entry.strip().lower() for entry in forwarded_proto.split(",") if entry.strip()]
    if not hops or not schemes:
        return secure
    # Most proxies replace what others said: then the only entry is that of the first.
    return schemes[-min(hops, len(schemes))] == "https"


def behind_proxies(check: Callable[[Request], T], hops: int) -> Callable[[Request], T]:
    """A check of requests that is shown the clients of the proxies in front, and not the proxies."""
    if not hops:
        return check

    def check_client(request: Request) -> T:
        forwarded_for = request.headers.get(b"x-forwarded-for", b"").decode("latin-1")
        request.peer = client_address(forwarded_for, request.peer, hops)
        return check(request)

    return check_client

"""Whose request it is that a proxy in front has passed on."""

from __future__ import annotations

import pytest

from queen.http.auth.forwarded import came_by_https, client_address


@pytest.mark.parametrize(
    ("forwarded_for", "hops", "address"),
    [
        ("", 1, "peer"),
        ("192.0.2.1", 0, "peer"),
        ("192.0.2.1", 1, "192.0.2.1"),
        ("203.0.113.9, 192.0.2.1", 1, "192.0.2.1"),
        ("203.0.113.9,192.0.2.1 , ", 2, "203.0.113.9"),
        ("192.0.2.1", 2, "peer"),
        ("192.0.2.1:50000", 1, "192.0.2.1"),
        ("2001:DB8::1", 1, "2001:db8::1"),
        ("[2001:db8::1]:50000", 1, "2001:db8::1"),
        ("fe80::1%eth0", 1, "fe80::1"),
        ("fe80::1%x refused with 200", 1, "fe80::1"),
        ("unknown", 1, "peer"),
        ("192.0.2.1 evil", 1, "peer"),
    ],
)
def test_the_address_of_the_client(forwarded_for: str, hops: int, address: str) -> None:
    assert client_address(forwarded_for, "peer", hops) == address


@pytest.mark.parametrize(
    ("forwarded_proto", "hops", "secure", "https"),
    [
        ("", 1, True, True),
        ("", 1, False, False),
        ("https", 0, False, False),
        ("https", 1, False, True),
        ("HTTPS", 1, False, True),
        ("http", 1, True, False),
        ("https, http", 1, True, False),
        ("https, http", 2, False, True),
        ("http, https, http", 2, False, True),
        ("https", 2, False, True),
    ],
)
def test_whether_the_client_has_come_by_https(forwarded_proto: str, hops: int, secure: bool, https: bool) -> None:
    assert came_by_https(forwarded_proto, hops, secure) is https

"""Connections of type `queen`, which Airflow stores; no Airflow is needed to read one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from queen.airflow import get_provider_info
from queen.airflow.connection import read_connection
from queen.client.config import read_config
from queen.errors import QueenError


def stored(**fields: Any) -> Any:
    absent: dict[str, Any] = {
        "conn_id": "shop",
        "host": None,
        "port": None,
        "schema": None,
        "password": None,
        "extra_dejson": {},
    }
    return SimpleNamespace(**(absent | fields))


@pytest.mark.parametrize(
    ("fields", "urls"),
    [
        ({"host": "queen"}, ("http://queen:6632",)),
        ({"host": "queen", "port": 7000, "extra_dejson": {"tls": True}}, ("https://queen:7000",)),
        ({"host": "queen", "extra_dejson": {"tls": "true"}}, ("https://queen:6632",)),
        ({"host": "queen", "schema": "https"}, ("https://queen:6632",)),
        ({"host": "one, two:7001"}, ("http://one:6632", "http://two:7001")),
        ({"host": "https://queen.example.com/"}, ("https://queen.example.com",)),
        ({"host": "::1"}, ("http://[::1]:6632",)),
    ],
)
def test_hosts_ports_and_tls(fields: dict[str, Any], urls: tuple[str, ...]) -> None:
    assert read_connection(stored(**fields)).urls == urls


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "connection 'shop' has no host; expected a name such as queen.example.com, or a URL"),
        ({"host": "ftp://queen"}, "connection 'shop': host 'ftp://queen' must be a name, or a URL with http"),
        (
            {"host": "queen", "extra_dejson": {"tsl": True}},
            "'shop': unknown extra 'tsl'; did you mean 'tls'",
        ),
        ({"host": "queen", "extra_dejson": {"tls": "maybe"}}, "'tls' must be true or false, not 'maybe'"),
        (
            {"host": "queen", "extra_dejson": {"timeout_seconds": -1}},
            "must be a number above 0, not -1",
        ),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(QueenError) as raised:
        read_connection(stored(**fields))
    assert error in str(raised.value)


def test_the_client_gets_the_token_and_no_text_shows_it() -> None:
    connection = read_connection(stored(host="queen", password="s3cret", extra_dejson={"timeout_seconds": "2.5"}))
    config = read_config(None, connection.client_options())
    assert (config.bearer_token, config.timeout_millis, config.strict) == ("s3cret", 2500, True)
    assert "s3cret" not in repr(connection)


def test_the_provider_names_its_connection_type_without_airflow() -> None:
    (kind,) = get_provider_info()["connection-types"]
    assert (kind["connection-type"], kind["hook-class-name"]) == ("queen", "queen.airflow.hook.QueenHook")

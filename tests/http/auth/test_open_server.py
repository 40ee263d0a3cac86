"""A server without authentication listens on this machine only, or warns that it is open."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from queen.cli.serve.supervisor import _announcement
from queen.http.auth.guard import check_security
from queen.settings import Settings
from tests.http.auth.issuer import SECRET
from tests.support.api import Api


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"jwt_secret": SECRET}, "127.0.0.1"),
        ({"jwt_enabled": True, "jwt_secret": SECRET}, "0.0.0.0"),
        ({"queen_login": True, "jwt_secret": SECRET}, "0.0.0.0"),
        ({"tls_client_auth": "required"}, "0.0.0.0"),
        ({"host": "10.0.0.7"}, "10.0.0.7"),
        ({"host": "::1", "jwt_enabled": True, "jwt_secret": SECRET}, "::1"),
    ],
)
def test_where_a_server_listens(settings: dict[str, Any], host: str) -> None:
    assert Settings.from_env({}, **settings).listen_host == host


def test_a_server_for_this_machine_says_how_to_open_it() -> None:
    said = _announcement(Settings.from_env({}), "postgresql://localhost/queen")
    assert "this machine only; JWT_ENABLED=true or HOST=0.0.0.0 opens it" in said
    opened = Settings.from_env({}, jwt_enabled=True, jwt_secret=SECRET)
    assert "this machine only" not in _announcement(opened, "postgresql://localhost/queen")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, ""),
        ({"host": "127.0.0.1"}, ""),
        ({"host": "0.0.0.0"}, "authentication is off and HOST=0.0.0.0 is reachable from other machines"),
        ({"host": "0.0.0.0", "jwt_enabled": True, "jwt_secret": SECRET}, ""),
        (
            {"jwt_enabled": True, "jwt_secret": SECRET, "jwt_skip_paths": ("/health", "/api/v1/push")},
            "JWT_SKIP_PATHS opens /api/v1/push to everyone who reaches port 6632",
        ),
        ({"jwt_secret": SECRET}, "JWT_ENABLED is not true: requests need no token"),
    ],
)
def test_the_start_warns(settings: dict[str, Any], warned: str, caplog: pytest.LogCaptureFixture) -> None:
    check_security(Settings.from_env({}, **settings))
    assert (warned in caplog.text) if warned else not caplog.records


async def test_readiness_warns(api: Api) -> None:
    assert (await api.call("GET", "/readyz")).body["warnings"] == []
    assert api.worker is not None
    # As if it had been started so: no test listens where others could reach it.
    api.worker.api.settings = dataclasses.replace(api.worker.settings, host="0.0.0.0")
    ready = await api.call("GET", "/readyz")
    assert ready.status == 200
    assert "HOST=0.0.0.0 is reachable from other machines" in ready.body["warnings"][0]

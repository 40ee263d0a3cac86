"""The published clients work through the proxy, with the token of a user."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.acceptance import javascript_client as javascript
from tests.acceptance.client_environment import clean_environ, client_python
from tests.acceptance.scenario import TOKEN_VARIABLE, Implementation, Scenario, Server
from tests.acceptance.scenarios import all_scenarios
from tests.acceptance.served import environ_without_settings, served
from tests.acceptance.test_javascript_client import SCENARIOS as JAVASCRIPT
from tests.support.ports import free_port

_ROOT = Path(__file__).parents[2]
_SECRET = "a secret of the acceptance tests, of 32 bytes and more"
_READY_SECONDS = 100.0
# It expects that nobody is noted as the producer, as on a server without authentication.
_UNSIGNED = "a_message_is_popped_with_all_its_fields"
# Pushes, pops and long polls, consumers, acks and leases, transactions, dead letters, buffers.
_IN_EVERY_RUN = ("pushing", "consuming", "transactions")
_MODULES = ("pushing", "popping", "consuming", "transactions", "dead_letters", "buffering", "subscriptions")
_CHOSEN = [
    one
    for one in all_scenarios()
    if one.module in _MODULES and one.server is Server.MAIN and not one.alone and one.seconds <= 30
    if one.name != _UNSIGNED
]


@dataclass(frozen=True)
class Proxied:
    """Where the proxy is, and a token for it."""

    url: str
    token: str


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    """`queen serve` that wants tokens, `queen user add`, and `queen proxy`: as a person sets them up."""
    directory = tmp_path_factory.mktemp("proxied")
    queen = str(Path(sys.executable).with_name("queen"))
    settings = {
        "JWT_ENABLED": "true",
        "JWT_SECRET": _SECRET,
        "QUEEN_ENCRYPTION_KEY": "0123456789abcdef" * 4,
        "RETENTION_INTERVAL": "2000",
        "EVICTION_INTERVAL": "2000",
    }
    with served(directory, **settings) as server:
        environment = environ_without_settings() | {"JWT_SECRET": _SECRET, "QUEEN_DATA_DIR": str(directory / "data")}
        added = subprocess.run(
            [queen, "user", "add", "ci", "--role", "admin", "--no-password", "--token", "1h"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert added.returncode == 0, added.stderr
        said, token = added.stdout.split("\n")[:2]
        assert said == "added ci, admin"
        port = free_port()
        command = [queen, "proxy", "--host", "127.0.0.1", "--port", str(port), "--server", server.url]
        with (directory / "proxy.log").open("wb") as log:
            proxy = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, proxy, directory / "proxy.log")
            yield Proxied(url, token)
            log_text = (directory / "proxy.log").read_text()
            assert " ERROR " not in log_text, log_text
        finally:
            proxy.terminate()
            proxy.wait(30)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`queen proxy` is not healthy ({error}):\n{log.read_text()}") from error
        time.sleep(0.1)


@pytest.fixture(scope="module")
def results(proxied: Proxied, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What came of the scenarios of the published Python client that were chosen."""
    tests = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    scenarios = [item.callspec.params["one"] for item in tests if hasattr(item, "callspec")]
    chosen = [one.id for one in scenarios if isinstance(one, Scenario)]
    python = client_python(_ROOT / ".venv-client")
    urls = json.dumps({Server.MAIN.value: proxied.url})
    command = [str(python), "-m", "tests.acceptance.run", Implementation.PUBLISHED.value, urls]
    done = subprocess.run(
        [*command, *chosen],
        cwd=_ROOT,
        env=clean_environ() | {TOKEN_VARIABLE: proxied.token},
        capture_output=True,
        text=True,
        timeout=200,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(chosen), done.stdout + done.stderr
    return {report["id"]: report for report in reports}


def _parameters() -> list[ParameterSet]:
    """What the proxy does is the same for all requests; scenarios that add none to it are left to `make soak`."""
    return [
        pytest.param(one, id=one.id, marks=() if one.module in _IN_EVERY_RUN else pytest.mark.soak) for one in _CHOSEN
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", _parameters())
def test_published_python_client(one: Scenario, results: dict[str, dict[str, Any]]) -> None:
    if results[one.id]["error"]:
        pytest.fail(results[one.id]["error"], pytrace=False)


def test_published_javascript_client(javascript_client: None, request: pytest.FixtureRequest) -> None:
    proxied: Proxied = request.getfixturevalue("proxied")
    found = javascript.run(proxied.url, JAVASCRIPT, proxied.token)
    assert {name: result["error"] for name, result in found.items() if result["error"]} == {}

"""The published clients, the servers they talk to, and the run of all chosen scenarios."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import javascript_client as javascript
from tests.acceptance.client_environment import clean_environ, client_python
from tests.acceptance.scenario import Implementation, Scenario, Server
from tests.acceptance.served import Served, served
from tests.support.node_packages import install_node_packages

_ROOT = Path(__file__).parents[2]

_SETTINGS = {
    Server.MAIN: {
        "RETENTION_INTERVAL": "2000",
        "EVICTION_INTERVAL": "2000",
        "QUEEN_ENCRYPTION_KEY": "0123456789abcdef" * 4,
    },
    Server.NEW_BY_DEFAULT: {"DEFAULT_SUBSCRIPTION_MODE": "new"},
}


class ScenarioRun:
    """The scenarios as they run in the client's interpreter."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._results: dict[str, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def result(self, one: Scenario) -> dict[str, Any]:
        """What came of one scenario, once it has run."""
        with self._news:
            self._news.wait_for(lambda: self._ended or one.id in self._results)
        if one.id not in self._results:
            raise RuntimeError(f"the scenarios ended with exit code {self._process.wait()} before {one.id} ran")
        return self._results[one.id]

    def finish(self) -> None:
        """Wait until all have run."""
        with self._news:
            self._news.wait_for(lambda: self._ended)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            result = json.loads(line)
            with self._news:
                self._results[result["id"]] = result
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Server, Served]]:
    """The servers; one that is first asked for is started then."""
    with ExitStack() as stack:

        class Started(dict[Server, Served]):
            def __missing__(self, server: Server) -> Served:
                directory = tmp_path_factory.mktemp(f"server-{server.value}")
                self[server] = stack.enter_context(served(directory, **_SETTINGS[server]))
                return self[server]

        yield Started()


@pytest.fixture(scope="session")
def published_run(request: pytest.FixtureRequest, servers: dict[Server, Served]) -> Iterator[ScenarioRun]:
    """A run of every scenario that was chosen for the published client, begun with the first of their tests."""
    python = client_python(_ROOT / ".venv-client")
    yield from _run(request, "published_run", servers, Implementation.PUBLISHED, str(python))


@pytest.fixture(scope="session")
def own_run(request: pytest.FixtureRequest, servers: dict[Server, Served]) -> Iterator[ScenarioRun]:
    """The same with the client of this project."""
    yield from _run(request, "own_run", servers, Implementation.OWN, sys.executable)


@pytest.fixture(scope="session")
def javascript_client() -> None:
    """The published JavaScript client; no test that needs it runs where the registry does not have it."""
    install_node_packages(javascript.DIRECTORY)


def _run(
    request: pytest.FixtureRequest,
    fixture: str,
    servers: dict[Server, Served],
    client: Implementation,
    python: str,
) -> Iterator[ScenarioRun]:
    tests = [item for item in request.session.items if fixture in getattr(item, "fixturenames", ())]
    parameters = (getattr(item, "callspec", None) for item in tests)
    chosen = [each.params["one"] for each in parameters if each and isinstance(each.params.get("one"), Scenario)]
    urls = {server.value: servers[server].url for server in {one.server for one in chosen}}
    command = [python, "-m", "tests.acceptance.run", client.value, json.dumps(urls)]
    command += [one.id for one in chosen]
    with subprocess.Popen(command, cwd=_ROOT, env=clean_environ(), stdout=subprocess.PIPE, text=True) as process:
        yield ScenarioRun(process)
        # Those who had results to wait for have them; the client would turn a milder signal into a long goodbye.
        process.kill()

"""Two Python clients, the published one and our own, in the same scenarios: every scenario is a test of each."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.acceptance.conftest import ScenarioRun
from tests.acceptance.scenario import Scenario, Server
from tests.acceptance.scenarios import all_scenarios
from tests.acceptance.served import Served


def _parameters() -> list[ParameterSet]:
    return [pytest.param(one, id=one.id) for one in all_scenarios()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", _parameters())
def test_published_python_client(one: Scenario, published_run: ScenarioRun) -> None:
    _check(published_run.result(one))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", _parameters())
def test_own_python_client(one: Scenario, own_run: ScenarioRun) -> None:
    _check(own_run.result(one))


def test_servers_logged_no_error(
    published_run: ScenarioRun, own_run: ScenarioRun, servers: dict[Server, Served]
) -> None:
    published_run.finish()
    own_run.finish()
    for server in servers.values():
        assert not server.errors()


def _check(result: dict[str, Any]) -> None:
    if result["error"]:
        pytest.fail(result["error"], pytrace=False)

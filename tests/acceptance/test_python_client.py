"""The Python client as it was published works against this server: every scenario is a test."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from tests.acceptance.conftest import ScenarioRun
from tests.acceptance.scenario import Scenario, Server
from tests.acceptance.scenarios import all_scenarios
from tests.acceptance.served import Served


def _parameters() -> list[ParameterSet]:
    return [
        pytest.param(
            one,
            id=one.id,
            # Strict, so that a route that is served one day takes its mark off.
            marks=[pytest.mark.xfail(strict=True, reason=f"not served: {one.not_served}")] if one.not_served else [],
        )
        for one in all_scenarios()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", _parameters())
def test_published_python_client(one: Scenario, scenario_run: ScenarioRun) -> None:
    result = scenario_run.result(one)
    if result["error"]:
        pytest.fail(result["error"], pytrace=False)


def test_servers_logged_no_error(scenario_run: ScenarioRun, servers: dict[Server, Served]) -> None:
    scenario_run.finish()
    for server in servers.values():
        assert not server.errors()

"""The JavaScript client as it was published works against this server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance import javascript_client as javascript
from tests.acceptance.scenario import Server
from tests.acceptance.served import Served

SCENARIOS = [
    "a_pushed_message_is_popped_and_acknowledged",
    "duplicates_and_empty_pushes_are_answered",
    "null_and_empty_payloads_survive",
    "a_waiting_pop_gets_a_later_message",
    "an_expired_lease_is_answered_with_success",
    "a_handler_consumes_in_order",
    "a_transaction_moves_a_message",
    "an_exhausted_message_is_a_dead_letter",
]


@pytest.fixture(scope="module")
def results(javascript_client: None, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What came of the scenarios; they run together, with the first of their tests."""
    # Asked for only now, so that no server is started for a client that cannot run.
    servers: dict[Server, Served] = request.getfixturevalue("servers")
    return javascript.run(servers[Server.MAIN].url, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_published_javascript_client(name: str, results: dict[str, dict[str, Any]]) -> None:
    if results[name]["error"]:
        pytest.fail(results[name]["error"], pytrace=False)

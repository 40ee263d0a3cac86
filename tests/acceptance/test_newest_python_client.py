"""The newest published client's own tests, from its source distribution, against this server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from tests.acceptance.client_environment import clean_environ, newest_client
from tests.acceptance.scenario import Server
from tests.acceptance.served import Served

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = 116
_FIXTURES: Final = Path(__file__).with_name("newest_fixtures.py")
_FORMS: Final = Path(__file__).with_name("newest_forms.py")

_REFUSED: Final = {
    "tests/test_ack_window.py::test_renew_of_a_released_lease_reports_failure": (
        "a lease that is lost is a 404, because clients of 0.15 take any 200 for a renewal; this one reports the"
        " failure all the same, but not `renewed: 0`"
    ),
}
_NEEDS_TOKENS: Final = {
    "test_producer_sub_stamped_from_jwt": "skips itself without a server that asks for tokens: see tests/http/auth",
    "test_producer_sub_spoofing_ignored_with_jwt": "the same",
}
_TIGHT: Final = {
    "tests/test_locks.py::test_an_expired_lock_is_taken_over_and_the_old_holder_commits_nothing": (
        "fails when one request takes a second; tests/broker/state/test_locks.py has the same without the clock"
    ),
    "tests/test_locks.py::test_a_guarded_step_survives_the_locks_own_renewal": "fails when renewals take two seconds",
}
"""Left to `make soak`, which has the machine to itself."""
_ADDED: Final = {
    "test_ack_commit": 5,
    "test_ack_window": 3,
    "test_kv": 18,
    "test_locks": 5,
    "test_timers": 10,
    "test_transaction_kv_timers": 6,
    "test_transaction_lease_fencing": 2,
}
"""Files about what came after 0.15, and how many tests each has; `tests.acceptance.scenarios` are about the rest."""


@pytest.mark.timeout(300)
def test_what_the_client_added_works_as_its_own_tests_say(servers: dict[Server, Served], tmp_path: Path) -> None:
    files = [f"tests/{name}.py" for name in _ADDED]
    tight = [f"--deselect={one}" for one in _TIGHT]
    passed = _run(servers[Server.MAIN], tmp_path, *files, *tight, "-n", "3", "--dist", "loadfile")
    assert len(passed) == sum(_ADDED.values()) - len(_REFUSED) - len(_TIGHT)


@pytest.mark.timeout(300)
def test_conflation_ephemeral_queues_and_binary_forms_work(servers: dict[Server, Served], tmp_path: Path) -> None:
    passed = _run(servers[Server.MAIN], tmp_path, "tests/test_forms.py")
    assert len(passed) == 18


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_of_the_clients_own_tests_pass(servers: dict[Server, Served], tmp_path: Path) -> None:
    options = ("--ignore=tests/test_forms.py", "-n", "4", "--dist", "loadfile")
    passed = _run(servers[Server.MAIN], tmp_path, "tests", *options)
    assert len(passed) == _TESTS - len(_REFUSED) - len(_NEEDS_TOKENS)


def _run(server: Served, directory: Path, *options: str) -> list[str]:
    """Run tests of the client, but those that are refused; the names of those that passed."""
    python, tests = newest_client(_ROOT / ".venv-newest-client")
    shutil.copytree(tests, directory / "tests")
    shutil.copy(_FIXTURES, directory / "conftest.py")
    shutil.copy(_FORMS, directory / "tests" / "test_forms.py")
    report = directory / "report.xml"
    deselected = [f"--deselect={one}" for one in _REFUSED]
    command = [str(python), "-m", "pytest", "-q", f"--junit-xml={report}", "-o", "asyncio_mode=auto"]
    # In the directory that runs share by default it would take the right to enter away from PostgreSQL's user.
    command.append(f"--basetemp={directory / 'basetemp'}")
    done = subprocess.run(
        [*command, *options, *deselected],
        cwd=directory,
        env=clean_environ() | {"QUEEN_SERVER_URL": server.url, "QUEEN_URL": server.url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert {case.get("name") for case in cases if case.find("skipped") is not None} <= {*_NEEDS_TOKENS}
    return [str(case.get("name")) for case in cases if case.find("skipped") is None]

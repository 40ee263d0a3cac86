"""The newest published client against this server: tests of ours, and in `make soak` those that it comes with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from tests.acceptance.client_environment import clean_environ, newest_client, newest_tests
from tests.acceptance.scenario import Server
from tests.acceptance.served import Served, served

_ROOT: Final = Path(__file__).parents[2]
_TESTS: Final = 116
_FIXTURES: Final = Path(__file__).with_name("newest_fixtures.py")
_FORMS_FILE: Final = Path(__file__).with_name("newest_forms.py")

REFUSED: Final = {
    "tests/test_ack_window.py::test_renew_of_a_released_lease_reports_failure": (
        "a lease that is lost is a 404, because clients of 0.15 take any 200 for a renewal; this one reports the"
        " failure all the same, but not `renewed: 0`"
    ),
}
_NEEDS_TOKENS: Final = {"test_producer_sub_stamped_from_jwt", "test_producer_sub_spoofing_ignored_with_jwt"}
"""They skip themselves without a secret to sign tokens with, and run against a server of their own."""
_TIGHT: Final = {
    "tests/test_locks.py::test_an_expired_lock_is_taken_over_and_the_old_holder_commits_nothing": (
        "fails when one request takes a second; tests/broker/state/test_locks.py has the same without the clock"
    ),
    "tests/test_locks.py::test_a_guarded_step_survives_the_locks_own_renewal": "fails when renewals take two seconds",
}
"""Left to `make soak`, which has the machine to itself."""
FORMS_PATH: Final = "tests/test_forms.py"
FORMS: Final = 18
"""Tests of ours with this client, in newest_forms.py."""
ADDED: Final = {
    "test_ack_commit": 5,
    "test_ack_window": 3,
    "test_kv": 18,
    "test_locks": 5,
    "test_timers": 10,
    "test_transaction_kv_timers": 6,
    "test_transaction_lease_fencing": 2,
}
"""Files about what came after 0.15, and how many tests each has; `tests.acceptance.scenarios` are about the rest."""


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_what_the_client_added_works_as_its_own_tests_say(servers: dict[Server, Served], tmp_path: Path) -> None:
    files = [f"tests/{name}.py" for name in ADDED]
    tight = [f"--deselect={one}" for one in _TIGHT]
    passed = run_its_tests(servers[Server.MAIN], tmp_path, *files, *tight, "-n", "3", "--dist", "loadfile")
    assert len(passed) == sum(ADDED.values()) - len(REFUSED) - len(_TIGHT)


@pytest.mark.timeout(300)
def test_conflation_ephemeral_queues_and_binary_forms_work(servers: dict[Server, Served], tmp_path: Path) -> None:
    passed = run_its_tests(servers[Server.MAIN], tmp_path, FORMS_PATH, "-p", "no:xdist")
    assert len(passed) == FORMS


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_of_the_clients_own_tests_pass(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    options = (f"--ignore={FORMS_PATH}", "-n", "4", "--dist", "loadfile")
    # Their queues and keys have the same names in every run, and some keys stay for minutes.
    with served(tmp_path / "server", QUEEN_ENCRYPTION_KEY="0123456789abcdef" * 4) as server:
        passed = run_its_tests(server, tmp_path, "tests", *options)
    assert len(passed) == _TESTS - len(REFUSED) - len(_NEEDS_TOKENS)


@pytest.mark.soak
def test_the_clients_tests_of_tokens_pass(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    secret = "0123456789abcdef" * 4
    with served(tmp_path / "server", JWT_ENABLED="true", JWT_SECRET=secret) as server:
        selected = " or ".join(_NEEDS_TOKENS)
        passed = run_its_tests(server, tmp_path, "tests/test_auth.py", "-k", selected, JWT_SECRET=secret)
    assert set(passed) == _NEEDS_TOKENS


def run_its_tests(server: Served, directory: Path, *options: str, **variables: str) -> list[str]:
    """Run tests of the client, but those that are refused; the names of those that passed, which are all."""
    cases, output = its_cases(server, directory, *options, **variables)
    assert cases and all(case.find("failure") is None and case.find("error") is None for case in cases), output
    assert {case.get("name") for case in cases if case.find("skipped") is not None} <= _NEEDS_TOKENS
    return [str(case.get("name")) for case in cases if case.find("skipped") is None]


def its_cases(
    server: Served, directory: Path, *options: str, **variables: str
) -> tuple[list[ElementTree.Element], str]:
    """Run tests of the client, but those that are refused: what came of each, and what was printed."""
    environment = _ROOT / ".venv-newest-client"
    if options[0] == FORMS_PATH:
        (directory / "tests").mkdir()
    else:
        shutil.copytree(newest_tests(environment), directory / "tests")
    shutil.copy(_FIXTURES, directory / "conftest.py")
    shutil.copy(_FORMS_FILE, directory / FORMS_PATH)
    report = directory / "report.xml"
    deselected = [f"--deselect={one}" for one in REFUSED]
    command = [str(newest_client(environment)), "-m", "pytest", "-q", "-o", "asyncio_mode=auto"]
    # In the directory that runs share by default it would take the right to enter away from PostgreSQL's user.
    command += [f"--junit-xml={report}", f"--basetemp={directory / 'basetemp'}"]
    done = subprocess.run(
        [*command, *options, *deselected],
        cwd=directory,
        env=clean_environ() | {"QUEEN_SERVER_URL": server.url, "QUEEN_URL": server.url} | variables,
        capture_output=True,
        text=True,
    )
    output = done.stdout[-20_000:] + done.stderr[-5000:]
    assert done.returncode in (0, 1), output
    return list(ElementTree.parse(report).iter("testcase")), output

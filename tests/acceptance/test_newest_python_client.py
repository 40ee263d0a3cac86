"""The newest published client's own tests, from its source distribution, against this server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection
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

_REFUSED: Final = {
    "test_renew_of_a_released_lease_reports_failure": "a lease that is lost is a 404, because clients of 0.15 take"
    " any 200 for a renewal; this one reports the failure all the same, but not `renewed: 0`",
}
_NEEDS_TOKENS: Final = {
    "test_producer_sub_stamped_from_jwt": "skips itself without a server that asks for tokens: see tests/http/auth",
    "test_producer_sub_spoofing_ignored_with_jwt": "the same",
}
_SLOW: Final = {
    "test_fetch_reads_every_record_by_offset": "3600 pushes of one message each",
    "test_changed_since_lists_the_written_partitions": "1100 pushes of one message each",
    "test_subscription_mode_new": "sleeps for 10 s",
    "test_subscription_mode_new_only": "sleeps for 10 s",
    "test_subscription_from_now": "sleeps for 10 s",
    "test_subscription_mode_server_default": "sleeps for 10 s",
    "test_dlq": "sleeps for 6 s",
}
"""Run by `make soak`; all others by `make test`."""


@pytest.mark.timeout(300)
def test_the_clients_own_tests_pass(servers: dict[Server, Served], tmp_path: Path) -> None:
    skipped = {*_REFUSED, *_SLOW}
    passed = _run(servers[Server.MAIN], tmp_path, "-n", "4", "--dist", "loadfile", without=skipped)
    assert len(passed) == _TESTS - len(skipped) - len(_NEEDS_TOKENS)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_clients_slow_tests_pass(servers: dict[Server, Served], tmp_path: Path) -> None:
    assert {*_run(servers[Server.MAIN], tmp_path, "-k", " or ".join(_SLOW), without=_REFUSED)} >= {*_SLOW}


def _run(server: Served, directory: Path, *options: str, without: Collection[str]) -> list[str]:
    """Run the client's tests but some; the names of those that passed."""
    python, tests = newest_client(_ROOT / ".venv-newest-client")
    shutil.copytree(tests, directory / "tests")
    shutil.copy(_FIXTURES, directory / "conftest.py")
    report = directory / "report.xml"
    deselected = [f"--deselect={one}" for one in _places(directory, without)]
    assert len(deselected) == len(without)
    command = [str(python), "-m", "pytest", "tests", "-q", f"--junit-xml={report}", "-o", "asyncio_mode=auto"]
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


def _places(directory: Path, names: Collection[str]) -> list[str]:
    """Where tests of these names are."""
    return [
        f"tests/{path.name}::{name}"
        for path in sorted((directory / "tests").glob("test_*.py"))
        for name in re.findall(r"^async def (test_\w+)\(", path.read_text(), re.MULTILINE)
        if name in names
    ]

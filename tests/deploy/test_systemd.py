"""The systemd units are valid and closed to what they do not need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, attempt, run, tool

UNITS = ("queen.service", "queen-proxy.service")


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy whose program exists, as systemd-analyze wants."""
    copy = tmp_path / str(request.param)
    copy.write_text((DEPLOY / "systemd" / request.param).read_text().replace("/opt/queen/bin/queen", "/bin/true"))
    return copy


def test_units_are_valid(unit: Path) -> None:
    done = attempt(tool("systemd-analyze"), "verify", unit)
    assert done.returncode == 0
    assert unit.name not in done.stderr, done.stderr


def test_units_are_hardened(unit: Path) -> None:
    shown = run(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", unit)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", shown)
    assert found is not None, shown
    assert float(found[1]) < 2.0, shown

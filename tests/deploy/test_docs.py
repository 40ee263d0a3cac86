"""Pages about running Queen name what exists: files, settings, metrics and alerts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from queen.settings import describe_settings
from tests.deploy.tools import DEPLOY, ROOT

DOCS: Final = ROOT / "docs"
PAGES: Final = (
    "deployment.md",
    "high-availability.md",
    "sizing.md",
    "backup.md",
    "upgrade.md",
    "troubleshooting.md",
    "alerts.md",
)
OF_OTHERS: Final = {"SIGHUP", "SIGINT", "SIGTERM", "LISTEN", "DATABASE_URLS", "GOOGLE_", "DROP", "CONF"}
"""Words in capitals that are no settings of the server."""


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (DOCS / str(request.param)).read_text()


def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (DOCS / file) if file else None
        assert path is None or path.exists(), target
        text = path.read_text() if path is not None and path.is_file() else page
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.split("\n")}
        assert not anchor or anchor in headings, target


def test_files_of_the_repository_exist(page: str) -> None:
    for name in re.findall(r"`((?:deploy|tests|bench)/[\w./*-]+)`", page):
        assert list(ROOT.glob(name.rstrip("/"))), name


def test_settings_exist(page: str) -> None:
    known = {setting.variable for setting in describe_settings()} | OF_OTHERS
    named = {name.removesuffix("_FILE") for name in re.findall(r"`([A-Z][A-Z0-9_]{3,})`", page)}
    assert named <= known


def test_errors_that_are_looked_up_are_those_that_are_printed() -> None:
    """Each begins a row, or is quoted in one; where it differs from case to case there are dots."""
    # Texts are joined as they are in the sources: several literals, with values between.
    source = "".join(path.read_text() for path in (ROOT / "src" / "queen").rglob("*.py"))
    source = re.sub(r'"\n\s*f?"', "", source)
    page = (DOCS / "troubleshooting.md").read_text()
    table = page.partition("| it says |")[2].partition("\n\n")[0].split("\n")[2:]
    said = [row.split(" | ")[0].lstrip("| ") for row in table] + re.findall(r'"([^"|`]{12,})"', page)
    # PostgreSQL's own words.
    said = [text for text in said if text not in ("could not look up effective user ID", "too many clients")]
    assert len(said) > 10
    for text in said:
        for part in re.split(r"…|\d+|NUM_WORKERS=x|(?:root|queen)\b|, and after a minute: | N\b| M\b", text):
            assert part.strip(" ,") in source, text


def test_alerts_exist(page: str) -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert set(re.findall(r"`(Queen[A-Z]\w+)`", page)) <= {rule["alert"] for rule in rules}


def test_metrics_exist(page: str) -> None:
    documented = Path(DOCS / "monitoring.md").read_text()
    for name in re.findall(r"`(queen_[a-z_]+)`", page):
        assert name in documented or name in ("queen_proxy",), name


def test_metrics_of_dashboards_and_alerts_are_documented() -> None:
    documented = (DOCS / "monitoring.md").read_text()
    # The table shortens families that begin alike: `queen_a_b`, `…_c`.
    families = set(re.findall(r"queen_[a-z_]+", documented))
    endings = tuple(re.findall(r"`…(_[a-z_]+)`", documented))
    files = [*(DEPLOY / "prometheus").glob("*.yml"), *(DEPLOY / "grafana" / "dashboards").glob("*.json")]
    for path in files:
        for name in re.findall(r"\bqueen_[a-z_]+", path.read_text()):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert family in families or name in families or name.endswith(endings), f"{path.name}: {name}"

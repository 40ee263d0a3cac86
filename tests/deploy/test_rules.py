"""Alerts and recording rules: promtool accepts them, every alert has a unit test and an entry in the runbook."""

from __future__ import annotations

from typing import Any, Final

import yaml

from tests.deploy.tools import DEPLOY, ROOT, run, tool

PROMETHEUS: Final = DEPLOY / "prometheus"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROMETHEUS / name).read_text())
    return loaded


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    run(tool("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")


def test_every_alert_fires_at_its_fault_and_stops_after_it() -> None:
    run(tool("promtool"), "test", "rules", PROMETHEUS / "alerts.test.yml")


def test_every_alert_is_among_the_unit_tests_firing_and_silent() -> None:
    expected: dict[str, set[bool]] = {}
    for test in load("alerts.test.yml")["tests"]:
        for case in test["alert_rule_test"]:
            expected.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert expected == {alert["alert"]: {True, False} for alert in alerts()}


def test_every_alert_has_a_severity_and_says_what_to_read() -> None:
    runbook = (ROOT / "docs" / "alerts.md").read_text()
    headings = {line.removeprefix("### ").lower() for line in runbook.splitlines() if line.startswith("### ")}
    for alert in alerts():
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        file, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert file == "docs/alerts.md"
        assert anchor == alert["alert"].lower()
        assert anchor in headings, f"docs/alerts.md has no entry for {alert['alert']}"
    assert headings == {alert["alert"].lower() for alert in alerts()}

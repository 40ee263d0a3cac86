"""Two minutes of the campaign: all kinds of load on one server, faults of all kinds from a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.report import shown
from tests.campaign.rounds import Plan, run_round


@pytest.mark.timeout(600)
async def test_nothing_is_lost_doubled_or_reordered_whatever_fails(tmp_path: Path) -> None:
    workloads = (
        "log",
        "dedup",
        "groups",
        "transactions",
        "dead-letters",
        "topics",
        "buffered",
        "websocket",
        "retention",
    )
    plan = Plan(seed=16, seconds=120, workloads=workloads, storms=False, pause=3.0, pace=4.0)
    totals, violations = await run_round(plan, tmp_path)
    assert not violations, f"{shown(violations)}\nagain: {plan.command}"
    # 28 on a quiet machine; a busy one takes longer over each.
    assert sum(totals.faults.values()) > 8, f"hardly anything was tried: {totals.faults}"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
async def test_a_synchronous_standby_takes_over_again_and_again(tmp_path: Path, seed: int) -> None:
    plan = Plan(seed=seed, seconds=120, workloads=("log", "topics", "transactions", "streams"), standby=True)
    totals, violations = await run_round(plan, tmp_path)
    assert not violations, f"{shown(violations)}\nagain: {plan.command}"
    assert totals.faults["failover"]

"""What a round may consist of, and the order in which it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.history import History, Violation
from tests.campaign.nemesis import Nemesis
from tests.campaign.rounds import WORKLOADS, Plan, carry_out, choose_workloads
from tests.campaign.site import Shape, Site
from tests.campaign.workload import Stage, Workload


class _SlowWriter(Workload):
    """Its last push is answered long after nothing more is to be produced."""

    name = "slow"
    written = False
    read = False

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.write()]

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.consume()]

    async def write(self) -> None:
        await self.stage.produced.wait()
        await asyncio.sleep(0.1)
        self.written = True

    async def consume(self) -> None:
        await self.stage.healed.wait()
        self.read = self.written

    async def check(self) -> list[Violation]:
        return []


def test_workloads_whose_queues_are_on_one_shard_are_not_run_on_several() -> None:
    with pytest.raises(ValueError, match="moves needs several shards, and the queues of transactions have to be on"):
        Plan(seed=1, seconds=0, workloads=("moves", "transactions"))
    for also in (None, "hosts", "spark", "stages"):
        for seed in range(100):
            chosen = choose_workloads(seed, list(WORKLOADS), also)
            assert Plan(seed=seed, seconds=0, workloads=chosen).shape.shards in (1, 2)
            assert also is None or also in chosen


async def test_consumers_may_end_only_after_the_last_push_was_answered(tmp_path: Path) -> None:
    site, history = Site(tmp_path, Shape(hosts=0)), History()
    workload = _SlowWriter(Stage(site, history, seed=1))
    plan = Plan(seed=1, seconds=0, workloads=(), storms=False)
    nemesis = Nemesis(site, history, plan.seed, ["redis-flush"], plan.pace, storms=plan.storms)
    assert await carry_out(plan, workload.stage, [workload], nemesis) == []
    assert workload.read

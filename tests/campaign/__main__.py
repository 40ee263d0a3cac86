"""Faults and checks for as long as one likes: `python -m tests.campaign --seconds 3600 --seed 1`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import pytest
import uvloop

from tests.campaign.faults import KINDS
from tests.campaign.report import Totals, shown
from tests.campaign.rounds import WORKLOADS, Plan, choose_workloads, run_round
from tests.campaign.workloads.spark import has_java
from tests.support.older_sources import older_sources


def main() -> int:
    options = _parser().parse_args()
    # Clients say of every failure that they try again.
    logging.disable(logging.ERROR)
    workloads = _names(options.workload, WORKLOADS, "workload")
    faults = _names(options.faults, KINDS, "fault")
    try:
        Plan(options.seed, options.seconds, workloads)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_campaign(options, workloads, faults))


async def _campaign(options: argparse.Namespace, workloads: list[str], faults: list[str]) -> int:
    begun = time.monotonic()
    totals = Totals()
    number = 0
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        older = older_sources(root)
    except pytest.skip.Exception as error:
        print(f"no updates from the version before: {error}")
        older = None
    if options.older and older is None:
        return 2
    while (left := options.seconds - (time.monotonic() - begun)) > 0 or number == 0:
        seed = options.seed + number
        number += 1
        # Of rounds of any kind, some have jumping clocks, a standby, the version before, Spark or two hosts.
        turn = number % 6 if not workloads else -1
        extra = {0: "hosts", 5: "spark" if has_java() else "stages"}.get(turn)
        chosen = choose_workloads(seed, list(WORKLOADS), extra)
        plan = Plan(
            seed=seed,
            seconds=min(options.round, max(left, 5.0)),
            workloads=tuple(workloads or chosen),
            faults=faults,
            pace=options.pace,
            storms=not options.no_storms,
            pause=options.pause,
            hosts=options.hosts,
            standby=options.standby or turn == 3,
            clocks=options.clocks or turn == 2,
            older=older if options.older or turn == 4 else None,
        )
        directory = root / f"round-{number}"
        result, violations = await run_round(plan, directory)
        totals.add(result)
        if options.save:
            totals.save(options.save)
        print(
            f"round {number}: seed {seed}, {', '.join(plan.workloads)}: {sum(result.faults.values())} faults, "
            f"{sum(result.calls.values())} calls, {len(violations)} violations",
            flush=True,
        )
        if violations:
            print(shown(violations), f"history: {directory}/history.jsonl", f"again: {plan.command}", sep="\n")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print("", totals.text(), sep="\n")
    if not totals.violations:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if totals.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on, in all")
    parser.add_argument("--seed", type=int, default=1, help="decides the faults, their moments and what clients do")
    parser.add_argument("--workload", default="", help=f"some of {', '.join(WORKLOADS)}; else four in each round")
    parser.add_argument("--faults", default="", help=f"some of {', '.join(KINDS)}; else all that are possible")
    parser.add_argument("--round", type=float, default=60.0, help="seconds of faults on one site, before it is checked")
    parser.add_argument("--no-storms", action="store_true", help="never harm everything at once")
    parser.add_argument("--pace", type=float, default=0.5, help="seconds between faults on one thing, on average")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between calls of a client, on average")
    parser.add_argument("--hosts", type=int, default=2, help="how many there are at least")
    parser.add_argument("--standby", action="store_true", help="with a synchronous standby, to which it fails over")
    parser.add_argument("--clocks", action="store_true", help="with hosts whose clocks jump; needs libfaketime")
    parser.add_argument("--older", action="store_true", help="two hosts of the version before, which are updated")
    parser.add_argument("--save", type=Path, help="a file for the totals, which python -m tests.campaign.report reads")
    return parser


def _names(text: str, known: Collection[str], what: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

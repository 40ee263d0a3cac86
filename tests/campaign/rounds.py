"""One round: a site, some workloads on it, faults for a while, and then the truth."""

from __future__ import annotations

import asyncio
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.campaign.client import status_of
from tests.campaign.faults import possible_kinds
from tests.campaign.history import Call, History, Violation
from tests.campaign.nemesis import Nemesis
from tests.campaign.report import Totals
from tests.campaign.site import Shape, Site, running
from tests.campaign.workload import Stage, Workload
from tests.campaign.workloads.dead_letters import DeadLettersWorkload
from tests.campaign.workloads.groups import GroupsWorkload
from tests.campaign.workloads.log import (
    DedupWorkload,
    HostsWorkload,
    LogWorkload,
    MovesWorkload,
    RetentionWorkload,
    SpoolWorkload,
)
from tests.campaign.workloads.spark import SparkWorkload
from tests.campaign.workloads.stages import StagesWorkload
from tests.campaign.workloads.streams import StreamsWorkload
from tests.campaign.workloads.topics import BufferedWorkload, TopicsWorkload
from tests.campaign.workloads.transactions import TransactionsWorkload
from tests.campaign.workloads.websocket import WebSocketWorkload

WORKLOADS: dict[str, type[Workload]] = {
    one.name: one
    for one in (
        LogWorkload,
        DedupWorkload,
        GroupsWorkload,
        TransactionsWorkload,
        DeadLettersWorkload,
        TopicsWorkload,
        BufferedWorkload,
        StreamsWorkload,
        StagesWorkload,
        SparkWorkload,
        SpoolWorkload,
        RetentionWorkload,
        MovesWorkload,
        WebSocketWorkload,
        HostsWorkload,
    )
}
_SPOOL_SECONDS = 120.0
_TOPIC_ITEMS = re.compile(r"^queen_topic_buffer_items(?:{.*})? (\S+)$", re.MULTILINE)
_DRAIN_SECONDS = 420.0
_BROKEN_OFF = "a client of the campaign failed"


@dataclass(frozen=True)
class Plan:
    """What a round does; the same plan has the same faults at the same moments."""

    seed: int
    seconds: float
    workloads: Sequence[str]
    faults: Sequence[str] = ()
    """Kinds of faults; all that are possible when none are named."""
    pace: float = 0.5
    """Seconds between faults on one thing, on average."""
    storms: bool = True
    """Whether everything is harmed at once now and then."""
    pause: float = 0.05
    """Seconds between the calls of a client, on average."""
    hosts: int = 1
    """How many there are at least; some workloads need more."""
    standby: bool = False
    small_disks: bool = True
    clocks: bool = False
    older: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        whole = [name for name in self.workloads if WORKLOADS[name].one_shard]
        spread = [name for name in self.workloads if WORKLOADS[name].shards > 1]
        if whole and spread:
            raise ValueError(
                f"{', '.join(spread)} needs several shards, and the queues of {', '.join(whole)} have to be on one:"
                " run them in rounds of their own"
            )

    @property
    def shape(self) -> Shape:
        kinds = [WORKLOADS[name] for name in self.workloads]
        return Shape(
            hosts=max([2 if self.older else self.hosts, *(kind.hosts for kind in kinds)]),
            shards=max(kind.shards for kind in kinds),
            standby=self.standby,
            clocks=self.clocks,
            small_disks=self.small_disks,
            older=self.older,
        )

    @property
    def command(self) -> str:
        options = [f"--seed {self.seed} --seconds {self.seconds:g} --workload {','.join(self.workloads)}"]
        if self.faults:
            options.append(f"--faults {','.join(self.faults)}")
        options.append(f"--pace {self.pace:g} --pause {self.pause:g} --round {self.seconds:g}")
        options.append(f"--hosts {self.hosts}")
        options += (
            ["--no-storms"] * (not self.storms)
            + ["--standby"] * self.standby
            + ["--clocks"] * self.clocks
            + ["--older"] * (self.older is not None)
        )
        return f"python -m tests.campaign {' '.join(options)}"


def choose_workloads(seed: int, wanted: Sequence[str], also: str | None = None) -> tuple[str, ...]:
    """Some of the workloads, for one round of many, and one more that is given. Spark is left to rounds of its own: it
    takes long to start."""
    wanted = [name for name in wanted if name != SparkWorkload.name]
    chance = random.Random(seed)
    may_have_shards = also is None or not WORKLOADS[also].one_shard
    if chance.random() < 0.3 and may_have_shards:
        fitting = [name for name in wanted if not WORKLOADS[name].one_shard]
    else:
        fitting = [name for name in wanted if WORKLOADS[name].shards == 1]
    fitting = fitting or list(wanted)
    chosen = chance.sample(fitting, min(len(fitting), 4))
    return tuple(sorted({*chosen, also} if also else chosen))


async def run_round(plan: Plan, directory: Path) -> tuple[Totals, list[Violation]]:
    """Run a plan; what was recorded is left in `directory` when something is wrong."""
    history = History()
    async with running(directory, plan.shape) as site:
        stage = Stage(site, history, plan.seed, plan.pause)
        workloads = [WORKLOADS[name](stage) for name in plan.workloads]
        for workload in workloads:
            await workload.prepare()
        kinds = possible_kinds(site, plan.faults)
        nemesis = Nemesis(site, history, plan.seed, kinds, plan.pace, storms=plan.storms)
        found = await carry_out(plan, stage, workloads, nemesis)
        for workload in workloads:
            # Of a round that was broken off in the middle of a fault there is no final state.
            found += await workload.check() if not any(one.kind == _BROKEN_OFF for one in found) else []
            await workload.close()
        tracebacks = traceback_lines(site)
        found += [*nemesis.violations, *odd_answers(history.calls)]
        found += [Violation("site", "traceback", text) for text in tracebacks]
        totals = Totals(
            1,
            Counter(nemesis.inflicted),
            Counter(nemesis.in_storms),
            history.outcomes(),
            Counter(plan.workloads),
            nemesis.recoveries,
            [f"{one.workload}: {one.kind}: {one.text}" for one in found],
            sum(1 for call in history.calls if (status_of(call) or 0) >= 500 and status_of(call) != 503),
            len(tracebacks),
        )
    if found:
        history.save(directory / "history.jsonl")
    return totals, found


async def carry_out(plan: Plan, stage: Stage, workloads: Sequence[Workload], nemesis: Nemesis) -> list[Violation]:
    writers, clients = [], []
    for workload in workloads:
        writers += _started(f"writer of {workload.name}", workload.writers())
        clients += _started(f"client of {workload.name}", workload.clients())
    clients += writers
    try:
        await _beside(clients, nemesis.run(plan.seconds))
        stage.produced.set()
        # A last push may take longer than consumers wait for more, and go to the spool.
        await _beside(clients, _until_ended(writers))
        await _beside(clients, _until_drained(stage.site))
        stage.healed.set()
        done, late = await asyncio.wait(clients, timeout=_DRAIN_SECONDS)
        for task in done:
            task.result()
        names = sorted(task.get_name() for task in late)
        return (
            [Violation("site", "not drained", f"after {_DRAIN_SECONDS:.0f} s these still had work: {names}")]
            if late
            else []
        )
    except TimeoutError as error:
        return [Violation("site", "not drained", str(error))]
    except Exception:
        # A long campaign goes on with the next round.
        return [Violation("site", _BROKEN_OFF, traceback.format_exc())]
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def _started(name: str, clients: Sequence[Coroutine[Any, Any, None]]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(client, name=f"{name} {number}") for number, client in enumerate(clients)]


async def _beside(clients: Sequence[asyncio.Task[None]], coroutine: Coroutine[Any, Any, None]) -> None:
    """Run something while the clients run; a client that fails ends it."""
    main = asyncio.create_task(coroutine)
    watched = set(clients)
    while not main.done():
        done, _ = await asyncio.wait({main, *watched}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {main}:
            watched.discard(task)
            if task.exception() is not None:
                main.cancel()
                await asyncio.gather(main, return_exceptions=True)
                task.result()
    await main


async def _until_ended(writers: Sequence[asyncio.Task[None]]) -> None:
    if not writers:
        return
    _, late = await asyncio.wait(writers, timeout=_SPOOL_SECONDS)
    if late:
        names = sorted(task.get_name() for task in late)
        raise TimeoutError(f"{_SPOOL_SECONDS:.0f} s after the last fault these still write: {names}")


async def _until_drained(site: Site) -> None:
    """Until nothing waits in a spool of a host, of queues and of topics."""
    give_up = time.monotonic() + _SPOOL_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for host in site.hosts:
            while True:
                waiting: object = "no answer"
                try:
                    async with session.get(f"{host.url}/api/v1/status/buffers") as answer:
                        body = await answer.json()
                    # The log of topics may rest for a while after PostgreSQL has failed it.
                    async with session.get(f"{host.url}/metrics/prometheus") as answer:
                        items = sum(float(found) for found in _TOPIC_ITEMS.findall(await answer.text()))
                    waiting = body["pending"] + body["failed"] + items if body["dbHealthy"] else "database unavailable"
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    pass
                if waiting == 0:
                    break
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{host.url} still has a spool after {_SPOOL_SECONDS:.0f} s: {waiting}")
                await asyncio.sleep(0.1)


def odd_answers(calls: Sequence[Call]) -> list[Violation]:
    """Answers that no fault excuses: 5xx other than 503, and refusals of what was right."""
    found = []
    for call in calls:
        status = status_of(call)
        if status is not None and status not in (429, 503):
            found.append(Violation(call.client.partition("/")[0], f"status {status}", call.error[:300], (call,)))
    return found


def traceback_lines(site: Site) -> list[str]:
    """Every traceback in the logs of the hosts, by its last line, and every error that nobody was told of."""
    found: list[str] = []
    inside = False
    for line in site.log_lines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif "exception was never retrieved" in line:
            found.append(line)
        elif inside and line and not line[0].isspace():
            inside = False
            found.append(line)
    return found

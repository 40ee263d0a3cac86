"""What the settings and the shape of requests do to throughput: one after the other is changed, the rest stays.

    python -m bench.tuning [--seconds 3] [--rounds 3] [--only NUM_WORKERS,connections] [--picture curves.png]

Each value has a fresh server with an empty PostgreSQL. Rounds go through all values, so that a noisy minute hits no
value alone; shown are medians. Client, server and PostgreSQL share the machine: read the curves, not the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.plot import pyplot
from bench.runner import Session
from bench.settings import Settings
from bench.target import fresh_server
from bench.workloads import all_workloads, chosen

Point = tuple[str, str]
"""A value, and the workload that it was measured with."""


@dataclass(frozen=True)
class Sweep:
    """What is changed, to which values, and the workloads that show it."""

    name: str
    values: tuple[int, ...]
    workloads: tuple[str, ...]


SWEEPS = (
    Sweep("messages per push", (1, 10, 100, 1000), ()),
    Sweep("messages per pop", (1, 100, 1000), ()),
    Sweep("connections", (1, 4, 16, 64, 256), ("push1", "push100")),
    Sweep("partitions", (1, 16, 256, 4096), ("push100", "pop100")),
    Sweep("NUM_WORKERS", (1, 2, 3, 4), ("push1", "push100", "pop-ack")),
    Sweep("DB_POOL_SIZE", (1, 2, 5, 10, 20), ("push100", "pop-ack")),
    Sweep("SEGMENT_CACHE_MB", (1, 4, 12, 48), ("pop100", "pop-ack")),
    Sweep("DEDUP_MEMORY_MB", (4, 16, 64, 256), ("push1", "push100")),
)


@dataclass(frozen=True)
class Result:
    """Messages per second, and microseconds of CPU (server and PostgreSQL) for each."""

    rate: float
    cpu: float


async def measure(sweep: Sweep, value: int, seconds: float) -> dict[str, Result]:
    """By workload."""
    settings, variables, names = Settings(seconds=seconds), {}, sweep.workloads
    if sweep.name == "connections":
        settings = replace(settings, connections=value)
    elif sweep.name == "partitions":
        settings = replace(settings, partitions=value)
    elif sweep.name == "NUM_WORKERS":
        settings = replace(settings, workers=value)
    elif sweep.name == "messages per push":
        names = (f"push{value}",)
    elif sweep.name == "messages per pop":
        names = (f"pop{value}",)
    else:
        variables = {sweep.name: str(value)}
    found = {}
    async with fresh_server(settings.workers, variables) as target:
        session = Session(settings, target, 0, lambda text: None)
        for workload in chosen(all_workloads(settings), names):
            measured = await session.run(workload)
            if measured is None or measured.errors:
                raise SystemExit(f"{sweep.name}={value}, {workload.name}: {measured and measured.first_error}")
            metrics = measured.metrics
            name = workload.name if sweep.workloads else workload.name.rstrip("0123456789")
            found[name] = Result(metrics["messages_per_s"], metrics["server_us"] + metrics["postgres_us"])
    return found


async def run(sweeps: list[Sweep], rounds: int, seconds: float) -> dict[str, dict[str, dict[int, Result]]]:
    """By sweep, workload and value: the median of the rounds."""
    every: dict[str, dict[str, dict[int, list[Result]]]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=rounds * sum(len(sweep.values) for sweep in sweeps))
        for _ in range(rounds):
            for sweep in sweeps:
                for value in sweep.values:
                    for workload, result in (await measure(sweep, value, seconds)).items():
                        of_workload = every.setdefault(sweep.name, {}).setdefault(workload, {})
                        of_workload.setdefault(value, []).append(result)
                    progress.advance(task)
    return {
        sweep: {workload: {value: median(results) for value, results in by.items()} for workload, by in found.items()}
        for sweep, found in every.items()
    }


def median(results: list[Result]) -> Result:
    return Result(statistics.median(one.rate for one in results), statistics.median(one.cpu for one in results))


def tables(found: dict[str, dict[str, dict[int, Result]]]) -> Iterator[Table]:
    for sweep, workloads in found.items():
        table = Table(sweep, *(f"{workload}: messages/s, CPU" for workload in workloads))
        for value in next(iter(workloads.values())):
            shown = [f"{by[value].rate:,.0f}  {by[value].cpu:.0f} us" for by in workloads.values()]
            table.add_row(str(value), *shown)
        yield table


def draw(found: dict[str, dict[str, dict[int, Result]]], picture: Path) -> None:
    """A small chart for each sweep: throughput relative to the best value, so that shapes can be compared."""
    plots = pyplot()
    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = plots.subplots(rows, columns, figsize=(13, 3.1 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, (sweep, workloads) in zip(axes.flat, found.items(), strict=False):
        for workload, by in workloads.items():
            best = max(result.rate for result in by.values())
            places = range(len(by))
            axis.plot(places, [result.rate / best for result in by.values()], marker="o", label=workload)
            axis.set_xticks(list(places), [str(value) for value in by])
        axis.set_ylim(0, 1.05)
        axis.set_title(sweep, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.supylabel("throughput, best value = 1", fontsize=9)
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="what to change, separated by commas; everything by default")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn (needs matplotlib)")
    given = parser.parse_args()
    wanted = [name.strip() for name in given.only.split(",") if name.strip()]
    unknown = sorted(set(wanted) - {sweep.name for sweep in SWEEPS})
    if unknown:
        parser.error(f"--only: no {', '.join(unknown)}; there are: {', '.join(sweep.name for sweep in SWEEPS)}")
    sweeps = [sweep for sweep in SWEEPS if not wanted or sweep.name in wanted]
    found = asyncio.run(run(sweeps, given.rounds, given.seconds))
    for table in tables(found):
        Console().print(table)
    if given.picture is not None:
        draw(found, given.picture)


if __name__ == "__main__":
    main()

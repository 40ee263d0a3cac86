"""The command line of a benchmark run."""

import asyncio
import os
import platform
import signal
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from bench.bars import judge
from bench.generator import HERE, LoadError, sample_messages
from bench.report import Environment, Judged, Report, add_derived, summarize
from bench.runner import Run
from bench.settings import Settings
from bench.tables import show
from bench.target import ServerError
from bench.workloads import Workload, all_workloads, chosen

RESULTS = HERE / "results"

HELP = """Measures a Queen server: throughput, latency, CPU, memory, bytes on disk.

Starts `queen serve` on a fresh embedded PostgreSQL (fsync on) for every group of workloads, drives it with a
compiled load generator on the same machine, repeats, and prints medians. Each number that has a bar is marked
pass or FAIL. Everything is also written to bench/results/<time>.json; `python bench/plot.py` draws it.

\b
Examples
  python bench/run.py                            everything, about 35 minutes
  python bench/run.py --quick                    everything, short and once: does it work at all?
  python bench/run.py --only push100,pop-ack     two workloads
  python bench/run.py --only push --repeat 5     a group of workloads that are compared
  python bench/run.py --only mixed --mixed-seconds 60 --mixed-rate 80000
  python bench/run.py --against http://127.0.0.1:6632 --only push100

\b
Groups and their workloads
  push        push1 push10 push100 push1000, and limit1 ... limit1000: a bare asyncpg loop
  pop         pop1 pop100 pop1000 with autoAck; pop-ack: pop 100 + batch ack, 16 connections
  partitions  push100-p1 -p100 -p10000 and pop100-p1 -p100 -p10000
  groups      pop100-g1 pop100-g10: consumer groups
  latency     latency-push latency-pop latency-ack on one connection, against commit: one
              bare commit; park, park-idle: push to delivery at a waiting pop
  storage     bytes on disk per message
  mixed       push and pop + ack at once, paced; does the backlog grow?

The machine must be quiet: the last number of the column CPU is what other processes took. Exit code: 0
measured, 1 the server answered with errors or before data were on disk, 2 the run could not be done.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP, context_settings={"max_content_width": 110})
def run(
    only: Annotated[str, typer.Option(help="Workloads or groups, separated by commas. Default: all.")] = "",
    repeat: Annotated[int, typer.Option(help="Repetitions; medians are shown.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Measured time of each workload.", min=0.5)] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="2 seconds each, once; mixed for 15.")] = False,
    mixed_seconds: Annotated[float, typer.Option(help="Length of the push-and-pop workload.")] = 300.0,
    mixed_rate: Annotated[float, typer.Option(help="Its pace, messages per second; 0: none.")] = 55_000.0,
    connections: Annotated[int, typer.Option(help="Connections of the load generator.", min=1)] = 64,
    partitions: Annotated[int, typer.Option(help="Partitions where a workload names none.", min=1)] = 16,
    workers: Annotated[int, typer.Option(help="Worker processes of the server.", min=1)] = 2,
    against: Annotated[str | None, typer.Option(help="URL of a running server to measure instead.")] = None,
    dsn: Annotated[str | None, typer.Option(help="With --against: the DSN of its database.")] = None,
    server_pid: Annotated[int | None, typer.Option(help="With --against: its process id, for CPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, no tables.")] = False,
) -> None:
    settings = Settings(
        only=tuple(name for name in only.split(",") if name),
        repeat=1 if quick else repeat,
        seconds=2.0 if quick else seconds,
        mixed_seconds=15.0 if quick else mixed_seconds,
        mixed_rate=mixed_rate,
        park_idle_seconds=8.0 if quick else 30.0,
        connections=connections,
        partitions=partitions,
        workers=workers,
        against=against,
        dsn=dsn,
        server_pid=server_pid,
    )
    progress = Console(stderr=True, highlight=False)
    try:
        workloads = chosen(all_workloads(settings), settings.only)
        report = asyncio.run(measure_until_stopped(settings, workloads, progress))
    except asyncio.CancelledError as error:
        progress.print("bench: stopped", style="red")
        raise typer.Exit(2) from error
    except (LoadError, ServerError, ValueError, LookupError) as error:
        progress.print(f"bench: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    path = write(report)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        # A file or a pipe has no width of its own, and the table must not be folded there.
        show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    progress.print(f"written to {path}", markup=False, soft_wrap=True)
    if not report.environment.durable or any(summary.errors for summary in report.summaries):
        raise typer.Exit(1)


async def measure_until_stopped(settings: Settings, workloads: list[Workload], progress: Console) -> Report:
    """Ctrl-C and SIGTERM both end in cancellation, which stops the server and its PostgreSQL."""
    measuring = asyncio.ensure_future(measure(settings, workloads, progress))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, measuring.cancel)
    return await measuring


async def measure(settings: Settings, workloads: list[Workload], progress: Console) -> Report:
    environment = describe(settings)
    run = Run(settings, lambda text: progress.print(text, markup=False, soft_wrap=True))
    await run.all(workloads)
    environment.postgres, environment.durable, environment.warnings = run.postgres, run.durable, run.warnings
    add_derived(run.measurements)
    summaries = summarize(run.measurements)
    bars = [
        Judged(verdict.bar.title, verdict.bar.wanted, verdict.bar.peer, verdict.value, verdict.passed)
        for verdict in judge(summaries)
    ]
    return Report(environment, list(summaries.values()), bars, run.measurements)


def describe(settings: Settings) -> Environment:
    payloads = [bytes(message.payload) for message in sample_messages(10_000)]
    together = b"".join(payloads[:100])
    return Environment(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=processor_name(),
        cores=os.cpu_count() or 0,
        python=platform.python_version(),
        workers=settings.workers,
        seconds=settings.seconds,
        partitions=settings.partitions,
        load_average=os.getloadavg()[0],
        postgres={},
        payload_bytes=sum(map(len, payloads)) / len(payloads),
        payload_compression=len(together) / len(zlib.compress(together)),
    )


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write(report: Report) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return path

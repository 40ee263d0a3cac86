"""Compares Python clients: messages per second of their own CPU, ours against the one published as queen-mq 0.15.

    python bench/client.py                    both clients, 5 rounds in turn, on a server of its own
    python bench/client.py --rounds 3 --messages 20000

Both run the same program (`bench/client_work.py`), each in its own interpreter, against the same server. A producer
pushes one message at a time through a buffer of 500; a consumer takes batches of 100 and acknowledges them. CPU is the
user and system time of the client's process between the first and the last message.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    # Started as a file, Python looks beside this file and not in the project: the package is one level up.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.acceptance.client_environment import clean_environ, client_python
from tests.acceptance.served import served

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {"consume": "consumer, batches of 100 acked", "produce": "producer, buffered"}
WANTED = 3.0

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Rate:
    """What one client did in one round."""

    messages: int
    cpu_seconds: float
    seconds: float

    @property
    def per_cpu_second(self) -> float:
        return self.messages / self.cpu_seconds


@app.command(help=__doc__)
def run(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    messages: Annotated[int, typer.Option(min=1000)] = 50_000,
    against: Annotated[str | None, typer.Option(help="URL of a running server.")] = None,
) -> None:
    pythons = {"queen-mq 0.15": str(client_python(ROOT / ".venv-client")), "ours": sys.executable}
    if against is not None:
        rates = measure(against, pythons, rounds, messages)
    else:
        with tempfile.TemporaryDirectory() as directory, served(Path(directory)) as server:
            rates = measure(server.url, pythons, rounds, messages)
    if not show(rates):
        raise typer.Exit(1)


def measure(url: str, pythons: dict[str, str], rounds: int, messages: int) -> dict[tuple[str, str], list[Rate]]:
    """The rates of each workload and client, a round after the other so that both see the same machine."""
    rates: dict[tuple[str, str], list[Rate]] = {}
    for number in range(-1, rounds):
        for client, python in pythons.items():
            for workload in WORKLOADS:
                queue = f"bench-{workload}-{client.replace(' ', '-')}-{number}"
                # The first round warms the server up, and counts for nothing.
                count = messages if number >= 0 else 2000
                rate = work(python, url, workload, queue, count)
                if number >= 0:
                    rates.setdefault((workload, client), []).append(rate)
    return rates


def work(python: str, url: str, workload: str, queue: str, messages: int) -> Rate:
    command = [python, "-m", "bench.client_work", workload, url, queue, str(messages)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return Rate(**json.loads(done.stdout.splitlines()[-1]))


def show(rates: dict[tuple[str, str], list[Rate]]) -> bool:
    """Print a table; whether every ratio is as wanted."""
    table = Table("workload", "client", "msg per CPU second", "spread", "µs per msg", "msg/s", "ratio", "wanted")
    passed = True
    for workload, title in WORKLOADS.items():
        base = 0.0
        for (kind, client), values in rates.items():
            if kind != workload:
                continue
            each = sorted(rate.per_cpu_second for rate in values)
            middle = median(each)
            spread = f"{each[0]:,.0f} … {each[-1]:,.0f}"
            speed = median(rate.messages / rate.seconds for rate in values)
            ratio, verdict = "", ""
            if base:
                pairs = zip(rates[workload, "queen-mq 0.15"], values, strict=True)
                ratios = sorted(ours.per_cpu_second / theirs.per_cpu_second for theirs, ours in pairs)
                ratio = f"{middle / base:.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
                passed = passed and middle / base >= WANTED
                verdict = f"≥ {WANTED:g} " + ("pass" if middle / base >= WANTED else "FAIL")
            base = base or middle
            table.add_row(
                title, client, f"{middle:,.0f}", spread, f"{1e6 / middle:.2f}", f"{speed:,.0f}", ratio, verdict
            )
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    return passed


if __name__ == "__main__":
    app()

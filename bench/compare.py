"""This code beside that of another commit, in turns on one machine: throughput, and CPU time for each message.

    python -m bench.compare 8b34197 [--only push100,pop-ack] [--rounds 5] [--seconds 5]

Both are measured by their own bench/run.py, each with a server and a PostgreSQL of its own, and change places from
round to round. Shown is new over old, the median of the rounds and their spread: for messages per second more is
better, for CPU (server and PostgreSQL together) less. Noise moves the second least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]


class Figure(msgspec.Struct):
    median: float


class Summary(msgspec.Struct):
    workload: str
    metrics: dict[str, Figure]

    @property
    def rate(self) -> float:
        return self.metrics["messages_per_s"].median

    @property
    def cpu(self) -> float:
        return self.metrics["server_us"].median + self.metrics["postgres_us"].median


class Report(msgspec.Struct):
    summaries: list[Summary]


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit, in a directory of their own."""
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def measure(tree: Path, only: str, seconds: float) -> dict[str, Summary]:
    done = subprocess.run(
        [sys.executable, "bench/run.py", "--only", only, "--repeat", "1", "--seconds", str(seconds), "--json"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        capture_output=True,
        check=False,
    )
    if not done.stdout:
        sys.exit(f"{tree}: {done.stderr.decode()}")
    report = msgspec.json.decode(done.stdout, type=Report)
    return {one.workload: one for one in report.summaries if {"messages_per_s", "server_us"} <= one.metrics.keys()}


def show(ratios: dict[str, list[tuple[float, float]]]) -> None:
    table = Table("workload", "messages/s, new : old", "CPU, new : old")
    for workload, pairs in sorted(ratios.items()):
        table.add_row(workload, *(_spread([pair[index] for pair in pairs]) for index in (0, 1)))
    Console().print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what this code is compared with")
    parser.add_argument("--only", default="push1,push100,pop100,pop-ack", help="workloads of bench/run.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args()
    ratios: dict[str, list[tuple[float, float]]] = {}
    with checked_out(chosen.commit) as before:
        for number in track(range(chosen.rounds), "measuring", console=Console(stderr=True)):
            trees = [before, ROOT] if number % 2 else [ROOT, before]
            found = {tree: measure(tree, chosen.only, chosen.seconds) for tree in trees}
            for workload in found[ROOT].keys() & found[before].keys():
                new, old = found[ROOT][workload], found[before][workload]
                ratios.setdefault(workload, []).append((new.rate / old.rate, new.cpu / old.cpu))
    show(ratios)


if __name__ == "__main__":
    main()

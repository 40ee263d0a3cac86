"""CPU seconds of tests and of all they start: `python -m pytest -p tests.support.cpu_times`, then `python -m` this."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_FILE: Final = Path(os.environ.get("CPU_TIMES", "/tmp/queen-cpu-times.tsv"))
_TICK: Final = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER: Final = 36
_last = 0.0


def pytest_configure(config: pytest.Config) -> None:
    # PostgreSQL leaves the process that started it: it must stay among our descendants to be counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        _FILE.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    global _last
    _last = _used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _measured(item, "setup")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _measured(item, "call")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _measured(item, "teardown")


def _measured(item: pytest.Item, phase: str) -> Iterator[None]:
    # To look takes time as well: once a phase, as nothing happens between two of them.
    global _last
    try:
        return (yield)
    finally:
        now = _used()
        with _FILE.open("a") as file:
            file.write(f"{item.nodeid}\t{phase}\t{now - _last:.3f}\n")
        _last = now


def _used() -> float:
    """CPU seconds of this process and its descendants, with those that they have waited for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) / _TICK
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return sum(seconds[pid] for pid in found)


def main(depth: int = 2) -> None:
    """Print the sums by directory or module."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tests: dict[str, set[str]] = defaultdict(set)
    for line in _FILE.read_text().splitlines():
        nodeid, phase, seconds = line.rsplit("\t", 2)
        area = "/".join(nodeid.split("::")[0].split("/")[:depth])
        for name in (area, "all"):
            sums[name][phase] += float(seconds)
            tests[name].add(nodeid)
    print(f"{'area':60} {'tests':>6} {'setup':>7} {'call':>7} {'end':>7} {'all':>7}")
    for area, phases in sorted(sums.items(), key=lambda pair: -sum(pair[1].values())):
        shown = " ".join(f"{phases[phase]:7.1f}" for phase in ("setup", "call", "teardown"))
        print(f"{area:60} {len(tests[area]):6} {shown} {sum(phases.values()):7.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)

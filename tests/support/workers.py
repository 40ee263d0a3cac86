"""The worker processes of a server that runs."""

from __future__ import annotations

import psutil


def worker_processes(supervisor: int) -> list[psutil.Process]:
    """The workers that run, in the order in which they were started."""
    found = []
    for process in psutil.Process(supervisor).children(recursive=True):
        try:
            if process.name().startswith("queen worker "):
                found.append((process.create_time(), process.pid, process))
        except psutil.NoSuchProcess:
            continue
    return [process for *_, process in sorted(found, key=lambda one: one[:2])]


def worker_number(worker: psutil.Process) -> int:
    """Which of the server's workers it is, counted from 0."""
    return int(worker.name().removeprefix("queen worker "))

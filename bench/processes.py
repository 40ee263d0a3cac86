"""CPU time and memory of the processes under test, read from /proc."""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
MEMORY_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class Process:
    """A row of /proc/<pid>/stat: CPU seconds include those of children that have ended."""

    pid: int
    parent: int
    cpu_seconds: float


@dataclass(frozen=True)
class CpuUsed:
    """CPU seconds since the machine started, or between two readings."""

    server: float
    postgres: float
    machine: float

    def since(self, before: "CpuUsed") -> "CpuUsed":
        return CpuUsed(
            server=self.server - before.server,
            postgres=self.postgres - before.postgres,
            machine=self.machine - before.machine,
        )


@dataclass(frozen=True)
class Watched:
    """The process trees to account for. An embedded PostgreSQL may be a child of the server."""

    server: int | None
    postmasters: tuple[int, ...]

    def cpu(self) -> CpuUsed:
        processes = read_processes()
        server, postgres = self._split(processes)
        return CpuUsed(
            server=sum(processes[pid].cpu_seconds for pid in server),
            postgres=sum(processes[pid].cpu_seconds for pid in postgres),
            machine=machine_cpu_seconds(),
        )

    def server_memory_bytes(self) -> int:
        """Proportional set size of the server's processes together: shared pages count once."""
        server, _ = self._split(read_processes())
        return sum(memory_bytes(pid) for pid in server)

    def _split(self, processes: dict[int, Process]) -> tuple[set[int], set[int]]:
        postgres: set[int] = set().union(*(descendants(processes, pid) for pid in self.postmasters))
        return descendants(processes, self.server) - postgres, postgres


class Usage:
    """CPU between `start` and `stop`, and the memory peak seen meanwhile."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._before: CpuUsed | None = None
        self.cpu: CpuUsed | None = None
        self.peak_memory_bytes = 0

    def start(self) -> None:
        self._before = self._watched.cpu()

    def stop(self) -> None:
        if self._before is not None:
            self.cpu = self._watched.cpu().since(self._before)

    async def watch_memory(self) -> None:
        """Samples until cancelled."""
        while self._watched.server is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes, self._watched.server_memory_bytes())
            await asyncio.sleep(MEMORY_INTERVAL_SECONDS)


def read_processes() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended between the listing and the reading
            # The command name may hold spaces and brackets: the fields start after the last bracket.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            ticks = sum(int(field) for field in fields[11:15])
            found[int(entry.name)] = Process(int(entry.name), int(fields[1]), ticks / TICKS_PER_SECOND)
    return found


def descendants(processes: dict[int, Process], root: int | None) -> set[int]:
    if root is None or root not in processes:
        return set()
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    pending = [root]
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending += children.get(pid, [])
    return found


def memory_bytes(pid: int) -> int:
    """Proportional set size if the kernel provides it, else the resident set size; 0 for an ended process."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def machine_cpu_seconds() -> float:
    """Busy time of all cores: user, nice, system, irq, softirq, steal."""
    fields = (PROC / "stat").read_text().splitlines()[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / TICKS_PER_SECOND

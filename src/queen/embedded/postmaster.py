"""The postmaster process, started here or left running by a killed Queen."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import psutil

SUPERUSER = "postgres"


@dataclass(frozen=True, slots=True)
class Postmaster:
    """A server process and its socket; `child` is None for an adopted one."""

    pid: int
    socket_dir: Path
    port: int
    child: subprocess.Popen[bytes] | None = None

    def dsn(self, database: str) -> str:
        """A connection URL for `database`, as superuser over the private socket."""
        where = urlencode({"host": str(self.socket_dir), "port": self.port})
        return f"postgresql://{SUPERUSER}@/{quote(database, safe='')}?{where}"

    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        return self._process() is not None

    def signal(self, number: int) -> None:
        if self.child is not None:
            self.child.send_signal(number)
        elif process := self._process():
            process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Wait until the process has exited; False after `timeout` seconds."""
        try:
            if self.child is not None:
                self.child.wait(timeout)
            elif process := self._process():
                return _wait_for([process], timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None
        return None if _has_ended(process) else process


def find_postmaster(cluster: Path) -> Postmaster | None:
    """The server running on `cluster`, by its postmaster.pid; None if that is missing or stale."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
        pid, port, socket_dir = int(lines[0]), int(lines[3]), lines[4]
    except (FileNotFoundError, IndexError, ValueError):
        return None
    if not socket_dir:
        return None
    # The process id may have been reused.
    if not any(process.pid == pid for process in cluster_processes(cluster)):
        return None
    return Postmaster(pid=pid, socket_dir=Path(socket_dir), port=port)


def cluster_processes(cluster: Path) -> Iterator[psutil.Process]:
    """All PostgreSQL processes whose working directory is `cluster`."""
    place = str(cluster.resolve())
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "postgres" and process.cwd() == place:
                yield process


def kill_processes(processes: list[psutil.Process]) -> None:
    """Kill processes and wait until they have exited."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for(processes, timeout=10)


def _wait_for(processes: list[psutil.Process], timeout: float) -> bool:
    # psutil would also wait until the parent has reaped a zombie.
    deadline = time.monotonic() + timeout
    while not all(_has_ended(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""The state of pipelines on this machine: a directory each, with checkpoints, a lock and the status."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from queen.files import try_lock
from queen.pipelines.errors import AlreadyRunning, PipelineError
from queen.wire.pipelines import PipelineState, PipelineStatus, read_status, statuses

LAYOUT_FILE: Final = "queries.json"
"""Beside the checkpoints: which sinks share one."""
_POLL_SECONDS: Final = 0.1
_LIVE: Final = (PipelineState.STARTING, PipelineState.RUNNING)


class StateDirectory:
    """The directory of all pipelines, below the data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "pipelines"

    def of(self, name: str) -> Path:
        return self.root / name

    def checkpoints(self, name: str) -> Path:
        return self.of(name) / "checkpoints"

    @contextmanager
    def running(self, name: str) -> Iterator[Path]:
        """Lock the pipeline while it runs; the lock ends with the process. Raises `AlreadyRunning`."""
        directory = self.of(name)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("a") as lock:
            if not try_lock(lock.fileno()):
                status = read_status(directory)
                by = f" (process {status.pid})" if status is not None else ""
                raise AlreadyRunning(f"pipeline '{name}' runs already{by}: queen pipeline stop {name}")
            yield directory

    def statuses(self) -> list[PipelineStatus]:
        """Every pipeline that ran here; one whose process was killed is shown as failed."""
        return [self._current(status) for status in statuses(self.root)]

    def status(self, name: str) -> PipelineStatus:
        status = read_status(self.of(name))
        if status is None:
            known = ", ".join(one.name for one in self.statuses()) or "none"
            raise PipelineError(f"no pipeline '{name}' has run here; there are: {known}")
        return self._current(status)

    def stop(self, name: str, seconds: float) -> PipelineStatus:
        """Ask a pipeline to stop, and wait until it has. Raises `PipelineError`."""
        status = self.status(name)
        if status.state not in _LIVE:
            raise PipelineError(f"pipeline '{name}' does not run (it is {status.state.value})")
        os.kill(status.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self._is_locked(name):
            if time.monotonic() > deadline:
                raise PipelineError(f"pipeline '{name}' (process {status.pid}) has not stopped within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return self.status(name)

    def _current(self, status: PipelineStatus) -> PipelineStatus:
        if status.state in _LIVE and not self._is_locked(status.name):
            status.state = PipelineState.FAILED
            status.error = status.error or "its process was killed"
        return status

    def _is_locked(self, name: str) -> bool:
        """Whether a process has the lock. The pid alone proves nothing: another process may have it by now."""
        try:
            with (self.of(name) / "lock").open() as lock:
                return not try_lock(lock.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False


def drop_checkpoints(directory: Path) -> None:
    """The next run starts from the beginning. A lock in the directory stays."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path)
    (directory / LAYOUT_FILE).unlink(missing_ok=True)


def drop_checksums(checkpoints: Path) -> None:
    """Let Spark read state whatever kills have left beside it.

    A batch that is repeated replaces its state file and then its checksum. A kill between the two leaves the old one.
    """
    for path in checkpoints.glob("*/state/**/.*.crc"):
        path.unlink(missing_ok=True)

"""Where pipelines keep what they have to remember: a directory each, with checkpoints, a lock and the status."""

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

from queen.pipelines.errors import AlreadyRunning, PipelineError
from queen.wire.pipelines import PipelineState, PipelineStatus, read_status, statuses

_POLL_SECONDS: Final = 0.1
_LIVE: Final = (PipelineState.STARTING, PipelineState.RUNNING)


class StateDirectory:
    """What pipelines of this machine keep under the data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "pipelines"

    def of(self, name: str) -> Path:
        return self.root / name

    def checkpoints(self, name: str) -> Path:
        return self.of(name) / "checkpoints"

    @contextmanager
    def running(self, name: str) -> Iterator[Path]:
        """Hold the pipeline while it runs; the kernel frees the lock of one that died. Raises `AlreadyRunning`."""
        directory = self.of(name)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                status = read_status(directory)
                by = f" (process {status.pid})" if status is not None else ""
                raise AlreadyRunning(f"pipeline '{name}' runs already{by}: queen pipeline stop {name}") from None
            yield directory

    def forget(self, name: str) -> None:
        """Drop the checkpoints: the next run begins anew."""
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def statuses(self) -> list[PipelineStatus]:
        """Every pipeline that ran here; one whose process died without a word is shown as failed."""
        return [self._as_it_is(status) for status in statuses(self.root)]

    def status(self, name: str) -> PipelineStatus:
        status = read_status(self.of(name))
        if status is None:
            known = ", ".join(one.name for one in self.statuses()) or "none"
            raise PipelineError(f"no pipeline '{name}' has run here; there are: {known}")
        return self._as_it_is(status)

    def stop(self, name: str, seconds: float) -> PipelineStatus:
        """Ask a pipeline to stop, and wait until it has. Raises `PipelineError`."""
        status = self.status(name)
        if status.state not in _LIVE:
            raise PipelineError(f"pipeline '{name}' does not run (it is {status.state.value})")
        os.kill(status.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self._held(name):
            if time.monotonic() > deadline:
                raise PipelineError(f"pipeline '{name}' (process {status.pid}) has not stopped within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return self.status(name)

    def _as_it_is(self, status: PipelineStatus) -> PipelineStatus:
        if status.state in _LIVE and not self._held(status.name):
            status.state = PipelineState.FAILED
            status.error = status.error or "its process ended without a word"
        return status

    def _held(self, name: str) -> bool:
        """Whether a process has the pipeline. Never by its pid: that may be another's by now."""
        try:
            with (self.of(name) / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

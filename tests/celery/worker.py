"""`celery worker` as a process."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.support.ageing import block_until

_STOP_SECONDS = 100.0


class CeleryWorker:
    """A worker of `tests.celery.tasks`; its log and journal are in a directory."""

    def __init__(self, url: str, directory: Path, name: str, *arguments: str, lease: float = 30.0) -> None:
        self.name = f"{name}@test"
        self.log = directory / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "tests.celery.tasks", "worker", "-n", self.name, *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--loglevel", "INFO"],
                stdout=log,
                stderr=log,
                env=os.environ | environment(url, directory) | {"QUEEN_TEST_LEASE": str(lease)},
            )

    def wait_until_ready(self) -> None:
        block_until(
            lambda: f"{self.name} ready" in self.text() or self.process.poll() is not None,
            f"{self.name} to be ready:\n{self.text()}",
        )
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """As when its machine is switched off."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for one in family:
            one.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """As an operator does."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(_STOP_SECONDS)


def load_tasks(url: str, directory: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """`tests.celery.tasks` in this process, for a server and a directory."""
    for name, value in environment(url, directory).items():
        patch.setenv(name, value)
    return importlib.reload(importlib.import_module("tests.celery.tasks"))


def environment(url: str, directory: Path) -> dict[str, str]:
    """The variables of `tests.celery.tasks`."""
    return {"QUEEN_TEST_URL": url, "QUEEN_TEST_JOURNAL": str(directory / "journal")}


@contextmanager
def celery_worker(url: str, directory: Path, name: str, *arguments: str, lease: float = 30.0) -> Iterator[CeleryWorker]:
    """A worker that is ready, stopped at the end."""
    worker = CeleryWorker(url, directory, name, *arguments, lease=lease)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.kill()

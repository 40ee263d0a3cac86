"""`queen serve` on a PostgreSQL that is not its own: it can be killed, stopped, frozen and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from tests.acceptance.served import environ_without_settings
from tests.support.ports import free_port
from tests.support.workers import worker_processes

_READY_SECONDS = 100.0
_STOP_SECONDS = 100.0
_RETRY_SECONDS = 0.05


@dataclass
class Host:
    """A server at an address that stays, whichever sources it is run from."""

    dsn: str
    """One database URL, or several with commas between them."""
    data_dir: Path
    port: int = field(default_factory=free_port)
    workers: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir / "log"

    def start(self, sources: Path | None = None) -> None:
        """Start it, from the sources of this tree or from others."""
        command = [sys.executable, "-c", "from queen.cli import main; main()", "serve", "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--data-dir", str(self.data_dir), "--workers", str(self.workers)]
        environment = environ_without_settings() | {"DATABASE_URLS": self.dsn} | dict(self.settings)
        if sources is not None:
            environment["PYTHONPATH"] = str(sources)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    async def ready(self, path: str = "/api/v1/status/buffers") -> None:
        """Until it answers, with or without its database."""
        give_up = time.monotonic() + _READY_SECONDS
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                try:
                    async with session.get(self.url + path) as answer:
                        if answer.status < 300:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                if time.monotonic() > give_up or not self.alive:
                    raise RuntimeError(f"`queen serve` is not ready:\n{self.log.read_text()[-4000:]}")
                await asyncio.sleep(_RETRY_SECONDS)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def worker_processes(self) -> list[psutil.Process]:
        """The workers that run, in the order in which they were started."""
        if not self.alive:
            return []
        assert self.process is not None
        return worker_processes(self.process.pid)

    def kill_a_worker(self, chance: random.Random) -> None:
        workers = self.worker_processes()
        if workers:
            os.kill(chance.choice(workers).pid, signal.SIGKILL)

    def kill(self) -> None:
        """All at once, as when the machine is switched off."""
        assert self.process is not None
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            # A worker whose supervisor has just died may have ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """As an operator does; raises when it does not end well."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            code = process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if code != 0:
            raise RuntimeError(f"`queen serve` ended with {code}:\n{self.log.read_text()[-4000:]}")


@contextmanager
def host(dsn: str, data_dir: Path, **settings: str) -> Iterator[Host]:
    """A host that is stopped at the end; it is not started yet."""
    one = Host(dsn, data_dir, settings=settings)
    try:
        yield one
    finally:
        one.stop()

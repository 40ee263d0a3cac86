"""`queen serve` in processes of its own, on a free port and a PostgreSQL of its own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from queen.settings import describe_settings
from tests.support.ports import free_port

_READY_SECONDS = 100.0
_STOP_SECONDS = 100.0


@dataclass(frozen=True)
class Served:
    """Where a server is, and where it logs."""

    url: str
    log: Path
    pid: int = 0

    def errors(self) -> str:
        """The log from its first error on; empty when there is none."""
        lines = self.log.read_text().splitlines()
        first = next((number for number, line in enumerate(lines) if " ERROR " in line), len(lines))
        return "\n".join(lines[first:])


@contextmanager
def served(
    directory: Path, *, host: str = "127.0.0.1", prefix: Sequence[str] = (), **settings: str
) -> Iterator[Served]:
    """A server with these settings and no others; it keeps everything in `directory`. `prefix` runs the command."""
    port = free_port()
    command = [*prefix, str(Path(sys.executable).with_name("queen")), "serve", "--port", str(port), "--host", host]
    command += ["--data-dir", str(directory / "data")]
    server = Served(f"http://{host}:{port}", directory / "log")
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ_without_settings() | {"NUM_WORKERS": "2", "STATS_CACHE_MS": "0"} | settings,
        )
    server = dataclasses.replace(server, pid=process.pid)
    try:
        _wait_until_healthy(process, server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def environ_without_settings() -> dict[str, str]:
    """The environment without settings: a developer's own must not reach the server of a test."""
    variables = {item.variable for item in describe_settings()}
    return {name: value for name, value in os.environ.items() if name.removesuffix("_FILE") not in variables}


def _wait_until_healthy(process: subprocess.Popen[bytes], server: Served) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`queen serve` is not healthy ({error}):\n{server.log.read_text()}") from error
        time.sleep(0.1)

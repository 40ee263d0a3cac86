"""Where a benchmark runs: a server that is started for it, or one that is already there."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.postgres import Database, find_database, read_postmaster
from bench.processes import Watched
from queen.embedded import EmbeddedPostgres

START_WITHIN_SECONDS = 90
STOP_WITHIN_SECONDS = 30


@dataclass(frozen=True)
class Target:
    """A running server, and what is known of the processes and the database behind it."""

    host: str
    port: int
    watched: Watched
    database: Database | None


class ServerError(Exception):
    """The server under test did not start, or is not where it was said to be."""


@asynccontextmanager
async def fresh_server(workers: int, settings: dict[str, str] | None = None) -> AsyncIterator[Target]:
    """`queen serve` on an empty embedded PostgreSQL, with further variables; everything is gone afterwards."""
    directory = make_directory()
    data_dir, log = directory / "data", directory / "server.log"
    port = free_port()
    process = start_server(data_dir, log, port, workers, settings)
    postmaster: int | None = None
    try:
        await until_healthy("127.0.0.1", port, process, log, tls="TLS_CERT" in (settings or {}))
        postmaster, dsn = read_postmaster(data_dir)
        database = await find_database(dsn)
        yield Target("127.0.0.1", port, Watched(process.pid, (postmaster,)), database)
    finally:
        stop_server(process, postmaster)
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def sharded_server(workers: int, shards: int, settings: dict[str, str]) -> AsyncIterator[Target]:
    """The same on as many PostgreSQL instances as shards are wanted, each with a data directory of its own."""
    directory = make_directory()
    log, port = directory / "server.log", free_port()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        instances = [stack.enter_context(EmbeddedPostgres(directory / f"shard-{n}")) for n in range(shards)]
        urls = {"DATABASE_URLS": ",".join(instance.dsn() for instance in instances)}
        process = start_server(directory / "data", log, port, workers, settings | urls)
        stack.callback(stop_server, process, None)
        await until_healthy("127.0.0.1", port, process, log)
        yield Target("127.0.0.1", port, Watched(process.pid, tuple(each.pid for each in instances)), None)


@asynccontextmanager
async def running_server(url: str, dsn: str | None, pid: int | None) -> AsyncIterator[Target]:
    """A server that is already running; without its DSN and process id some columns stay empty."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise ServerError(f"--against {url!r} names no host: expected something like http://127.0.0.1:6632")
    host, port = socket.gethostbyname(parts.hostname), parts.port or 6632
    await until_healthy(host, port, None, None)
    yield Target(host, port, Watched(pid, ()), Database(dsn) if dsn else None)


def make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="queen-bench-"))
    directory.chmod(0o755)  # PostgreSQL runs as another user when the server runs as root
    return directory


def start_server(
    data_dir: Path, log: Path, port: int, workers: int, settings: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    queen = Path(sys.executable).parent / "queen"
    if not queen.exists():
        raise ServerError(f"{queen} is missing: install the project and its server extra, `make setup`")
    command = [str(queen), "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--data-dir", str(data_dir), "--workers", str(workers)]
    # A session of its own: Ctrl-C must reach the server once, through stop_server.
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment_without_settings() | (settings or {}),
        )


def environment_without_settings() -> dict[str, str]:
    """The caller's environment less the variables that would point the server at another database."""
    foreign = ("PG_", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "DATABASE_URL", "QUEEN_", "NUM_WORKERS")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


async def until_healthy(
    host: str, port: int, process: subprocess.Popen[bytes] | None, log: Path | None, *, tls: bool = False
) -> None:
    deadline = time.monotonic() + (START_WITHIN_SECONDS if process else 5)
    while not await asyncio.to_thread(is_healthy, host, port, tls):
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            what = f"exited with code {process.returncode}" if process and ended else "does not respond to /health"
            raise ServerError(f"the server at {host}:{port} {what}\n{last_lines(log)}")
        await asyncio.sleep(0.1)


def last_lines(log: Path | None) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log else ""


def is_healthy(host: str, port: int, tls: bool = False) -> bool:
    # Whether it answers is all that is asked: nothing is sent that somebody else should not read.
    context = ssl.create_default_context() if tls else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(
            f"{'https' if tls else 'http'}://{host}:{port}/health", timeout=2, context=context
        ) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop_server(process: subprocess.Popen[bytes], postmaster: int | None) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # A server that was killed leaves its PostgreSQL behind; a postmaster takes SIGQUIT as "stop at once".
    if postmaster is not None and is_postgres(postmaster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(postmaster, signal.SIGQUIT)


def is_postgres(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "postgres"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The command as a person runs it: a server for each module, and `queen` in this process or in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from queen.cli.app import execute, tree
from queen.embedded import EmbeddedPostgres
from queen.server.worker import Worker
from queen.settings import Settings
from tests.support.databases import TEMPLATE, create_database

_TREE = tree()
_START_SECONDS = 100.0
_SCREEN_SECONDS = 100.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Served:
    """A server, and what is behind it."""

    url: str
    dsn: str
    data_dir: Path


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.out)

    @property
    def lines(self) -> list[Any]:
        return [msgspec.json.decode(line) for line in self.out.splitlines()]


Cli = Callable[..., Ran]


async def new_database(postgres: EmbeddedPostgres, template: str | None = TEMPLATE) -> str:
    """The URL of a database of its own; it goes with its PostgreSQL."""
    return postgres.dsn(await create_database(postgres, template or "template1"))


@contextmanager
def serving(dsn: str, directory: Path, **overrides: object) -> Iterator[Served]:
    """A server on a database, in a thread of its own."""
    ready, stop = threading.Event(), threading.Event()
    found: list[int] = []
    values: dict[str, object] = {
        "num_workers": 1,
        "host": "127.0.0.1",
        "database_urls": (dsn,),
        "queen_data_dir": directory / "data",
        "stats_cache_ms": 0,
    }
    settings = Settings.from_env({}, **(values | overrides))

    async def serve() -> None:
        worker = Worker(settings, 0, directory, port=0)
        await worker.start()
        found.append(worker.port)
        ready.set()
        await asyncio.to_thread(stop.wait)
        await worker.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(_START_SECONDS), "the server did not start"
    try:
        yield Served(f"http://127.0.0.1:{found[0]}", dsn, directory / "data")
    finally:
        stop.set()
        thread.join(_START_SECONDS)


@pytest.fixture(scope="module")
def server(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of a module."""
    dsn = asyncio.run(new_database(postgres))
    with serving(dsn, tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `queen` in this process, with a configuration of its own and no server named."""
    for name in ("QUEEN_SERVER", "QUEEN_TOKEN", "QUEEN_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUEEN_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("QUEEN_DATA_DIR", str(tmp_path / "nothing"))

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = execute([str(argument) for argument in arguments], _TREE)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture
def cli(no_server: Cli, server: Served, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `queen` in this process against the server of the module."""
    monkeypatch.setenv("QUEEN_SERVER", server.url)
    return no_server


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


def _take_terminal() -> None:
    """So that Ctrl-C reaches it, also where the tests were started in the background, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "queen.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.raw = ""

    @property
    def text(self) -> str:
        """What was printed, without colours and movements."""
        return _ESCAPES.sub("", self.raw)

    def until(self, wanted: str) -> None:
        """Read until this text has been printed."""
        deadline = time.monotonic() + _SCREEN_SECONDS
        while wanted not in self.text:
            assert self._read(deadline), f"{wanted!r} was not printed, but {self.text[-2000:]!r}"

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ended(self) -> int:
        """Read the rest, and return the exit code."""
        deadline = time.monotonic() + _SCREEN_SECONDS
        while self._read(deadline):
            pass
        try:
            return self._process.wait(_SCREEN_SECONDS)
        except subprocess.TimeoutExpired:
            # It says where it hangs.
            self._process.send_signal(signal.SIGABRT)
            while self._read(time.monotonic() + 1):
                pass
            pytest.fail(f"did not end: {self.text[-6000:]}")

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            some = os.read(self._master, 65536) if ready else b""
        except OSError:
            # The other end is closed.
            some = b""
        self.raw += some.decode(errors="replace")
        return bool(some)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)


OpenTerminal = Callable[..., Terminal]


@pytest.fixture
def terminal(server: Served, tmp_path: Path) -> Iterator[OpenTerminal]:
    """Runs `queen` in a terminal; ended with the test."""
    opened: list[Terminal] = []

    def run(*arguments: str, **variables: str) -> Terminal:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("QUEEN_") and name != "NO_COLOR"
        }
        environment |= {
            "QUEEN_SERVER": server.url,
            "QUEEN_CONFIG": str(tmp_path / "config.yaml"),
            "TERM": "xterm-256color",
            "COLUMNS": "160",
            "LINES": "50",
        }
        opened.append(Terminal(list(arguments), environment | variables))
        return opened[-1]

    yield run
    for one in opened:
        one.close()

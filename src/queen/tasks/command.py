"""The command of workers: `queen worker module:app`, or `python -m queen.tasks module:app` without the server."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from queen.errors import QueenError
from queen.tasks.app import App
from queen.tasks.worker import Worker

_RESTART_SECONDS = 1.0

logger = logging.getLogger("queen.tasks")


class AppNotFound(QueenError):
    """`module:app` names no application."""


class WorkerRefused(QueenError):
    """The application cannot be run with these options."""


def load_app(spec: str) -> App:
    """The application that `module:name` names, in the working directory or installed."""
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise AppNotFound(f"there is no module {error.name!r} here, in {spec!r}") from error
    app = getattr(module, name or "app", None)
    if not isinstance(app, App):
        apps = sorted(key for key, value in vars(module).items() if isinstance(value, App))
        hint = f"; it has {', '.join(f'{module_name}:{one}' for one in apps)}" if apps else ""
        raise AppNotFound(f"module {module_name!r} has no App called {name or 'app'!r}{hint}")
    return app


def run_worker(
    spec: str, queues: Sequence[str], concurrency: int, processes: int = 1, stop_timeout: float | None = None
) -> None:
    """Run workers until SIGTERM or SIGINT; jobs that run are finished, unless they take longer than `stop_timeout`."""
    if processes < 1:
        raise WorkerRefused(f"processes must be at least 1, not {processes}")
    app = load_app(spec)
    try:
        worker = Worker(app, queues=queues, concurrency=concurrency, stop_timeout=stop_timeout)
    except ValueError as error:
        raise WorkerRefused(str(error)) from error
    if processes > 1:
        arguments = [spec, "--concurrency", str(concurrency), *(part for one in queues for part in ("--queue", one))]
        if stop_timeout is not None:
            arguments += ["--stop-timeout", str(stop_timeout)]
        _supervise([sys.executable, "-m", "queen.tasks", *arguments], processes)
    else:
        asyncio.run(_run_until_signal(app, worker))
    # A function that was given up on would keep its thread, and with it the process, as long as it likes.
    logging.shutdown()
    if stop_timeout is not None:
        os._exit(0)


async def _run_until_signal(app: App, worker: Worker) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with app:
        await worker.run(stop)


def _supervise(command: list[str], processes: int) -> None:
    """Keep `processes` running; one that ends by itself is restarted."""
    stopping = False

    def stop(number: int, _: object) -> None:
        nonlocal stopping
        stopping = True
        for child in children:
            child.send_signal(signal.SIGTERM)

    def start() -> subprocess.Popen[bytes]:
        # A session of its own, so that Ctrl-C comes once; the pipe closes when this process ends.
        return subprocess.Popen([*command, "--stop-at-eof"], start_new_session=True, stdin=subprocess.PIPE)

    children = [start() for _ in range(processes)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopping:
        time.sleep(_RESTART_SECONDS)
        for index, child in enumerate(children):
            if child.poll() is not None and not stopping:
                logger.error("worker %d ended with code %d, starting another", child.pid, child.returncode)
                children[index] = start()
    # Once more: one that was being started when the signal came has not got it.
    for child in children:
        child.send_signal(signal.SIGTERM)
    for child in children:
        child.wait()


def _stop_at_eof() -> None:
    """Stop when the supervisor has died."""
    # Not through sys.stdin, whose lock would be held by this thread when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line of `python -m queen.tasks`."""
    parser = argparse.ArgumentParser(prog="python -m queen.tasks", description="Run the tasks of an application.")
    parser.add_argument("app", help="module:app")
    parser.add_argument("--queue", action="append", default=[], help="only this queue; may be repeated")
    parser.add_argument("--concurrency", type=int, default=10, help="jobs at a time in each process (10)")
    parser.add_argument("--processes", type=int, default=1, help="processes (1)")
    parser.add_argument("--stop-timeout", type=float, help="seconds after which a stop releases jobs that still run")
    parser.add_argument("--stop-at-eof", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.stop_at_eof:
        threading.Thread(target=_stop_at_eof, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run_worker(given.app, given.queue, given.concurrency, given.processes, given.stop_timeout)
    except QueenError as error:
        raise SystemExit(f"queen worker: {error}") from error

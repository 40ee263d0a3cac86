"""One worker process, started by the supervisor: `python -m queen.cli.serve.worker <worker id> <runtime dir> [socket]`.

Its standard input is one end of a socket pair. The supervisor sends the settings as one line of JSON, so that no secret
is visible in the process list; the worker sends the line `ready`. When the other end closes, the supervisor has died,
and the worker exits.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from queen.cli.serve.logs import configure_logging
from queen.errors import QueenError
from queen.settings import Settings

READY = b"ready\n"

_log = logging.getLogger("queen.worker")

# Grace period for requests in progress after the supervisor has died.
_ORPHAN_SECONDS = 10.0


class RunWorker(Protocol):
    """Serves requests until SIGTERM, then finishes those in progress and returns."""

    def __call__(
        self,
        settings: Settings,
        worker_id: int,
        runtime_dir: Path,
        on_ready: Callable[[], None],
        listening: socket.socket | None = None,
    ) -> None: ...


def main() -> None:
    from queen.server import run_worker

    work(run_worker)


def work(run: RunWorker) -> None:
    """Read the settings from the supervisor, and `run` with them."""
    worker_id, runtime_dir = int(sys.argv[1]), Path(sys.argv[2])
    channel = _take_channel()
    with channel.makefile("rb") as lines:
        settings = Settings.from_env(msgspec.json.decode(lines.readline(), type=dict[str, str]))
    configure_logging(settings.log_level, settings.log_encoding, f"worker {worker_id}", worker_id)
    orphaned = threading.Event()
    grace = _ORPHAN_SECONDS + settings.shutdown_delay_ms / 1000
    threading.Thread(target=_exit_with_supervisor, args=(channel, orphaned, grace), daemon=True).start()
    # Where only root may listen, the supervisor does.
    listening = socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None
    try:
        if listening is None:
            run(settings, worker_id, runtime_dir, on_ready=lambda: channel.sendall(READY))
        else:
            run(settings, worker_id, runtime_dir, on_ready=lambda: channel.sendall(READY), listening=listening)
    except QueenError as error:
        _log.error("%s", error)
        sys.exit(1)
    finally:
        if orphaned.is_set():
            # Otherwise the supervisor removes it.
            shutil.rmtree(runtime_dir, ignore_errors=True)


def _take_channel() -> socket.socket:
    channel = socket.socket(fileno=os.dup(0))
    # Nothing that reads standard input may consume the supervisor's messages.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


def _exit_with_supervisor(channel: socket.socket, orphaned: threading.Event, grace: float) -> None:
    try:
        channel.recv(1)
    except OSError as error:
        _log.warning("lost connection to the supervisor: %s", error)
    _log.warning("supervisor died; shutting down")
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(1)


if __name__ == "__main__":
    main()

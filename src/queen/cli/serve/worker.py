"""The launcher of workers, `python -m queen.cli.serve.worker`: loads the server once and forks workers, which share it.

Its standard input is one end of a socket pair. For each worker the supervisor sends the line `<worker id> <directory>`
with a socket of the worker's own and, where only root may listen, one that listens. The launcher writes the line
`started <pid>`, and `ended <pid> <code>` when the worker has exited.

Over its own socket a worker gets the settings as one line of JSON, so that no secret is visible in the process list,
and sends the line `ready`. When the other end closes, the supervisor has died, and the worker exits.
"""

import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from queen.cli.serve.logs import configure_logging
from queen.errors import QueenError
from queen.settings import Settings

READY = b"ready\n"

_log = logging.getLogger("queen.worker")

# Grace period for requests in progress after the supervisor has died.
_ORPHAN_SECONDS = 10.0
# How long it may take until a worker notices that the supervisor is gone.
_NOTICE_SECONDS = 1.0


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
    from queen.server.worker import run_worker

    work(run_worker)


def work(run: RunWorker) -> None:
    """Fork a process that calls `run` for every worker that the supervisor requests, until it closes its end."""
    # What was loaded stays: a garbage collection of it would write to pages that workers share.
    gc.collect()
    gc.freeze()
    supervisor = _take_channel()
    # Without a blank: from 3.12 on Python counts threads in /proc/self/stat by blanks, and would warn of the fork.
    _name_process("queen-launcher")
    for number in (signal.SIGINT, signal.SIGTERM):
        # It ends after its workers, when the supervisor does.
        signal.signal(number, signal.SIG_IGN)
    ended, wakeup = socket.socketpair()
    for end in (ended, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        _launch(run, supervisor, ended)
    finally:
        # Workers may end after the wakeup socket is closed.
        signal.set_wakeup_fd(-1)


def _launch(run: RunWorker, supervisor: socket.socket, ended: socket.socket) -> None:
    while True:
        readable, _, _ = select.select([supervisor, ended], [], [])
        if ended in readable:
            ended.recv(4096)
            _report_ended(supervisor)
        if supervisor not in readable:
            continue
        try:
            line, sockets, _, _ = socket.recv_fds(supervisor, 65536, 2)
        except ConnectionError:
            return
        if not line:
            return
        worker_id, runtime_dir = line.decode().rstrip("\n").split(" ", 1)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for each in (supervisor, ended):
                each.close()
            _become_worker(run, int(worker_id), Path(runtime_dir), *(socket.socket(fileno=one) for one in sockets))
        for one in sockets:
            os.close(one)
        _send(supervisor, b"started %d\n" % pid)


def _report_ended(supervisor: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _send(supervisor, b"ended %d %d\n" % (found[0], os.waitstatus_to_exitcode(found[1])))


def _send(supervisor: socket.socket, line: bytes) -> None:
    """Send a line. That the supervisor has died is noticed where it is read from."""
    with contextlib.suppress(OSError):
        supervisor.sendall(line)


def _become_worker(
    run: RunWorker, worker_id: int, runtime_dir: Path, channel: socket.socket, listening: socket.socket | None = None
) -> NoReturn:
    code = 1
    try:
        # Its own session: a signal for the launcher's group is not for it.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _name_process(f"queen worker {worker_id}")
        code = _work(run, worker_id, runtime_dir, channel, listening)
    except BaseException:
        traceback.print_exc()
    finally:
        # What follows in the launcher's code is not for a worker.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        logging.shutdown()
        os._exit(code)


def _work(
    run: RunWorker, worker_id: int, runtime_dir: Path, channel: socket.socket, listening: socket.socket | None
) -> int:
    """Read the settings from the supervisor, `run` with them, and return the exit code."""
    line = b""
    with channel.makefile("rb") as lines, contextlib.suppress(ConnectionError):
        line = lines.readline()
    if not line:
        # The supervisor died before it had sent the settings.
        return 1
    settings = Settings.from_env(msgspec.json.decode(line, type=dict[str, str]))
    configure_logging(settings.log_level, settings.log_encoding, f"worker {worker_id}", worker_id)
    orphaned = threading.Event()
    grace = _ORPHAN_SECONDS + settings.shutdown_delay_ms / 1000
    threading.Thread(target=_exit_with_supervisor, args=(channel, orphaned, grace), daemon=True).start()
    try:
        if listening is None:
            run(settings, worker_id, runtime_dir, on_ready=lambda: _send(channel, READY))
        else:
            # Where only root may listen, the supervisor does.
            run(settings, worker_id, runtime_dir, on_ready=lambda: _send(channel, READY), listening=listening)
    except QueenError as error:
        _log.error("%s", error)
        return 1
    except OSError as error:
        # A worker that starts while the supervisor dies may find that others have removed the runtime directory.
        if not orphaned.wait(_NOTICE_SECONDS):
            raise
        _log.warning("ended during startup, after the supervisor: %s", error)
        return 1
    finally:
        if orphaned.is_set():
            # Otherwise the supervisor removes it.
            shutil.rmtree(runtime_dir, ignore_errors=True)
    return 0


def _name_process(name: str) -> None:
    """Have process lists show a name of at most 15 characters, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


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
    # Unlike time.sleep, it waits for a span and not for a moment, whatever a library makes of the clock.
    select.select([], [], [], grace)
    os._exit(1)


if __name__ == "__main__":
    main()

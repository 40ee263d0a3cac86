"""The worker processes: started, restarted when one dies, and stopped together."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from queen.cli.serve.privileges import WorkerUser
from queen.cli.serve.worker import READY
from queen.errors import QueenError
from queen.settings import Settings

_log = logging.getLogger("queen.supervisor")


class Stop:
    """Shutdown events: `requested` by the first signal, `forced` by a second one."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def request(self) -> None:
        if self.requested.is_set():
            self.forced.set()
            return
        _log.info("shutting down")
        self.requested.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a stop is requested."""
        await first_of(asyncio.sleep(seconds), self.requested.wait())


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of several coroutines, cancel the others, and raise its error if it failed."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead worker is restarted, and when the server gives up. Times are in seconds."""

    first_delay: float = 0.1
    longest_delay: float = 5.0
    # A worker that exits before it is ready, or this soon after, counts as failed at startup.
    startup: float = 1.0
    give_up_after: int = 5
    # How long a worker may take to finish its requests on shutdown.
    grace: float = 10.0

    def lengthened(self, seconds: float) -> "RestartPolicy":
        """The same policy with a longer grace period."""
        return replace(self, grace=self.grace + seconds)

    def delay(self, startup_failures: int) -> float:
        return min(self.first_delay * 2.0 ** max(startup_failures - 1, 0), self.longest_delay)


class WorkerPool:
    """Keeps `settings.num_workers` processes of `command` running until a stop is requested."""

    def __init__(
        self,
        settings: Settings,
        runtime_dir: Path,
        command: Sequence[str],
        policy: RestartPolicy,
        stop: Stop,
        user: WorkerUser | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        """Workers run as `user`, and listen on their `sockets` if there are any."""
        self._user = user or WorkerUser()
        self._sockets = sockets
        self.all_ready = asyncio.Event()
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._command = command
        self._policy = policy
        self._stop = stop
        self._ready: set[int] = set()
        self._running: dict[int, _Worker] = {}
        self._failure: QueenError | None = None

    async def run(self) -> None:
        """Run until a stop is requested; raises if a worker fails repeatedly. Afterwards all have exited."""
        await asyncio.gather(*(self._keep_running(number) for number in range(self._settings.num_workers)))
        if self._failure is not None:
            raise self._failure

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on to every worker."""
        for worker in self._running.values():
            worker.signal(number)

    async def _keep_running(self, worker_id: int) -> None:
        startup_failures = 0
        while not self._stop.requested.is_set():
            listening = self._sockets[worker_id] if self._sockets else None
            worker = await _Worker.start(
                self._command, worker_id, self._runtime_dir, self._settings, self._user, listening
            )
            await self._supervise(worker)
            if self._stop.requested.is_set():
                return
            startup_failures = startup_failures + 1 if worker.seconds_ready() < self._policy.startup else 0
            if startup_failures >= self._policy.give_up_after:
                self._give_up(worker, startup_failures)
                return
            delay = self._policy.delay(startup_failures)
            _log.warning("%s %s; restarting in %.1f s", worker, worker.ending(), delay)
            await self._stop.sleep(delay)

    async def _supervise(self, worker: "_Worker") -> None:
        """Wait until the worker has exited, by itself or because a stop was requested."""
        waiting = asyncio.create_task(self._await_ready(worker))
        self._running[worker.worker_id] = worker
        try:
            await first_of(worker.process.wait(), self._stop.requested.wait())
            await self._terminate(worker)
        finally:
            self._running.pop(worker.worker_id, None)
            waiting.cancel()
            worker.close()

    async def _await_ready(self, worker: "_Worker") -> None:
        if not await worker.becomes_ready():
            return
        self._ready.add(worker.worker_id)
        if len(self._ready) == self._settings.num_workers:
            self.all_ready.set()

    async def _terminate(self, worker: "_Worker") -> None:
        if worker.process.returncode is not None:
            return
        worker.signal(signal.SIGTERM)
        await first_of(worker.process.wait(), self._stop.forced.wait(), asyncio.sleep(self._policy.grace))
        if worker.process.returncode is None:
            _log.warning("%s did not exit within the grace period; killing it", worker)
            worker.signal(signal.SIGKILL)
        await worker.process.wait()

    def _give_up(self, worker: "_Worker", failures: int) -> None:
        self._failure = QueenError(
            f"{worker} {worker.ending()} during startup, {failures} times in a row: see the log lines above"
        )
        self._stop.request()


# Request bodies vary in size: with its defaults malloc never returns the fragmented memory.
_MALLOC_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


class _Worker:
    """A worker process, and the supervisor's end of the socket pair that is its standard input."""

    def __init__(
        self,
        worker_id: int,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.worker_id = worker_id
        self.process = process
        self._reader = reader
        self._writer = writer
        self._ready_since: float | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        worker_id: int,
        runtime_dir: Path,
        settings: Settings,
        user: WorkerUser,
        listening: socket.socket | None,
    ) -> "_Worker":
        ours, theirs = socket.socketpair()
        inherited = [listening.fileno()] if listening is not None else []
        with theirs:
            # Its own session: Ctrl-C in the terminal reaches only the supervisor, which stops everything in order.
            process = await asyncio.create_subprocess_exec(
                *command,
                str(worker_id),
                str(runtime_dir),
                *map(str, inherited),
                stdin=theirs.fileno(),
                start_new_session=True,
                env=_MALLOC_SETTINGS | os.environ | user.environment(),
                pass_fds=inherited,
                **user.process(),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(msgspec.json.encode(settings.to_env()) + b"\n")
        return cls(worker_id, process, reader, writer)

    async def becomes_ready(self) -> bool:
        """Wait until the worker is ready; False if it exits before."""
        with contextlib.suppress(ConnectionError):
            if await self._reader.readline() == READY:
                self._ready_since = time.monotonic()
                return True
        return False

    def seconds_ready(self) -> float:
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        self._writer.close()

    def ending(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was terminated by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def __str__(self) -> str:
        return f"worker {self.worker_id} (process {self.process.pid})"

"""The worker processes: started, restarted when one dies, and stopped together."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
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
    """Keeps `settings.num_workers` workers running, forked by the launcher `command`, until a stop is requested."""

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
        self._launcher = Launcher(command, user or WorkerUser(), runtime_dir)
        self._sockets = sockets
        self.all_ready = asyncio.Event()
        self._settings = settings
        self._policy = policy
        self._stop = stop
        self._ready: set[int] = set()
        self._running: dict[int, _Worker] = {}
        self._failure: QueenError | None = None

    async def run(self) -> None:
        """Run until a stop is requested; raises if a worker fails repeatedly. Afterwards all have exited."""
        try:
            await asyncio.gather(*(self._keep_running(number) for number in range(self._settings.num_workers)))
        finally:
            await self._launcher.stop()
        if self._failure is not None:
            raise self._failure

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on to every worker."""
        for worker in self._running.values():
            worker.signal(number)

    async def _keep_running(self, worker_id: int) -> None:
        startup_failures = 0
        while not self._stop.requested.is_set():
            ending, seconds_ready = await self._run_once(worker_id)
            if self._stop.requested.is_set():
                return
            startup_failures = startup_failures + 1 if seconds_ready < self._policy.startup else 0
            if startup_failures >= self._policy.give_up_after:
                self._give_up(ending, startup_failures)
                return
            delay = self._policy.delay(startup_failures)
            _log.warning("%s; restarting in %.1f s", ending, delay)
            await self._stop.sleep(delay)

    async def _run_once(self, worker_id: int) -> tuple[str, float]:
        """Run a worker until it has exited: how it ended, and for how many seconds it was ready."""
        try:
            listening = self._sockets[worker_id] if self._sockets else None
            worker = await self._launcher.start(worker_id, self._settings, listening)
        except LauncherDied as error:
            return str(error), 0.0
        watching = asyncio.create_task(worker.watch(lambda: self._is_ready(worker_id)))
        self._running[worker_id] = worker
        try:
            await first_of(worker.exited.wait(), self._stop.requested.wait())
            await self._terminate(worker)
        finally:
            self._running.pop(worker_id, None)
            watching.cancel()
            worker.close()
        return f"{worker} {worker.ending()}", worker.seconds_ready()

    def _is_ready(self, worker_id: int) -> None:
        self._ready.add(worker_id)
        if len(self._ready) == self._settings.num_workers:
            self.all_ready.set()

    async def _terminate(self, worker: "_Worker") -> None:
        if worker.exited.is_set():
            return
        worker.signal(signal.SIGTERM)
        await first_of(worker.exited.wait(), self._stop.forced.wait(), asyncio.sleep(self._policy.grace))
        if not worker.exited.is_set():
            _log.warning("%s did not exit within the grace period; killing it", worker)
            worker.signal(signal.SIGKILL)
        await worker.exited.wait()

    def _give_up(self, ending: str, failures: int) -> None:
        self._failure = QueenError(f"{ending} during startup, {failures} times in a row: see the log lines above")
        self._stop.request()


# Request bodies vary in size: with its defaults malloc never returns the fragmented memory.
_MALLOC_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
# A process is forked only while it has one thread; numpy's linear algebra, which is not used, would start more.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
# How long the launcher, if it lives, may take to report the exit code of a worker that is gone.
_CODE_SECONDS = 2.0


class Launcher:
    """The process that forks workers: what it has loaded, they share. If it dies, the next start begins another."""

    def __init__(self, command: Sequence[str], user: WorkerUser, runtime_dir: Path) -> None:
        self._command = command
        self._user = user
        self._runtime_dir = runtime_dir
        self._writer: asyncio.StreamWriter | None = None
        self._requests: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started: asyncio.Future[tuple[int, asyncio.Future[int]]] | None = None
        self._codes: dict[int, asyncio.Future[int]] = {}
        # One at a time, so that each answer is to the last question.
        self._turn = asyncio.Lock()

    async def start(self, worker_id: int, settings: Settings, listening: socket.socket | None) -> "_Worker":
        """Start a worker. Raises `LauncherDied` if the launcher does not live to do it."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid, code = await self._fork(worker_id, [theirs] if listening is None else [theirs, listening])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(msgspec.json.encode(settings.to_env()) + b"\n")
        return _Worker(worker_id, pid, code, reader, writer)

    async def _fork(self, worker_id: int, sockets: Sequence[socket.socket]) -> tuple[int, asyncio.Future[int]]:
        async with self._turn:
            if self._reading is None or self._reading.done():
                await self._launch()
            assert self._requests is not None
            self._started = asyncio.get_running_loop().create_future()
            line = f"{worker_id} {self._runtime_dir}\n".encode()
            # Where it has died, the reader says so.
            with contextlib.suppress(OSError):
                socket.send_fds(self._requests, [line], [one.fileno() for one in sockets])
            return await self._started

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Its own session: Ctrl-C in the terminal reaches only the supervisor, which stops everything in order.
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=theirs.fileno(),
                start_new_session=True,
                env=_MALLOC_SETTINGS | _ONE_THREAD | os.environ | self._user.environment(),
                **self._user.process(),
            )
        # asyncio does not send sockets, and is not to close the one that does.
        self._requests = ours.dup()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, process))

    async def _read(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                word, *numbers = line.split()
                if word == b"started":
                    pid = int(numbers[0])
                    code = self._codes[pid] = loop.create_future()
                    if self._started is not None and not self._started.done():
                        self._started.set_result((pid, code))
                else:
                    self._codes.pop(int(numbers[0])).set_result(int(numbers[1]))
        exit_code = await process.wait()
        self._close()
        for each in self._codes.values():
            each.cancel()
        self._codes.clear()
        if self._started is not None and not self._started.done():
            self._started.set_exception(LauncherDied(f"the launcher of workers {_ending(exit_code)}"))

    async def stop(self) -> None:
        """End it; its workers have ended."""
        self._close()
        if self._reading is not None:
            await self._reading

    def _close(self) -> None:
        if self._writer is not None and self._requests is not None:
            self._requests.close()
            self._writer.close()


class LauncherDied(Exception):
    """The launcher ended before it had started a worker."""


class _Worker:
    """A worker process, and the supervisor's end of the socket pair that ties them together."""

    def __init__(
        self,
        worker_id: int,
        pid: int,
        code: asyncio.Future[int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.worker_id = worker_id
        self._pid = pid
        self._code = code
        self._reader = reader
        self._writer = writer
        self._ready_since: float | None = None
        self.exited = asyncio.Event()

    async def watch(self, on_ready: Callable[[], None]) -> None:
        """Follow the worker until it has exited: the kernel then closes its end of the socket."""
        with contextlib.suppress(ConnectionError):
            if await self._reader.readline() == READY:
                self._ready_since = time.monotonic()
                on_ready()
                await self._reader.read()
        await asyncio.wait([self._code], timeout=_CODE_SECONDS)
        self.exited.set()

    def seconds_ready(self) -> float:
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self.exited.is_set():
                os.kill(self._pid, number)

    def close(self) -> None:
        self._writer.close()

    def ending(self) -> str:
        return _ending(self._code.result() if self._code.done() and not self._code.cancelled() else None)

    def __str__(self) -> str:
        return f"worker {self.worker_id} (process {self._pid})"


def _ending(code: int | None) -> str:
    if code is None:
        return "exited"
    return f"was terminated by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

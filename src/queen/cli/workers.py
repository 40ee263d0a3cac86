"""The worker processes: started together, started again when one dies, stopped together."""

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

from queen.cli.worker import READY
from queen.errors import QueenError
from queen.settings import Settings

_log = logging.getLogger("queen.supervisor")


class Stop:
    """`asked` once somebody wants us to stop; `hurry` when they ask again, and do not want to wait."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
            return
        _log.info("stopping")
        self.asked.set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody asks to stop."""
        await first_of(asyncio.sleep(seconds), self.asked.wait())


async def first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these is done, and cancel the others. An error of the one that is done is raised."""
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
    """When a dead worker is started again, and when that is hopeless. All times are in seconds."""

    first_delay: float = 0.1
    longest_delay: float = 5.0
    # A worker that ends before it is ready, or this soon after, has died at once.
    at_once: float = 1.0
    give_up_after: int = 5
    # How long a worker may take to finish its requests when asked to stop.
    grace: float = 10.0

    def lengthened(self, seconds: float) -> "RestartPolicy":
        """The same, with more time to finish."""
        return replace(self, grace=self.grace + seconds)

    def delay(self, deaths_at_once: int) -> float:
        return min(self.first_delay * 2.0 ** max(deaths_at_once - 1, 0), self.longest_delay)


class WorkerPool:
    """Keeps `settings.num_workers` processes of `command` running until asked to stop."""

    def __init__(
        self, settings: Settings, runtime_dir: Path, command: Sequence[str], policy: RestartPolicy, stop: Stop
    ) -> None:
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
        """Until asked to stop; raises when a worker cannot be kept running. All have ended afterwards."""
        await asyncio.gather(*(self._keep_running(number) for number in range(self._settings.num_workers)))
        if self._failure is not None:
            raise self._failure

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on to every worker."""
        for worker in self._running.values():
            worker.signal(number)

    async def _keep_running(self, worker_id: int) -> None:
        deaths_at_once = 0
        while not self._stop.asked.is_set():
            worker = await _Worker.start(self._command, worker_id, self._runtime_dir, self._settings)
            await self._watch(worker)
            if self._stop.asked.is_set():
                return
            deaths_at_once = deaths_at_once + 1 if worker.seconds_ready() < self._policy.at_once else 0
            if deaths_at_once >= self._policy.give_up_after:
                self._give_up(worker, deaths_at_once)
                return
            delay = self._policy.delay(deaths_at_once)
            _log.warning("%s %s; starting it again in %.1f s", worker, worker.ending(), delay)
            await self._stop.pause(delay)

    async def _watch(self, worker: "_Worker") -> None:
        """Until the worker has ended, by itself or because we are asked to stop."""
        listening = asyncio.create_task(self._note_ready(worker))
        self._running[worker.worker_id] = worker
        try:
            await first_of(worker.process.wait(), self._stop.asked.wait())
            await self._end(worker)
        finally:
            self._running.pop(worker.worker_id, None)
            listening.cancel()
            worker.hang_up()

    async def _note_ready(self, worker: "_Worker") -> None:
        if not await worker.becomes_ready():
            return
        self._ready.add(worker.worker_id)
        if len(self._ready) == self._settings.num_workers:
            self.all_ready.set()

    async def _end(self, worker: "_Worker") -> None:
        if worker.process.returncode is not None:
            return
        worker.signal(signal.SIGTERM)
        await first_of(worker.process.wait(), self._stop.hurry.wait(), asyncio.sleep(self._policy.grace))
        if worker.process.returncode is None:
            _log.warning("%s did not end in time; killing it", worker)
            worker.signal(signal.SIGKILL)
        await worker.process.wait()

    def _give_up(self, worker: "_Worker", deaths: int) -> None:
        self._failure = QueenError(
            f"{worker} {worker.ending()} right after it was started, {deaths} times in a row: "
            "the lines above say why; mend that and start again"
        )
        self._stop.ask()


# Bodies of requests come in all sizes: left to itself, the C library keeps the holes between them for ever.
_GIVE_BACK_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


class _Worker:
    """One process, and our end of the socket pair that is its standard input."""

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
    async def start(cls, command: Sequence[str], worker_id: int, runtime_dir: Path, settings: Settings) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in our terminal reaches us alone, and we stop things in order.
            process = await asyncio.create_subprocess_exec(
                *command,
                str(worker_id),
                str(runtime_dir),
                stdin=theirs.fileno(),
                start_new_session=True,
                env=_GIVE_BACK_MEMORY | os.environ,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(msgspec.json.encode(settings.to_env()) + b"\n")
        return cls(worker_id, process, reader, writer)

    async def becomes_ready(self) -> bool:
        """Whether the worker said that it takes requests; False when it ended before."""
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

    def hang_up(self) -> None:
        self._writer.close()

    def ending(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def __str__(self) -> str:
        return f"worker {self.worker_id} (process {self.process.pid})"

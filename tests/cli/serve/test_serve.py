"""`queen serve`: workers are kept running, everything stops together, and nothing is left behind."""

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

import queen as package
from tests.support.ports import free_port

# Runs the supervisor without a database, on the worker script given as the first argument.
SUPERVISOR = """
import asyncio, json, sys
from queen.cli.serve.logs import configure_logging
from queen.cli.serve.supervisor import Supervisor
from queen.cli.serve.workers import RestartPolicy
from queen.errors import QueenError
from queen.settings import Settings

async def migrate(dsn):
    print("migrated", dsn, flush=True)

script, environ, policy = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
settings = Settings.from_env(environ, database_urls="postgresql://nobody@nowhere/nothing")
configure_logging(settings.log_level, settings.log_encoding, "queen")
announce = lambda text: print(text, flush=True)
command = [sys.executable, script]
try:
    asyncio.run(Supervisor(settings, migrate, announce, command, RestartPolicy(**policy)).run())
except QueenError as error:
    sys.exit(f"queen: {error}")
"""

# What every stand-in worker begins with: `told` prints a line that the test sees.
WORKER = """
import os, signal, sys, threading, time
from pathlib import Path
from queen.cli.serve.worker import work
from queen.errors import QueenError

def told(*words):
    # In one write, so that the lines of two workers do not mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def until_terminated():
    signal.sigwait({signal.SIGTERM})

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""

OBEDIENT = """
def run(settings, worker_id, runtime_dir, on_ready):
    (runtime_dir / str(worker_id)).write_text("here")
    told("worker", worker_id, "pid", os.getpid(), "database", *settings.database_dsns)
    told("runtime", runtime_dir)
    on_ready()
    until_terminated()
    told("worker", worker_id, "finished")
"""


class Served:
    """A server in a process of its own, and what it writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line_with(self, text: str, count: int = 1) -> str:
        """The `count`-th line that holds `text`, once it has been written."""
        while True:
            found = [line for line in self.lines if text in line]
            if len(found) >= count:
                return found[count - 1]
            await self._read_line()

    async def ended(self) -> int:
        """The exit code, once the process and all that write where it writes have ended."""
        async with asyncio.timeout(100):
            while await self._read_line(optional=True):
                pass
            return await self.process.wait()

    async def _read_line(self, optional: bool = False) -> bool:
        assert self.process.stdout is not None
        async with asyncio.timeout(100):
            line = (await self.process.stdout.readline()).decode()
        self.lines.append(line.rstrip("\n"))
        assert line or optional, "it ended after:\n" + "\n".join(self.lines)
        return bool(line)

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    served = Served(process)
    try:
        yield served
    finally:
        if process.returncode is None:
            left = served.descendants()
            process.kill()
            for each in left:
                if not is_gone(each):
                    each.kill()
            await process.wait()


def supervising(tmp_path: Path, worker: str, workers: int = 2, **policy: float) -> list[str]:
    """The command of a supervisor whose workers run the function `run` of `worker`."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER + worker + "\nwork(run)\n")
    environ = {
        "PORT": str(free_port()),
        "HOST": "127.0.0.1",
        "NUM_WORKERS": str(workers),
        "QUEEN_DATA_DIR": str(tmp_path / "data"),
    }
    return [sys.executable, "-c", SUPERVISOR, str(script), json.dumps(environ), json.dumps(policy)]


def queen(*arguments: str) -> list[str]:
    """The command that a user would type."""
    return [str(Path(sys.executable).with_name("queen")), *arguments]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_ready_is_said_once_every_worker_is_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    late = f"""
def run(settings, worker_id, runtime_dir, on_ready):
    if worker_id == 1:
        told("worker 1 waits")
        Path({str(gate)!r}).read_text()
        told("worker 1 goes on")
    on_ready()
    until_terminated()
"""
    async with started(*supervising(tmp_path, late)) as served:
        await served.line_with("worker 1 waits")
        with gate.open("w") as opened:
            opened.write("go")
        await served.line_with("is ready at http://127.0.0.1:")
        first = next(line for line in served.lines if "goes on" in line or "is ready" in line)
        assert first == "worker 1 goes on"
        assert "workers   2" in await served.line_with("workers   ")
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0


async def test_workers_get_the_settings_and_a_directory_that_is_removed_at_the_end(tmp_path: Path) -> None:
    async with started(*supervising(tmp_path, OBEDIENT)) as served:
        assert "database postgresql://nobody@nowhere/nothing" in await served.line_with("worker 0 pid")
        runtime_dir = (await served.line_with("runtime")).removeprefix("runtime ")
        await served.line_with("is ready")
        assert names_in(Path(runtime_dir)) == ["0", "1"]
        assert "nobody" not in " ".join(part for p in served.descendants() for part in p.cmdline())
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
    assert not os.access(runtime_dir, os.F_OK)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_every_worker_finish(tmp_path: Path, number: signal.Signals) -> None:
    async with started(*supervising(tmp_path, OBEDIENT)) as served:
        await served.line_with("is ready")
        workers = served.descendants()
        served.process.send_signal(number)
        assert await served.ended() == 0
        assert {"worker 0 finished", "worker 1 finished"} <= set(served.lines)
        assert all(is_gone(worker) for worker in workers)


async def test_a_worker_that_does_not_finish_is_killed(tmp_path: Path) -> None:
    deaf = """
def run(settings, worker_id, runtime_dir, on_ready):
    on_ready()
    threading.Event().wait()
"""
    async with started(*supervising(tmp_path, deaf, workers=1, grace=0.2)) as served:
        await served.line_with("is ready")
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
        assert "did not exit within the grace period; killing it" in await served.line_with("killing")


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    deaf = """
def run(settings, worker_id, runtime_dir, on_ready):
    on_ready()
    until_terminated()
    told("heard")
    threading.Event().wait()
"""
    async with started(*supervising(tmp_path, deaf, workers=1, grace=600)) as served:
        await served.line_with("is ready")
        served.process.send_signal(signal.SIGINT)
        await served.line_with("heard")
        served.process.send_signal(signal.SIGINT)
        assert await served.ended() == 0


async def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    async with started(*supervising(tmp_path, OBEDIENT, first_delay=0.01)) as served:
        await served.line_with("is ready")
        killed = int((await served.line_with("worker 1 pid")).split()[3])
        os.kill(killed, signal.SIGKILL)
        assert f"worker 1 (process {killed}) was terminated by SIGKILL" in await served.line_with("SIGKILL")
        assert int((await served.line_with("worker 1 pid", count=2)).split()[3]) != killed
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0


async def test_a_worker_that_dies_at_once_again_and_again_stops_the_server(tmp_path: Path) -> None:
    hopeless = """
def run(settings, worker_id, runtime_dir, on_ready):
    if worker_id == 1:
        raise QueenError("the moon is in the wrong place")
    on_ready()
    until_terminated()
    told("worker 0 finished")
"""
    async with started(*supervising(tmp_path, hopeless, first_delay=0.01)) as served:
        assert await served.ended() == 1
        assert len([line for line in served.lines if "the moon is in the wrong place" in line]) == 5
        assert "queen: worker 1" in await served.line_with("during startup, 5 times in a row")
        assert "worker 0 finished" in served.lines


async def test_workers_outlive_their_launcher_and_another_starts_the_next(tmp_path: Path) -> None:
    async with started(*supervising(tmp_path, OBEDIENT, first_delay=0.01)) as served:
        await served.line_with("is ready")
        (launcher,) = psutil.Process(served.process.pid).children()
        launcher.kill()
        killed = int((await served.line_with("worker 1 pid")).split()[3])
        os.kill(killed, signal.SIGKILL)
        assert f"worker 1 (process {killed}) exited; restarting" in await served.line_with("restarting")
        assert int((await served.line_with("worker 1 pid", count=2)).split()[3]) != killed
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
        assert {"worker 0 finished", "worker 1 finished"} <= set(served.lines)


async def test_a_launcher_that_cannot_load_the_server_stops_it_with_the_reason(tmp_path: Path) -> None:
    async with started(*supervising(tmp_path, "import a_module_that_is_not_there", first_delay=0.01)) as served:
        assert await served.ended() == 1
        assert any("No module named 'a_module_that_is_not_there'" in line for line in served.lines)
        given_up = await served.line_with("times in a row")
        assert given_up.startswith("queen: the launcher of workers exited with code 1 during startup, 5 times in a row")


async def test_workers_that_get_ready_after_the_supervisor_was_killed_end_in_order(tmp_path: Path) -> None:
    late = """
def run(settings, worker_id, runtime_dir, on_ready):
    told("worker", worker_id, "starts")
    until_terminated()
    on_ready()
    told("worker", worker_id, "finished")
"""
    async with started(*supervising(tmp_path, late)) as served:
        for number in (0, 1):
            await served.line_with(f"worker {number} starts")
        served.process.kill()
        await served.ended()
        assert {"worker 0 finished", "worker 1 finished"} <= set(served.lines)
        assert not [line for line in served.lines if "Traceback" in line or "Error" in line]


async def test_a_worker_that_starts_while_the_others_clean_up_after_the_supervisor_says_so(tmp_path: Path) -> None:
    late = """
def run(settings, worker_id, runtime_dir, on_ready):
    told("worker", worker_id, "starts")
    until_terminated()
    if worker_id:
        while runtime_dir.exists():
            time.sleep(0.01)
        (runtime_dir / "socket").write_text("here")
"""
    async with started(*supervising(tmp_path, late)) as served:
        for number in (0, 1):
            await served.line_with(f"worker {number} starts")
        served.process.kill()
        await served.ended()
        assert "No such file or directory" in await served.line_with("ended during startup, after the supervisor")
        assert not [line for line in served.lines if "Traceback" in line]


async def test_workers_end_and_clean_up_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    async with started(*supervising(tmp_path, OBEDIENT)) as served:
        await served.line_with("is ready")
        runtime_dir = (await served.line_with("runtime")).removeprefix("runtime ")
        started_by_it = served.descendants()
        assert [each.name() for each in started_by_it] == ["queen-launcher", "queen worker 0", "queen worker 1"]
        served.process.kill()
        await served.ended()
        assert {"worker 0 finished", "worker 1 finished"} <= set(served.lines)
        # Their last words come shortly before their end, which their closed output does not wait for.
        _, alive = psutil.wait_procs([each for each in started_by_it if not is_gone(each)], timeout=100)
        assert not alive
        assert not os.access(runtime_dir, os.F_OK)


async def test_a_port_in_use_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        # SO_REUSEPORT as another Queen would set it: the port must not be shared with that one.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        data_dir = tmp_path / "data"
        command = queen("serve", "--host", "127.0.0.1", "--port", port, "--data-dir", str(data_dir))
        async with started(*command) as served:
            assert await served.ended() == 1
            assert served.lines[0] == (f"queen: port {port} is already in use; choose another with --port or PORT")
    assert names_in(tmp_path) == []


async def test_a_wrong_option_is_refused_in_one_line() -> None:
    async with started(*queen("serve", "--port", "99999")) as served:
        assert await served.ended() == 1
        assert served.lines[0] == "queen: port=99999: expected an integer from 1 to 65535"


async def test_help_names_every_option_and_its_variable() -> None:
    async with started(*queen("serve", "--help")) as served:
        assert await served.ended() == 0
    text = "\n".join(served.lines)
    for word in ("--port", "PORT", "--workers", "NUM_WORKERS", "--data-dir", "--database-url", "Ctrl-C"):
        assert word in text


# Four processes and a new cluster, twice.
@pytest.mark.timeout(300)
async def test_a_stranger_starts_it_asks_for_its_health_and_stops_it(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/health"
    data = tmp_path / "data"
    options = ("--host", "127.0.0.1", "--port", str(port), "--workers", "2", "--data-dir", str(data))
    careless = ("sh", "-c", 'umask 0; exec "$@"', "sh")
    for _ in ("first start", "second start on the same data"):
        async with started(*careless, *queen("serve", *options)) as served:
            await served.line_with(f"is ready at http://127.0.0.1:{port}")
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                assert answer.status == 200
                assert (await answer.json())["status"] == "healthy"
            left = served.descendants()
            assert {"postgres"} <= {process.name() for process in left}
            # Started by root or not: what serves is not root, unless another user could not read Python or Queen.
            as_root = any("workers run as root" in line for line in served.lines)
            assert as_root == (
                os.geteuid() == 0 and not all(map(_all_may_read, (os.__file__, sys.prefix, package.__file__)))
            )
            unprivileged = [process for process in left if process.name() == "postgres" or not as_root]
            assert all(process.uids().effective != 0 for process in unprivileged)
            assert all(process.gids().effective != 0 for process in unprivileged)
            # What it keeps is nobody else's business.
            assert stat.S_IMODE(data.stat().st_mode) == 0o700
            assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in data.iterdir())
            served.process.send_signal(signal.SIGINT)
            assert await served.ended() == 0
            assert [process for process in left if not is_gone(process)] == []


def _all_may_read(path: str) -> bool:
    others = (stat.S_IMODE(one.stat().st_mode) & 0o7 for one in (Path(path), *Path(path).parents))
    return next(others) & 0o4 != 0 and all(mode & 0o1 for mode in others)

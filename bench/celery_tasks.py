"""Celery on Queen beside Celery on Redis and RabbitMQ, in one run: tasks a second, and for each second of CPU time.

    python -m bench.celery_tasks [--tasks 4000] [--rounds 3] [--prefetch 1,10,100] [--brokers NAME,NAME] [--results]

Tasks that do nothing are published by one process, then a worker of two processes runs them; the time is that between
the first tenth and the last task. CPU time is that of the broker (with PostgreSQL) and that of the worker; when
publishing, that of the broker and that of the publisher. Figures are medians of
the rounds, with the lowest and the highest. `redis` keeps tasks in memory; `redis-fsync` has every write on disk before
it is answered, as Queen has. With `--results` each task stores its result, in Queen or, for the others, in Redis.
Brokers whose program is not installed are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from celery import Celery

from bench.processes import descendants, read_processes
from bench.target import free_port, fresh_server

RABBITMQ: Final = "/usr/lib/rabbitmq/bin/rabbitmq-server"
PROCESSES: Final = 2
WARM_UP: Final = 0.1
GIVE_UP_SECONDS: Final = 300.0
START_SECONDS: Final = 60.0


def application() -> Celery:
    """The application that publisher and worker have in common, by the variables of the run."""
    app = Celery("bench.celery_tasks", broker=os.environ["BENCH_BROKER"], backend=os.environ.get("BENCH_BACKEND"))
    app.conf.update(
        task_ignore_result="BENCH_BACKEND" not in os.environ,
        worker_prefetch_multiplier=int(os.environ.get("BENCH_PREFETCH", "1")),
        broker_connection_retry_on_startup=True,
    )

    @app.task(name="bench.tick")
    def tick(number: int) -> int:
        journal = os.open(os.environ["BENCH_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(journal, b".")
        os.close(journal)
        return number

    return app


@dataclass(frozen=True)
class Broker:
    """A broker that runs."""

    name: str
    url: str
    backend: str
    roots: tuple[int, ...]


@dataclass(frozen=True)
class Figures:
    """What one round measured, for each second."""

    published: float
    published_per_cpu: float
    done: float
    per_cpu: float
    broker_share: float


@asynccontextmanager
async def queen() -> AsyncIterator[Broker]:
    async with fresh_server(1) as target:
        url = f"queen://127.0.0.1:{target.port}"
        assert target.watched.server is not None
        yield Broker("queen", url, url, (target.watched.server, *target.watched.postmasters))


@asynccontextmanager
async def redis(*options: str) -> AsyncIterator[Broker]:
    port, directory = free_port(), tempfile.mkdtemp(prefix="bench-redis-")
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory, *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        await until_listening(port)
        name = "redis-fsync" if options else "redis"
        yield Broker(name, f"redis://127.0.0.1:{port}/0", f"redis://127.0.0.1:{port}/1", (process.pid,))
    finally:
        process.terminate()
        await process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def redis_fsync() -> AbstractAsyncContextManager[Broker]:
    return redis("--appendonly", "yes", "--appendfsync", "always")


@asynccontextmanager
async def rabbitmq() -> AsyncIterator[Broker]:
    port, distribution, directory = free_port(), free_port(), Path(tempfile.mkdtemp(prefix="bench-rabbitmq-"))
    environment = os.environ | {
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    process = await asyncio.create_subprocess_exec(
        RABBITMQ, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with redis() as results:
            await until_listening(port)
            yield Broker("rabbitmq", f"amqp://guest:guest@127.0.0.1:{port}//", results.backend, (process.pid,))
    finally:
        for pid in descendants(read_processes(), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await process.wait()
        shutil.rmtree(directory, ignore_errors=True)


BROKERS: Final[dict[str, tuple[str, Callable[[], AbstractAsyncContextManager[Broker]]]]] = {
    "queen": (sys.executable, queen),
    "redis": ("redis-server", redis),
    "redis-fsync": ("redis-server", redis_fsync),
    "rabbitmq": (RABBITMQ, rabbitmq),
}


async def until_listening(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def measure(broker: Broker, tasks: int, prefetch: int, results: bool) -> Figures:
    """Publish tasks, then start a worker that runs them."""
    with tempfile.TemporaryDirectory(prefix="bench-celery-") as directory:
        journal = Path(directory) / "journal"
        journal.touch()
        variables = {"BENCH_BROKER": broker.url, "BENCH_PREFETCH": str(prefetch), "BENCH_JOURNAL": str(journal)}
        if results:
            variables["BENCH_BACKEND"] = broker.backend
        os.environ.pop("BENCH_BACKEND", None)
        os.environ.update(variables)
        idle_cpu = cpu(broker)[0] + time.process_time()
        published = publish(tasks)
        publishing_cpu = cpu(broker)[0] + time.process_time() - idle_cpu
        options = ["-c", str(PROCESSES), "--loglevel", "ERROR", "-n", f"bench{prefetch}@localhost"]
        worker = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _WORKER, *options],
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(journal, int(tasks * WARM_UP), worker)
            began, before, early = time.monotonic(), cpu(broker, worker.pid), journal.stat().st_size
            wait_for(journal, tasks, worker)
            seconds, after = time.monotonic() - began, cpu(broker, worker.pid)
        finally:
            worker.terminate()
            worker.wait()
    done = tasks - early
    broker_cpu, worker_cpu = after[0] - before[0], after[1] - before[1]
    total = broker_cpu + worker_cpu
    return Figures(published, tasks / publishing_cpu, done / seconds, done / total, broker_cpu / total)


_WORKER: Final = """
import sys
from bench.celery_tasks import application
application().worker_main(["worker", *sys.argv[1:]])
"""


def publish(tasks: int) -> float:
    """Publish tasks one by one, and return how many a second."""
    app = application()
    with app.producer_or_acquire() as producer:
        app.send_task("bench.tick", (0,), producer=producer)
        began = time.monotonic()
        for number in range(1, tasks):
            app.send_task("bench.tick", (number,), producer=producer)
        rate = (tasks - 1) / (time.monotonic() - began)
    app.close()
    return rate


def wait_for(journal: Path, count: int, worker: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while journal.stat().st_size < count:
        if worker.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker has done {journal.stat().st_size} of {count} tasks")
        time.sleep(0.005)


def cpu(broker: Broker, worker: int | None = None) -> tuple[float, float]:
    """CPU seconds of the broker, and of the worker."""
    processes = read_processes()
    of_broker = set().union(*(descendants(processes, root) for root in broker.roots))
    of_worker = descendants(processes, worker)
    return sum(processes[pid].cpu_seconds for pid in of_broker), sum(processes[pid].cpu_seconds for pid in of_worker)


async def run(arguments: argparse.Namespace) -> None:
    heads = ("publish/s", "per CPU s", "tasks/s", "per CPU s")
    print(f"{'broker':12}{'prefetch':>9}{''.join(f'{head:>20}' for head in heads)}{'of it broker':>14}")
    for name in arguments.brokers.split(","):
        program, start = BROKERS[name]
        if shutil.which(program) is None:
            print(f"{name:12} is not installed ({program})")
            continue
        async with start() as broker:
            for prefetch in map(int, arguments.prefetch.split(",")):
                rounds = [
                    await asyncio.to_thread(measure, broker, arguments.tasks, prefetch, arguments.results)
                    for _ in range(arguments.rounds)
                ]
                columns = ("published", "published_per_cpu", "done", "per_cpu")
                rates = "".join(f"{spread([getattr(one, column) for one in rounds]):>20}" for column in columns)
                share = statistics.median(one.broker_share for one in rounds)
                print(f"{broker.name:12}{prefetch:>9}{rates}{share:>14.0%}", flush=True)


def spread(rates: list[float]) -> str:
    """The median, with the lowest and the highest."""
    return f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefetch", default="1,10,100")
    parser.add_argument("--brokers", default=",".join(BROKERS))
    parser.add_argument("--results", action="store_true", help="let each task store its result")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

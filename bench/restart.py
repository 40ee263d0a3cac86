"""A server that restarts with a large backlog: how long until it is ready, and how long its first pops take.

    python -m bench.restart [--partitions 1000000] [--messages 10] [--queues 100] [--rounds 5] [--pops 200]

Every partition has `--messages` messages that nobody has consumed, ten million in all unless told otherwise. Each
round starts `queen serve` on that database, waits until it is healthy and pops once from each of `--pops` partitions
chosen at random, one after the other: for each it is the first pop since the start. The same is done before with an
empty database, so that what the machine takes to start Python is known.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import time
from pathlib import Path

import aiohttp
import asyncpg

from bench.processes import Watched
from bench.target import free_port, make_directory, start_server, stop_server, until_healthy
from queen.embedded import EmbeddedPostgres

TEMPLATE = "template"
FILL = (
    "INSERT INTO queen.queues (name) SELECT 'q-' || n FROM generate_series(1, {queues}) n",
    "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at, created_at)"
    " SELECT q.id, 'p-' || n, {messages}, now(), now() FROM queen.queues q, generate_series(1, {each}) n"
    f" WHERE q.name <> '{TEMPLATE}'",
    # The same messages in all of them, which a pop does not mind.
    "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
    " SELECT p.id, 0, s.count, s.created_at, s.ids, s.body FROM queen.partitions p, queen.queues q,"
    " (SELECT s.* FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
    f" JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = '{TEMPLATE}') s"
    f" WHERE q.id = p.queue_id AND q.name <> '{TEMPLATE}'",
    "VACUUM ANALYZE",
)


async def measure(arguments: argparse.Namespace) -> None:
    directory = make_directory()
    try:
        with EmbeddedPostgres(directory / "postgres") as postgres:
            dsn = postgres.dsn()
            each = arguments.partitions // arguments.queues
            empty = [await one_start(directory, dsn, arguments, 0) for _ in range(arguments.rounds)]
            await fill(directory, dsn, arguments, each)
            filled = [await one_start(directory, dsn, arguments, each) for _ in range(arguments.rounds)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{'':28}{'ready after, s':>16}{'longest':>10}{'pop p50, ms':>14}{'p99':>8}{'longest':>10}{'memory, MB':>12}")
    show("empty", empty)
    show(f"{each * arguments.queues:,} partitions, {each * arguments.queues * arguments.messages:,} messages", filled)


class Start:
    """One start: seconds until healthy, milliseconds of the first pops, megabytes of the server."""

    def __init__(self, ready: float, pops: list[float], memory: float) -> None:
        self.ready, self.pops, self.memory = ready, pops, memory


def show(what: str, starts: list[Start]) -> None:
    ready = [start.ready for start in starts]
    pops = sorted(took for start in starts for took in start.pops)
    cells = [f"{statistics.median(ready):>16.2f}{max(ready):>10.2f}"]
    if pops:
        cells.append(f"{pops[len(pops) // 2]:>14.1f}{pops[int(len(pops) * 0.99)]:>8.1f}{pops[-1]:>10.1f}")
    else:
        cells.append(f"{'':>32}")
    print(f"{what}\n{'':28}{''.join(cells)}{max(start.memory for start in starts):>12.0f}")


async def one_start(directory: Path, dsn: str, arguments: argparse.Namespace, each: int) -> Start:
    port = free_port()
    begun = time.perf_counter()
    process = start_server(directory / "data", directory / "log", port, arguments.workers, {"DATABASE_URLS": dsn})
    try:
        await until_healthy("127.0.0.1", port, process, directory / "log")
        ready = time.perf_counter() - begun
        pops = await first_pops(port, arguments, each) if each else []
        memory = Watched(process.pid, ()).server_memory_bytes() / (1 << 20)
    finally:
        stop_server(process, None)
    return Start(ready, pops, memory)


async def first_pops(port: int, arguments: argparse.Namespace, each: int) -> list[float]:
    took = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for _ in range(arguments.pops):
            queue, partition = random.randint(1, arguments.queues), random.randint(1, each)
            begun = time.perf_counter()
            # A group of its own each time: nothing is consumed for the next round.
            path = f"/api/v1/pop/queue/q-{queue}/partition/p-{partition}?consumerGroup=g{time.time_ns()}"
            async with session.get(path) as answer:
                body = await answer.json()
                if answer.status != 200 or not body["messages"]:
                    raise RuntimeError(f"{path}: {answer.status} {body}")
            took.append((time.perf_counter() - begun) * 1000)
    return took


async def fill(directory: Path, dsn: str, arguments: argparse.Namespace, each: int) -> None:
    port = free_port()
    process = start_server(directory / "data", directory / "log", port, arguments.workers, {"DATABASE_URLS": dsn})
    try:
        await until_healthy("127.0.0.1", port, process, directory / "log")
        items = [{"queue": TEMPLATE, "payload": {"order": n}} for n in range(arguments.messages)]
        url = f"http://127.0.0.1:{port}/api/v1/push"
        async with aiohttp.ClientSession() as session, session.post(url, json={"items": items}) as answer:
            answer.raise_for_status()
    finally:
        stop_server(process, None)
    connection = await asyncpg.connect(dsn)
    for statement in FILL:
        begun = time.perf_counter()
        await connection.execute(
            statement.format(queues=arguments.queues, each=each, messages=arguments.messages), timeout=3600
        )
        print(f"{time.perf_counter() - begun:7.1f} s  {statement[:90]}", flush=True)
    await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=1_000_000, help="of all queues together")
    parser.add_argument("--messages", type=int, default=10, help="in each partition")
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5, help="how often the server is started")
    parser.add_argument("--pops", type=int, default=200, help="first pops of each start")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

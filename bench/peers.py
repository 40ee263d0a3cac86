"""Two hosts on one PostgreSQL: latency from a push on one to a long poll on the other.

`push` and `pop` are from the sending of the push to the answer of each; `after` is from one answer to the other.

python -m bench.peers [--rounds 300] [--workers 2]
"""

import argparse
import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from bench.target import free_port, make_directory, start_server, stop_server, until_healthy
from queen.embedded import EmbeddedPostgres

SECRET = "c0" * 32
WAYS = ("udp", "http", "both", "neither")
UNTOLD_ROUNDS = 12
TIMEOUT_MS = 30_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    directory = make_directory()
    try:
        with EmbeddedPostgres(directory / "postgres") as postgres:
            columns = ("rounds", "push p50", "pop p50", "pop p99", "after p50", "after p99")
            print(f"{'notified':10}" + "".join(f"{column:>11}" for column in columns) + "   ms")
            for way in WAYS:
                (directory / way).mkdir()
                rounds = UNTOLD_ROUNDS if way == "neither" else arguments.rounds
                asyncio.run(measure(postgres.dsn(), directory / way, way, rounds, arguments.workers))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def measure(dsn: str, directory: Path, way: str, rounds: int, workers: int) -> None:
    pushes: list[float] = []
    pops: list[float] = []
    async with two_hosts(dsn, directory, way, workers) as (here, there), aiohttp.ClientSession() as session:
        # The first round creates the queue; afterwards the hosts know each other.
        for number in range(rounds + 20):
            pushed, popped = await one_round(session, here, there, way)
            if number >= 20 or (way == "neither" and number >= 2):
                pushes.append(pushed)
                pops.append(popped)
            if len(pops) == rounds:
                break
    after = [popped - pushed for pushed, popped in zip(pushes, pops, strict=True)]
    figures = (
        quantile(pushes, 0.5),
        quantile(pops, 0.5),
        quantile(pops, 0.99),
        quantile(after, 0.5),
        quantile(after, 0.99),
    )
    print(f"{way:10}{rounds:11}" + "".join(f"{1000 * figure:11.2f}" for figure in figures), flush=True)


async def one_round(session: aiohttp.ClientSession, here: str, there: str, queue: str) -> tuple[float, float]:
    """Seconds from sending the push to its response, and to the response of the pop."""
    query = {"wait": "true", "timeout": str(TIMEOUT_MS), "autoAck": "true"}

    async def pop() -> float:
        async with session.get(f"{there}/api/v1/pop/queue/{queue}", params=query) as answer:
            if answer.status != 200:
                raise RuntimeError(f"pop failed with status {answer.status}: {await answer.text()}")
            return time.perf_counter()

    waiting = asyncio.create_task(pop())
    await asyncio.sleep(0.03)
    began = time.perf_counter()
    async with session.post(f"{here}/api/v1/push", json={"items": [{"queue": queue, "payload": 1}]}) as answer:
        if answer.status != 201:
            raise RuntimeError(f"push failed with status {answer.status}: {await answer.text()}")
    pushed = time.perf_counter() - began
    return pushed, await waiting - began


@asynccontextmanager
async def two_hosts(dsn: str, directory: Path, way: str, workers: int) -> AsyncIterator[tuple[str, str]]:
    tcp = [free_port(), free_port()]
    udp = [free_udp_port(), free_udp_port()]
    async with AsyncExitStack() as stack:
        for index in (0, 1):
            settings = {"DATABASE_URLS": dsn, "QUEEN_SYNC_SECRET": SECRET, "QUEEN_UDP_NOTIFY_PORT": str(udp[index])}
            if way in ("udp", "both"):
                settings["QUEEN_UDP_PEERS"] = ",".join(f"127.0.0.1:{port}" for port in udp)
            if way in ("http", "both"):
                settings["QUEEN_PEERS"] = ",".join(f"http://127.0.0.1:{port}" for port in tcp)
            log = directory / f"{index}.log"
            process = start_server(directory / str(index), log, tcp[index], workers, settings)
            stack.callback(stop_server, process, None)
            await until_healthy("127.0.0.1", tcp[index], process, log)
        yield f"http://127.0.0.1:{tcp[0]}", f"http://127.0.0.1:{tcp[1]}"


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()

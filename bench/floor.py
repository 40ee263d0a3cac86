"""What one push on one connection costs at least: the same statement behind a server that does nothing else.

    python -m bench.floor [--seconds 3] [--rounds 4] [--workers 1]

The least server reads a request, runs the statement that stores one segment with ready-made arguments, and writes a
ready-made answer: uvloop and asyncpg, no HTTP, no JSON, no check for duplicates. It, `queen serve` and one fsynced
commit of a single row take turns on one PostgreSQL; what counts are the ratios within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import asyncpg
import uvloop

from bench.generator import Generator, OptionValue
from bench.postgres import commit_p50_ms
from bench.target import Target, fresh_server
from queen.storage.statements import load_statements

QUEUE = "floor"
IDS, BODY = bytes(24), bytes(300)
RESULT = b'[{"index":0,"status":"queued","queue":"floor","partition":"least"}]'
ANSWER = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(RESULT),
    RESULT,
)


class LeastServer(asyncio.Protocol):
    """One connection, one request at a time, each of which comes in one piece."""

    def __init__(self, statement: Any, partition_id: int, offset: list[int]) -> None:
        self._statement = statement
        self._partition_id = partition_id
        self._offset = offset
        self._running: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._running = asyncio.get_running_loop().create_task(self._store())

    async def _store(self) -> None:
        await self._statement.fetch(self._partition_id, self._offset[0], 1, IDS, BODY)
        self._offset[0] += 1
        self._transport.write(ANSWER)


def serve_least(dsn: str, ports: Any) -> None:
    """The least server in a process of its own; it says on which port, and ends when it is terminated."""

    async def run() -> None:
        settings = {"jit": "off", "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
        connection = await asyncpg.connect(dsn, server_settings=settings)
        row = await connection.fetchrow(
            "SELECT p.id, p.next_offset FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = $1 AND p.name = 'least'",
            QUEUE,
        )
        assert row is not None
        statement = await connection.prepare(load_statements()["push_one"])
        offset = [row["next_offset"]]
        server = await asyncio.get_running_loop().create_server(
            lambda: LeastServer(statement, row["id"], offset), "127.0.0.1", 0
        )
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


@asynccontextmanager
async def least_server(dsn: str) -> AsyncIterator[int]:
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve_least, args=(dsn, ports), daemon=True)
    process.start()
    try:
        yield await asyncio.to_thread(ports.get, True, 30)
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


async def make_partition(target: Target) -> None:
    """The partition that the least server appends to."""
    async with aiohttp.ClientSession() as session:
        item = {"queue": QUEUE, "partition": "least", "payload": 1}
        async with session.post(f"http://{target.host}:{target.port}/api/v1/push", json={"items": [item]}) as answer:
            answer.raise_for_status()


async def push_p50_ms(port: int, seconds: float) -> float:
    options: dict[str, OptionValue] = {
        "queue": QUEUE,
        "connections": 1,
        "messages": 1,
        "partitions": 1,
        "seconds": seconds,
        "warmup": 0.5,
    }
    result = await Generator("127.0.0.1", port).run("push", options)
    if result.errors.total:
        raise RuntimeError(f"pushing failed: {result.errors.first}")
    return result.push_ms.p50


async def measure(arguments: argparse.Namespace) -> None:
    async with fresh_server(arguments.workers) as target:
        database = target.database
        assert database is not None
        await make_partition(target)
        least, ours = [], []
        print(f"{'ms, p50':>10}{'commit':>10}{'least server':>20}{'queen serve':>20}", flush=True)
        for _ in range(arguments.rounds):
            commit = await commit_p50_ms(database)
            async with least_server(database.dsn) as port:
                lowest = await push_p50_ms(port, arguments.seconds)
            own = await push_p50_ms(target.port, arguments.seconds)
            least.append(lowest / commit)
            ours.append(own / commit)
            cells = [f"{value:.2f} = {value / commit:.1f} commits" for value in (lowest, own)]
            print(f"{'':>10}{commit:>10.2f}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    print(f"median in commits: least server {statistics.median(least):.1f}, queen serve {statistics.median(ours):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each figure is measured")
    parser.add_argument("--rounds", type=int, default=4, help="how often they take turns")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

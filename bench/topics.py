"""How fast topics are: enqueue 100 a request, dequeue 100 and ack, with 1 and 1000 topics, empty and a million deep.

    python -m bench.topics [--seconds 5] [--connections 16] [--depth 1000000] [--workers 2] [--run 100] [--repeat 1]
    python -m bench.topics --redis [--rounds 3]
    python -m bench.topics --mode buffered

With --redis (or --ready, for ready queues in memory) it is about dequeueing alone: leased one by one, and from the
ready queue of a hot topic, in turns. With `--mode buffered` it is about enqueueing: a buffered namespace beside a sync
one, in turns, items per second that were answered and, with CPU for each item, until all are in PostgreSQL.

Every figure is items per second that were answered 200, and CPU time of the server and of PostgreSQL for each item,
which says more on a machine that has other work. Client, server and PostgreSQL share the machine, and a client in
Python takes a good part of it: the figures are for comparing with each other, in one run. `--run` says how many items
of a topic lie side by side in the deep ones, as if they had been enqueued by requests of so many.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import aiohttp
import asyncpg
import msgspec

from bench.target import Target, free_port, fresh_server

BATCH = 100
PAYLOAD = "x" * 256
NAMESPACE = "bench"
BUFFERED = "buffered"
REPEATED_AFTER = 50
"""Requests between one and its repetition."""


class Ref(msgspec.Struct):
    """What an ack needs of an item that was dequeued."""

    id: int
    namespace: str
    topic: str
    lease_owner: str


@dataclass(frozen=True)
class Rate:
    """Items per second, and microseconds of CPU for each."""

    items: float
    server: float
    postgres: float

    def __str__(self) -> str:
        return f"{self.items:,.0f}/s  {self.server:.0f} + {self.postgres:.0f} us"


class Load:
    """Clients on one server that do the same thing again and again."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, connections: int, seconds: float) -> None:
        self._url = f"http://{target.host}:{target.port}/api/v1/topics"
        self._session = session
        self._watched = target.watched
        self._connections = connections
        self._seconds = seconds
        self.waits: list[float] = []
        """How long dequeues took, in seconds."""
        self._decode = msgspec.json.Decoder(list[Ref]).decode
        self.refused = 0
        """Requests rejected because the buffer was full."""

    async def rate(self, step: Callable[[int], Awaitable[int]]) -> Rate:
        """How fast it is; `step` does one round trip for the topic of this number, and says how many it moved."""
        moved = 0
        before = self._watched.cpu()
        numbers = itertools.count()
        begun = time.monotonic()

        async def run() -> None:
            nonlocal moved
            while time.monotonic() - begun < self._seconds:
                done = await step(next(numbers))
                moved += done

        await asyncio.gather(*(run() for _ in range(self._connections)))
        rate = moved / (time.monotonic() - begun)
        cpu = self._watched.cpu().since(before)
        server, postgres = (seconds * 1e6 / max(moved, 1) for seconds in (cpu.server, cpu.postgres))
        return Rate(rate, server, postgres)

    def enqueue(self, topics: int, namespace: str = NAMESPACE) -> Callable[[int], Awaitable[int]]:
        bodies = [
            msgspec.json.encode([{"namespace": namespace, "topic": f"t{n}", "data": PAYLOAD} for _ in range(BATCH)])
            for n in range(topics)
        ]
        return self._enqueue(lambda number: bodies[number % topics])

    def enqueue_keyed(self, topics: int, *, twice: bool = False) -> Callable[[int], Awaitable[int]]:
        """Every item with a key; every request once more a while later, if `twice`."""

        def body(number: int) -> bytes:
            request = (number // 2 - REPEATED_AFTER if number % 2 else number // 2) if twice else number
            fields = {"namespace": NAMESPACE, "topic": f"t{request % topics}", "data": PAYLOAD}
            key = f"{begun}-{request}"
            return msgspec.json.encode([fields | {"idempotency_key": f"{key}-{n}"} for n in range(BATCH)])

        begun = time.time()
        return self._enqueue(body)

    def _enqueue(self, body: Callable[[int], bytes]) -> Callable[[int], Awaitable[int]]:
        async def step(number: int) -> int:
            async with self._session.post(f"{self._url}/enqueue", data=body(number)) as answer:
                if answer.status == 503:
                    # The buffer is full: come back when some of it is stored.
                    self.refused += 1
                    await asyncio.sleep(0.02)
                    return 0
                answer.raise_for_status()
                await answer.read()
            return BATCH

        return step

    async def buffer(self) -> None:
        body = msgspec.json.encode({"namespace": BUFFERED, "mode": "buffered"})
        async with self._session.put(f"{self._url}/modes", data=body) as answer:
            answer.raise_for_status()

    async def drained(self) -> None:
        """Wait until all accepted items are in PostgreSQL; polls rarely, because the query is expensive."""
        while True:
            async with self._session.get(f"{self._url.removesuffix('/api/v1/topics')}/metrics/prometheus") as answer:
                if "queen_topic_buffer_items 0.0" in await answer.text():
                    return
            await asyncio.sleep(0.5)

    def dequeue(self, topics: int, *, ack: bool = True) -> Callable[[int], Awaitable[int]]:
        async def step(number: int) -> int:
            query = f"namespace={NAMESPACE}&topic=t{number % topics}&limit={BATCH}"
            begun = time.monotonic()
            async with self._session.get(f"{self._url}/dequeue?{query}") as answer:
                answer.raise_for_status()
                body = await answer.read()
            self.waits.append(time.monotonic() - begun)
            items = self._decode(body)
            if items and ack:
                async with self._session.post(f"{self._url}/ack", data=msgspec.json.encode(items)) as answer:
                    answer.raise_for_status()
                    await answer.read()
            return len(items)

        return step


async def fill(target: Target, topics: int, depth: int, run: int) -> None:
    """Have so many items ready, spread over the topics, as if they had been enqueued."""
    assert target.database is not None
    connection: asyncpg.Connection[asyncpg.Record] = await target.database.connect()
    await connection.execute("TRUNCATE queen.topic_items, queen.topic_heads")
    await connection.execute(
        "INSERT INTO queen.topic_items"
        " (id, deliver_after, created_at, updated_at, topic_id, priority, is_json, payload)"
        " SELECT n, now() - interval '1 h' + n * interval '1 us', now(), now(), t.id, 0, true, convert_to($3, 'UTF8')"
        " FROM generate_series(1, $1::bigint) n JOIN queen.topics t ON t.name = 't' || n / $4::bigint % $2::bigint"
        " ORDER BY n",
        depth,
        topics,
        msgspec.json.encode(PAYLOAD).decode(),
        run,
    )
    await connection.execute(
        "INSERT INTO queen.topic_heads"
        " SELECT topic_id, priority, min(deliver_after) FROM queen.topic_items GROUP BY topic_id, priority"
    )
    await connection.execute("VACUUM ANALYZE queen.topic_items")
    await connection.execute("CHECKPOINT")
    await connection.close()


async def measure(arguments: argparse.Namespace) -> None:
    connector = aiohttp.TCPConnector(limit=arguments.connections)
    async with fresh_server(arguments.workers) as target, aiohttp.ClientSession(connector=connector) as session:
        load = Load(target, session, arguments.connections, arguments.seconds)
        print(f"{'topics':>8}{'depth':>10}{'enqueue 100':>28}{'dequeue 100 + ack':>28}   CPU of server + PostgreSQL")
        for topics in arguments.topics:
            # The first enqueues make the topics, which `fill` needs.
            await load.rate(load.enqueue(topics))
            for depth in (0, arguments.depth) * arguments.repeat:
                await fill(target, topics, depth, arguments.run)
                enqueued = await load.rate(load.enqueue(topics))
                dequeued = await load.rate(load.dequeue(topics))
                print(f"{topics:>8}{depth:>10}{enqueued!s:>28}{dequeued!s:>28}", flush=True)


async def measure_ready(arguments: argparse.Namespace) -> None:
    """One topic, with and without a ready queue; servers run in turns, as the machine is not always alike."""
    print(f"{'':>14}{'dequeue 100':>14}{'median':>10}{'dequeue 100 + ack':>20}   items/s, ms, items/s")
    async with redis_server() if arguments.redis else nullcontext("") as address:
        ways = {
            "one by one": {"TOPIC_READY_QUEUES": "off"},
            "ready queue": {"TOPIC_READY_QUEUES": "on", "REDIS_ADDRS": address},
        }
        for _ in range(arguments.rounds):
            for way, settings in ways.items():
                dequeued, wait, acked = await dequeue_rates(arguments, settings)
                print(f"{way:>14}{dequeued:>14,.0f}{wait * 1000:>10.1f}{acked:>20,.0f}", flush=True)


async def dequeue_rates(arguments: argparse.Namespace, settings: dict[str, str]) -> tuple[float, float, float]:
    connector = aiohttp.TCPConnector(limit=arguments.connections)
    async with (
        fresh_server(arguments.workers, settings) as target,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        load = Load(target, session, arguments.connections, arguments.seconds)
        await load.enqueue(1)(0)
        rates: list[float] = []
        waits: list[float] = []
        for ack in (False, True):
            await fill(target, 1, arguments.depth, arguments.run)
            # The topic becomes hot in the first moments.
            await Load(target, session, arguments.connections, 1.0).rate(load.dequeue(1, ack=ack))
            load.waits.clear()
            rates.append((await load.rate(load.dequeue(1, ack=ack))).items)
            waits = sorted(load.waits) if not ack else waits
        return rates[0], waits[len(waits) // 2], rates[1]


@asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """A redis-server of the benchmark's own; gives its address."""
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    process = await asyncio.create_subprocess_exec("redis-server", *options, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def compare(arguments: argparse.Namespace) -> None:
    """Buffered beside sync enqueues, in turns, so that whatever else the machine does harms both alike."""
    connector = aiohttp.TCPConnector(limit=arguments.connections)
    async with fresh_server(arguments.workers) as target, aiohttp.ClientSession(connector=connector) as session:
        load = Load(target, session, arguments.connections, arguments.seconds)
        await load.buffer()
        columns = ("enqueue 100", "stored", "server CPU", "PostgreSQL CPU", "refused")
        print(f"{'topics':>8}{'mode':>10}" + "".join(f"{name:>16}" for name in columns) + "   items/s, µs/item")
        for topics in (1, 1000):
            for namespace in (NAMESPACE, BUFFERED):
                await load.rate(load.enqueue(topics, namespace))
            for namespace in (NAMESPACE, BUFFERED) * 2:
                before, begun, load.refused = target.watched.cpu(), time.monotonic(), 0
                rate = (await load.rate(load.enqueue(topics, namespace))).items
                items = rate * (time.monotonic() - begun)
                await load.drained()
                stored, cpu = items / (time.monotonic() - begun), target.watched.cpu().since(before)
                mode = "buffered" if namespace == BUFFERED else "sync"
                costs = f"{cpu.server / items * 1e6:>16.1f}{cpu.postgres / items * 1e6:>16.1f}{load.refused:>16}"
                print(f"{topics:>8}{mode:>10}{rate:>16,.0f}{stored:>16,.0f}{costs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is measured")
    parser.add_argument("--connections", type=int, default=16, help="clients at a time")
    parser.add_argument("--depth", type=int, default=1_000_000, help="ready items in the deep topics")
    parser.add_argument("--run", type=int, default=BATCH, help="items of a topic that lie side by side")
    parser.add_argument("--repeat", type=int, default=1, help="how often empty and deep take turns")
    parser.add_argument("--topics", type=int, nargs="+", default=[1, 1000], help="numbers of topics")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    parser.add_argument("--redis", action="store_true", help="dequeue with and without a ready queue in Redis")
    parser.add_argument("--ready", action="store_true", help="dequeue with and without a ready queue in memory")
    parser.add_argument("--rounds", type=int, default=1, help="how often --redis and --ready compare")
    parser.add_argument("--mode", choices=("sync", "buffered"), default="sync", help="which way items go in")
    arguments = parser.parse_args()
    if arguments.mode == "buffered":
        asyncio.run(compare(arguments))
    else:
        asyncio.run(measure_ready(arguments) if arguments.redis or arguments.ready else measure(arguments))


if __name__ == "__main__":
    main()

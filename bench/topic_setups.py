"""How fast topics are on 1 and on 2 shards, with and without Redis: the same load on each, in turns.

    python -m bench.topic_setups [--seconds 5] [--connections 16] [--topics 1000] [--rounds 2]

Items per second of: enqueue 100 a request; the same with an idempotency key each; the same with every request sent
twice; dequeue 100 and ack. Each shard is a PostgreSQL of its own, on the same machine as everything else, so that two
shards show what a second one costs, not what a second machine would give. Beside each figure: CPU of the server and of
all PostgreSQL for an item, in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from contextlib import nullcontext

import aiohttp

from bench.target import sharded_server
from bench.topics import Load, redis_server

COLUMNS = ("enqueue 100", "with keys", "keys, sent twice", "dequeue 100 + ack")


async def measure(arguments: argparse.Namespace) -> None:
    print(f"{'shards':>8}{'Redis':>8}" + "".join(f"{name:>28}" for name in COLUMNS), flush=True)
    setups = list(itertools.product((1, 2), (False, True)))
    for _ in range(arguments.rounds):
        for shards, redis in setups:
            rates = await rates_of(arguments, shards, redis)
            print(f"{shards:>8}{'yes' if redis else 'no':>8}" + "".join(f"{rate:>28}" for rate in rates), flush=True)


async def rates_of(arguments: argparse.Namespace, shards: int, redis: bool) -> list[str]:
    connector = aiohttp.TCPConnector(limit=arguments.connections)
    async with (
        redis_server() if redis else nullcontext("") as address,
        sharded_server(arguments.workers, shards, {"REDIS_ADDRS": address} if redis else {}) as target,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        warm_up = Load(target, session, arguments.connections, 1.0)
        await warm_up.rate(warm_up.enqueue(arguments.topics))
        load = Load(target, session, arguments.connections, arguments.seconds)
        steps = (
            load.enqueue(arguments.topics),
            load.enqueue_keyed(arguments.topics),
            load.enqueue_keyed(arguments.topics, twice=True),
            load.dequeue(arguments.topics),
        )
        return [str(await load.rate(step)) for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is measured")
    parser.add_argument("--connections", type=int, default=16, help="clients at a time")
    parser.add_argument("--topics", type=int, default=1000, help="how many topics, spread over the shards")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    parser.add_argument("--rounds", type=int, default=2, help="how often each setup has its turn")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

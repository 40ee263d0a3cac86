"""What a noisy namespace costs a quiet one: latency of enqueue, dequeue and ack, alone and beside it.

    python -m bench.tenants [--seconds 4] [--repeat 3] [--connections 16] [--quota 6000] [--workers 2]

The quiet tenant does one thing at a time, with one item. The noisy one enqueues, dequeues and acks 100 at a time as
fast as it can, from a process of its own, and in the last column with a quota. Columns take turns, so that they meet
the same machine; what counts are the ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from bench.target import Target, fresh_server

BATCH = 100
PAYLOAD = "x" * 256
QUIET, NOISY, LIMITED = "quiet", "noisy", "limited"
STEPS = ("enqueue", "dequeue", "ack")


class Tenant:
    """One namespace with one topic, that enqueues so many items, dequeues and acks them."""

    def __init__(self, url: str, session: aiohttp.ClientSession, namespace: str, batch: int) -> None:
        self._url = f"{url}/api/v1/topics"
        self._session = session
        self._batch = batch
        self._query = f"namespace={namespace}&topic=t&limit={batch}"
        self._body = msgspec.json.encode([{"namespace": namespace, "topic": "t", "data": PAYLOAD}] * batch)

    async def step(self, took: Callable[[str, float], None]) -> None:
        """One round of all three; durations are added to `took`."""
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/enqueue", data=self._body) as answer:
            await answer.read()
            refused = answer.status == 429
        enqueued = time.perf_counter()
        took("enqueue", enqueued - began)
        if refused:
            await asyncio.sleep(0.1)
            return
        async with self._session.get(f"{self._url}/dequeue?{self._query}") as answer:
            answer.raise_for_status()
            items = msgspec.json.decode(await answer.read())
        dequeued = time.perf_counter()
        took("dequeue", dequeued - enqueued)
        if items:
            names = [{key: item[key] for key in ("id", "namespace", "topic", "lease_owner")} for item in items]
            async with self._session.post(f"{self._url}/ack", data=msgspec.json.encode(names)) as answer:
                answer.raise_for_status()
                await answer.read()
            took("ack", time.perf_counter() - dequeued)


def make_noise(url: str, namespace: str, connections: int, stop: Any, begun: Any, moved: Any) -> None:
    """The noisy tenant, in its own process; `moved` counts its items."""

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tenant = Tenant(url, session, namespace, BATCH)

            def took(step: str, seconds: float) -> None:
                begun.set()
                if step == "ack":
                    moved.value += BATCH

            async def loop() -> None:
                while not stop.is_set():
                    await tenant.step(took)

            await asyncio.gather(*(loop() for _ in range(connections)))

    asyncio.run(run())


@asynccontextmanager
async def noise(target: Target, namespace: str, connections: int) -> Any:
    """Somebody is noisy while the block runs; gives a counter of the items that were moved."""
    context = multiprocessing.get_context("spawn")
    stop, begun, moved = context.Event(), context.Event(), context.Value("l", 0)
    url = f"http://{target.host}:{target.port}"
    process = context.Process(target=make_noise, args=(url, namespace, connections, stop, begun, moved))
    process.start()
    await asyncio.to_thread(begun.wait)
    try:
        yield moved
    finally:
        stop.set()
        await asyncio.to_thread(process.join)


async def listen(target: Target, seconds: float) -> dict[str, list[float]]:
    """The latencies of the quiet tenant, each step by itself, for so long."""
    times: dict[str, list[float]] = {step: [] for step in STEPS}
    async with aiohttp.ClientSession() as session:
        tenant = Tenant(f"http://{target.host}:{target.port}", session, QUIET, 1)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await tenant.step(lambda step, took: times[step].append(took))
    return times


async def set_quota(target: Target, per_minute: int) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"http://{target.host}:{target.port}/api/v1/topics/quotas"
        async with session.put(url, json={"namespace": LIMITED, "per_minute": per_minute}) as answer:
            answer.raise_for_status()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(arguments: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, list[float]]]] = {"alone": [], NOISY: [], LIMITED: []}
    async with fresh_server(arguments.workers) as target:
        await set_quota(target, arguments.quota)
        await listen(target, 1.0)
        for _ in range(arguments.repeat):
            found["alone"].append(await listen(target, arguments.seconds))
            for namespace in (NOISY, LIMITED):
                async with noise(target, namespace, arguments.connections) as moved:
                    before, began = moved.value, time.monotonic()
                    found[namespace].append(await listen(target, arguments.seconds))
                    rate = (moved.value - before) / (time.monotonic() - began)
                print(f"{namespace} tenant: {rate:,.0f} items/s", flush=True)
    print(f"\n{'ms':>10}" + "".join(f"{name:>24}" for name in found) + "     p99 of medians over alone")
    for step in STEPS:
        alone = statistics.median(percentile(run[step], 0.99) for run in found["alone"])
        cells, ratios = [], []
        for runs in found.values():
            middle = statistics.median(percentile(run[step], 0.5) for run in runs)
            high = statistics.median(percentile(run[step], 0.99) for run in runs)
            cells.append(f"{f'p50 {middle * 1000:.1f}  p99 {high * 1000:.1f}':>24}")
            ratios.append(f"{high / alone:.1f}x")
        print(f"{step:>10}" + "".join(cells) + "     " + ", ".join(ratios[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each column is measured, each time")
    parser.add_argument("--repeat", type=int, default=3, help="how often the columns take turns")
    parser.add_argument("--connections", type=int, default=16, help="of the noisy tenant")
    parser.add_argument("--quota", type=int, default=6_000, help="items a minute that the limited tenant may enqueue")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

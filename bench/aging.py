"""Does a server that has stored much still store as fast? Pushes at full speed, slice after slice, on one server.

    python -m bench.aging [--slices 14] [--seconds 8] [--messages 1] [--workers 2]

After each slice: messages stored so far, throughput, latency, and what one message cost the server and PostgreSQL in
CPU. The first slices and the last are compared at the end; the machine's own moods show in both layers alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from bench.generator import Generator, OptionValue
from bench.processes import Usage
from bench.target import fresh_server

QUEUE = "aging"


async def measure(arguments: argparse.Namespace) -> None:
    options: dict[str, OptionValue] = {
        "queue": QUEUE,
        "connections": 64,
        "messages": arguments.messages,
        "partitions": 16,
        "seconds": arguments.seconds,
        "warmup": 0.3,
    }
    stored, speeds, costs = 0, [], []
    async with fresh_server(arguments.workers) as target:
        print(
            f"{'stored':>12}{'msg/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'server µs':>12}{'PostgreSQL µs':>16}", flush=True
        )
        for _ in range(arguments.slices):
            usage = Usage(target.watched)
            result = await Generator("127.0.0.1", target.port).run("push", options, usage.start, usage.stop)
            if result.errors.total or usage.cpu is None:
                raise RuntimeError(f"pushing failed: {result.errors.first}")
            stored += result.total_pushed
            speeds.append(result.messages_per_s)
            costs.append(usage.cpu.postgres / result.messages * 1e6)
            latency = result.push_ms
            print(
                f"{stored:>12,}{result.messages_per_s:>10,.0f}{latency.p50:>9.2f}{latency.p99:>9.2f}"
                f"{usage.cpu.server / result.messages * 1e6:>12.1f}{costs[-1]:>16.1f}",
                flush=True,
            )
    few = max(1, arguments.slices // 4)
    for what, values in (("throughput", speeds), ("PostgreSQL's CPU per message", costs)):
        ratio = statistics.median(values[-few:]) / statistics.median(values[:few])
        print(f"{what}: the last {few} over the first {few} slices, medians: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=14, help="how many in a row")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each is measured")
    parser.add_argument("--messages", type=int, default=1, help="messages of a request")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

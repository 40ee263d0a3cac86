"""The work that `bench/client.py` has each client do; runs with whichever `queen` its interpreter has.

python -m bench.client_work consume http://127.0.0.1:6632 some-queue 50000
"""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import sys
import time
import urllib.request
from typing import Any

BATCH = 100
BUFFERED = 500


def main() -> None:
    workload, url, queue, count = sys.argv[1:5]
    asyncio.run({"consume": consume, "produce": produce}[workload](url, queue, int(count)))


async def consume(url: str, queue: str, count: int) -> None:
    """Consume messages that are there already."""
    fill(url, queue, count)
    async with importlib.import_module("queen").Queen(url) as queen:
        got = 0

        async def handle(messages: list[dict[str, Any]]) -> None:
            nonlocal got
            for message in messages:
                assert message["data"]["order"] >= 0
            got += len(messages)

        clock = Clock()
        await queen.queue(queue).batch(BATCH).limit(count).consume(handle)
        rate = clock.read(count)
        assert got == count, (got, count)
    print(rate)


async def produce(url: str, queue: str, count: int) -> None:
    """Push one message at a time, as the documentation shows it, and wait until all are with the server."""
    async with importlib.import_module("queen").Queen(url) as queen:
        clock = Clock()
        for number in range(count):
            await (
                queen.queue(queue)
                .buffer({"message_count": BUFFERED, "time_millis": 1000})
                .push([{"data": order(number)}])
            )
        await queen.flush_all_buffers()
        rate = clock.read(count)
        seen = await queen.admin.get_queue(queue)
        assert seen["totals"]["total"] == count, seen["totals"]
    print(rate)


class Clock:
    """Elapsed and CPU time of this process since creation."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds()
        self._begun = time.perf_counter()

    def read(self, messages: int) -> str:
        seconds = time.perf_counter() - self._begun
        return json.dumps({"messages": messages, "cpu_seconds": cpu_seconds() - self._cpu, "seconds": seconds})


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fill(url: str, queue: str, count: int) -> None:
    """Push without either client."""
    for begin in range(0, count, 1000):
        items = [{"queue": queue, "payload": order(number)} for number in range(begin, min(begin + 1000, count))]
        body = json.dumps({"items": items}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/api/v1/push", body)) as answer:
            answer.read()


def order(number: int) -> dict[str, Any]:
    """A payload of about 200 bytes."""
    return {
        "order": number,
        "customer": f"customer-{number % 1000}",
        "items": [{"sku": f"sku-{number % 77}", "quantity": 2, "price": 19.99}],
        "address": {"street": "Long Street 12", "city": "Springfield", "country": "US"},
        "paid": number % 3 == 0,
    }


if __name__ == "__main__":
    main()

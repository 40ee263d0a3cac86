"""A stream that counts, and the truth it has to come to.

Run as a program, by an interpreter with this project or with the published client, it counts until it is killed, and
says on its output whenever it has looked at a message:
    python -m tests.streams.counting http://127.0.0.1:6632
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from queen.streams import Stream

QUERY = "counts"
_FAR_AWAY_MS = 10_000_000


def counting(look: Callable[[], object] = lambda: None, source: Any = "in", **options: Any) -> Stream:
    """Counts per key in windows of ten seconds of event time."""

    def key(message: Any) -> Any:
        look()
        return message["data"]["k"]

    return (
        Stream.from_(source)
        .key_by(key)
        .window_tumbling(seconds=10, event_time=lambda message: message["data"]["at"], **options)
        .aggregate({"count": lambda value: 1, "sum": lambda value: value["n"]})
        .map(lambda value, context: {"k": context["key"], "start": context["windowStart"], **value})
        .to({"queueName": "out"})
    )


def events(partitions: int, rounds: int, keys: str = "ab") -> dict[str, list[dict[str, Any]]]:
    """For each partition, an event of every key each second, and a last one that closes all windows before it."""
    return {
        f"p{partition}": [
            {"k": f"{key}{partition}", "at": number * 1000, "n": 1} for number in range(rounds) for key in keys
        ]
        + [{"k": "end", "at": _FAR_AWAY_MS, "n": 1}]
        for partition in range(partitions)
    }


def truth(pushed: Iterable[list[dict[str, Any]]]) -> Counter[tuple[str, int]]:
    """What is to be counted in the windows that are closed."""
    return Counter(
        (event["k"], event["at"] // 10_000 * 10_000)
        for several in pushed
        for event in several
        if event["at"] < _FAR_AWAY_MS
    )


def counts(emitted: Iterable[Any]) -> Counter[tuple[str, int]]:
    """What was counted; a window that was emitted twice is counted twice."""
    total: Counter[tuple[str, int]] = Counter()
    for one in emitted:
        total[one["k"], one["start"]] += one["count"]
    return total


async def main(url: str) -> None:
    client = getattr(importlib.import_module("queen"), "Queen", None)
    source = client(url).queue("in") if client else "in"
    stream = counting(lambda: print("looked", flush=True), source)
    await stream.run(QUERY, url, batch_size=9, max_partitions=2, max_wait_millis=200)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

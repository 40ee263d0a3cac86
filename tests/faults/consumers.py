"""Consumers of one group that pop and ack whatever happens to the server, and check what they are given."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.faults.load import Client
from tests.support.ageing import until


class Record:
    """What the consumers of one group were given and what they acked. Payloads are numbered from 0 per partition."""

    def __init__(self) -> None:
        self.given: defaultdict[str, int] = defaultdict(int)
        """By partition, the number of messages that were given to somebody: all below it were."""
        self.redelivered = 0
        self._acked_at: dict[tuple[str, int], float] = {}

    def note_given(self, messages: list[dict[str, Any]], asked_at: float) -> None:
        by_partition: defaultdict[str, list[int]] = defaultdict(list)
        for message in messages:
            by_partition[message["partition"]].append(message["data"])
        for partition, numbers in by_partition.items():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "out of order or with a gap"
            assert numbers[0] <= self.given[partition], f"{partition}: skipped to {numbers[0]}"
            for number in numbers:
                acked_at = self._acked_at.get((partition, number))
                assert acked_at is None or acked_at > asked_at, f"{partition}: {number} was acked, and given again"
            self.redelivered += max(0, self.given[partition] - numbers[0])
            self.given[partition] = max(self.given[partition], numbers[-1] + 1)

    def note_acked(self, message: dict[str, Any]) -> None:
        self._acked_at.setdefault((message["partition"], message["data"]), time.monotonic())

    async def until_given(self, counts: dict[str, int]) -> None:
        """Until every message, of so many in each partition, has been given to somebody."""
        await until(lambda: all(self.given[partition] >= count for partition, count in counts.items()))
        assert dict(self.given) == counts


class Consumer(Client):
    """Pops a few messages of a few partitions, and acks them all."""

    def __init__(self, url: str, queue: str, group: str, record: Record, batch: int = 7, partitions: int = 2) -> None:
        super().__init__(url)
        self._queue = queue
        self._group = group
        self._record = record
        self._query = {"batch": batch, "partitions": partitions, "wait": True, "timeout": 500}

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            asked_at = time.monotonic()
            path = f"/api/v1/pop/queue/{self._queue}"
            answer = await self.attempt("GET", path, consumerGroup=self._group, **self._query)
            if answer is None:
                await asyncio.sleep(0.05)
            elif answer.body:
                self._record.note_given(answer.body["messages"], asked_at)
                await self._ack(answer.body["messages"])

    async def _ack(self, messages: list[dict[str, Any]]) -> None:
        body = {
            "consumerGroup": self._group,
            "acknowledgments": [
                {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "completed"}
                for message in messages
            ],
        }
        answer, attempts = await self.persist("POST", "/api/v1/ack/batch", body)
        for message, result in zip(messages, answer.body, strict=True):
            if result["success"]:
                self._record.note_acked(message)
            else:
                # Its lease ran out while the server was away; then the message is given again.
                assert attempts > 1 or self.slowest > 1, result


@asynccontextmanager
async def consuming(consumers: Sequence[Consumer]) -> AsyncIterator[None]:
    """The consumers consume while the block runs."""
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(consumer.run(stop))
            try:
                yield
            finally:
                stop.set()
    finally:
        for consumer in consumers:
            await consumer.close()

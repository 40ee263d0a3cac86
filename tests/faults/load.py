"""Clients that go on whatever happens to the server, and remember what they were answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.ageing import until
from tests.support.api import Answer, Api
from tests.support.database import Connection, Stored, stored_messages

SHARED = "shared"
_BACKOFF_SECONDS = 0.05
_PATIENCE_SECONDS = 100.0


class Client:
    """One HTTP client. A request that failed is sent again, as it was, until it is answered."""

    def __init__(self, url: str) -> None:
        self._api = Api(url)
        self.failures: Counter[str] = Counter()
        self.slowest = 0.0

    async def persist(self, method: str, path: str, body: object = None, **query: Any) -> tuple[Answer, int]:
        """The answer, and how many times the request was sent."""
        attempts = 0
        while True:
            attempts += 1
            answer = await self.attempt(method, path, body, **query)
            if answer is not None:
                return answer, attempts
            await asyncio.sleep(_BACKOFF_SECONDS)

    async def attempt(self, method: str, path: str, body: object = None, **query: Any) -> Answer | None:
        """The answer; None when the server could not be reached, or asked to try later."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self._api.call(method, path, body, **query)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.failures[type(error).__name__] += 1
            return None
        finally:
            self.slowest = max(self.slowest, time.monotonic() - begun)
        if answer.status == 503:
            assert answer.headers.get("Retry-After"), "whoever is sent away is told when to come back"
            self.failures["503"] += 1
            return None
        assert answer.status < 300, answer
        return answer

    async def close(self) -> None:
        await self._api.close()


class Producer(Client):
    """Pushes numbered messages, in each request some to a partition of its own and some to one shared by all."""

    def __init__(self, url: str, name: str, queue: str, per_request: int = 3, padding: int = 0) -> None:
        super().__init__(url)
        self.name = name
        self.queue = queue
        self.partitions: tuple[str, ...] = (name, SHARED)
        self.answered: defaultdict[str, list[str]] = defaultdict(list)
        """The transaction ids that were answered, by partition, in the order they were sent."""
        self.message_ids: dict[tuple[str, str], str] = {}
        self._per_request = per_request
        self._padding = "x" * padding
        self._sent = 0
        self.requests = 0
        """How many requests were answered."""
        self.buffered = 0
        """How many of them by the spool."""

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.push_once()

    async def push_once(self) -> None:
        items = self._items()
        answer, attempts = await self.persist("POST", "/api/v1/push", {"items": items})
        statuses = {result["status"] for result in answer.body}
        assert statuses <= {"queued", "duplicate", "buffered"}, answer.body
        assert len(statuses) == 1, f"a request was stored in part: {answer.body}"
        # Sent once and never before, it cannot be a duplicate, however often the server had to try.
        assert attempts > 1 or "duplicate" not in statuses, answer.body
        self.requests += 1
        self.buffered += statuses == {"buffered"}
        for item, result in zip(items, answer.body, strict=True):
            self.answered[item["partition"]].append(item["transactionId"])
            # Of what was sent more than once, an earlier attempt may be the one that is stored.
            if "message_id" in result and (attempts == 1 or statuses != {"buffered"}):
                self.message_ids[item["partition"], item["transactionId"]] = result["message_id"]

    def _items(self) -> list[dict[str, Any]]:
        first = self._sent * self._per_request
        self._sent += 1
        return [
            {
                "queue": self.queue,
                "partition": partition,
                "transactionId": f"{self.name}/{number}",
                "payload": {"client": self.name, "number": number, "padding": self._padding},
            }
            for number in range(first, first + self._per_request)
            for partition in self.partitions
        ]


@asynccontextmanager
async def pushing(producers: Sequence[Producer]) -> AsyncIterator[None]:
    """The producers push while the block runs; afterwards everything they sent has been answered."""
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            for producer in producers:
                group.create_task(producer.run(stop))
            try:
                yield
            finally:
                stop.set()
    finally:
        for producer in producers:
            await producer.close()


async def answered(producers: Iterable[Producer], requests: int) -> None:
    """Until each producer has been answered this many more requests."""
    goals = {producer: producer.requests + requests for producer in producers}
    await until(lambda: all(producer.requests >= goal for producer, goal in goals.items()))


async def check_stored(connection: Connection, producers: Sequence[Producer]) -> None:
    """Everything answered lies in the database once, in order, under the id that was answered; and nothing else."""
    queue = producers[0].queue
    for partition in {name for producer in producers for name in producer.partitions}:
        expected = sum(len(producer.answered[partition]) for producer in producers)
        stored = await stored_when_replayed(connection, queue, partition, expected)
        assert len(stored) == expected
        for producer in producers:
            own = [message for message in stored if message.transaction_id.startswith(f"{producer.name}/")]
            assert [message.transaction_id for message in own] == producer.answered[partition]
            for message in own:
                answered_id = producer.message_ids.get((partition, message.transaction_id), message.id)
                assert message.id == answered_id


async def stored_when_replayed(
    connection: Connection, queue: str, partition: str, expected: int, seconds: float = 30.0
) -> list[Stored]:
    """What a partition holds, as soon as it is as much as expected, or when nothing came from a spool for so long."""
    count, give_up = 0, time.monotonic() + seconds
    while True:
        stored = await stored_messages(connection, queue, partition)
        if len(stored) > count:
            count, give_up = len(stored), time.monotonic() + seconds
        if len(stored) >= expected or time.monotonic() > give_up:
            return stored
        await asyncio.sleep(0.1)


async def check_delivered(url: str, producers: Sequence[Producer], group: str = "fresh") -> None:
    """A group that starts now is given everything that was answered once, in order."""
    delivered: defaultdict[str, list[str]] = defaultdict(list)
    api = Api(url)
    try:
        while messages := await api.pop(
            producers[0].queue, batch=1000, partitions=100, autoAck=True, consumerGroup=group
        ):
            for message in messages:
                data = message["data"]
                assert message["transactionId"] == f"{data['client']}/{data['number']}"
                delivered[message["partition"]].append(message["transactionId"])
    finally:
        await api.close()
    for producer in producers:
        for partition in producer.partitions:
            own = [id for id in delivered[partition] if id.startswith(f"{producer.name}/")]
            assert own == producer.answered[partition]
            assert own == [f"{producer.name}/{number}" for number in range(len(own))]

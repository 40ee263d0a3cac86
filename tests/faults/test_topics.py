"""Topics while workers and PostgreSQL are killed: nothing answered is lost, nothing acked comes back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.faults.conftest import Victim
from tests.faults.load import Client
from tests.faults.test_kill_postgres import kill_postgres
from tests.faults.test_kill_worker import kill_a_worker
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import Proxy
from tests.support.topic_api import item

TOPIC = {"namespace": "ns", "topic": "jobs"}


class Enqueuer(Client):
    """Enqueues numbered items with keys, and remembers what was answered."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self.name = name
        self.ids: dict[int, str] = {}
        self._number = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            keys = [f"{self.name}/{self._number + n}" for n in range(3)]
            self._number += 3
            items = [TOPIC | {"data": key, "idempotency_key": key, "priority": n} for n, key in enumerate(keys)]
            answer, _ = await self.persist("POST", "/enqueue", items)
            assert len(answer.body) == len(items)
            for key, id in zip(keys, answer.body, strict=True):
                assert self.ids.setdefault(id, key) == key, "an id was given twice"
            await asyncio.sleep(0.005)


class Consumer(Client):
    """Dequeues and acks, and remembers both."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.given: list[tuple[int, str]] = []
        self.acked: Counter[int] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            answer = await self.attempt("GET", "/dequeue", **TOPIC, limit=20, wait=True, timeout=300, lease=3)
            if answer is None or not answer.body:
                await asyncio.sleep(0.02)
                continue
            items: list[dict[str, Any]] = answer.body
            assert [one["priority"] for one in items] == sorted(one["priority"] for one in items)
            for one in items:
                assert not self.acked[one["id"]], "it was acked, and given again"
                self.given.append((one["id"], one["data"]))
            refs = [TOPIC | {"id": one["id"], "lease_owner": one["lease_owner"]} for one in items]
            acked = await self.attempt("POST", "/api/v1/topics/ack", refs)
            if acked is not None:
                self.acked.update(result["id"] for result in acked.body if result["success"])


async def survive(victim: Victim, *faults: Callable[[], Awaitable[None]]) -> None:
    """Enqueue and consume while the faults happen: all that was answered is given, all that was acked is gone."""
    producers = [Enqueuer(victim.url, f"p{number}") for number in range(3)]
    consumers = [Consumer(victim.url) for _ in range(3)]
    producing, consuming = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for producer in producers:
            group.create_task(producer.run(producing))
        for consumer in consumers:
            group.create_task(consumer.run(consuming))
        for fault in faults:
            count = len(_answered(producers)) + 60
            await until(partial(_enqueued, producers, count))
            await fault()
        count = len(_answered(producers)) + 60
        await until(partial(_enqueued, producers, count))
        producing.set()
        await until(partial(_all_given, producers, consumers))
        consuming.set()
    for client in (*producers, *consumers):
        await client.close()
    answered = _answered(producers)
    given = [one for consumer in consumers for one in consumer.given]
    assert set(answered) <= {id for id, _ in given}
    assert len({data for _, data in given}) == len({id for id, _ in given}), "a key was stored twice"
    acked = sum((consumer.acked for consumer in consumers), Counter())
    assert max(acked.values()) == 1
    async with victim.connection() as connection:
        left = {row["id"] for row in await connection.fetch("SELECT id FROM queen.topic_items")}
        assert not left & set(acked)


def _answered(producers: list[Enqueuer]) -> dict[int, str]:
    return {int(id): key for producer in producers for id, key in producer.ids.items()}


def _enqueued(producers: list[Enqueuer], count: int) -> bool:
    return len(_answered(producers)) >= count


def _all_given(producers: list[Enqueuer], consumers: list[Consumer]) -> bool:
    return set(_answered(producers)) <= {id for consumer in consumers for id, _ in consumer.given}


@pytest.mark.soak
async def test_topics_survive_the_death_of_workers(victim: Victim) -> None:
    chance = random.Random(1)
    await survive(victim, *[partial(kill_a_worker, victim, chance)] * 2)


@pytest.mark.soak
async def test_topics_survive_the_death_of_postgres(victim: Victim) -> None:
    api = Api(victim.url)
    await survive(victim, partial(kill_postgres, victim, api, children_too=True))
    await api.close()


@pytest.mark.parametrize("query", [{"topic": "t"}, {}], ids=["one topic", "many"])
async def test_dequeues_that_wait_outlive_an_absence_of_postgres(
    start_server: StartServer, proxy: Proxy, query: dict[str, Any]
) -> None:
    api = await start_server(database_urls=(proxy.dsn,), pop_safety_poll_ms=100)
    path = "/api/v1/topics/dequeue" if query else "/api/v1/topics/dequeue/many"
    parked = asyncio.create_task(api.call("GET", path, namespace="ns", wait="true", timeout=100_000, **query))
    assert api.worker is not None
    topics = api.worker.broker.topics
    await until(lambda: len(topics.dequeuer.waiting) + len(topics.multi_dequeuer.waiting) == 1)
    # Only those that have waited for a while go on waiting.
    await asyncio.sleep(1.0)
    async with proxy.away():
        # What the last safety poll has seen is out of date after this.
        await asyncio.sleep(0.2)
        for _ in range(3):
            # As a timer, or news of another worker, would do.
            topics.dequeuer.wake_all()
            topics.multi_dequeuer.wake_all()
            refused = await api.call("GET", path, namespace="ns", **query)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert not parked.done()
    async with asyncio.timeout(100):
        late = item("late", "t", "ns", idempotency_key="late")
        while True:
            if (await api.call("POST", "/api/v1/topics/enqueue", [late])).status == 200:
                break
            await asyncio.sleep(0.1)
        answer = await parked
    assert answer.status == 200
    assert [one["data"] for one in answer.body] == ["late"]

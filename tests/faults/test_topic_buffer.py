"""Buffered namespaces while servers and PostgreSQL die: what was answered is served, and nothing twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.faults.load import Client
from tests.faults.test_spool import SETTINGS
from tests.faults.test_topics import TOPIC, Consumer
from tests.support.ageing import broker_of, until
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.host import Host, host
from tests.support.proxy import Proxy
from tests.support.topic_api import TopicApi, item

PER_REQUEST = 3


class Enqueuer(Client):
    """Enqueues items without keys, and remembers the ids that were answered."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self.name = name
        self.ids: dict[int, str] = {}
        self._number = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.enqueue_once()
            await asyncio.sleep(0.005)

    async def enqueue_once(self) -> None:
        names = [f"{self.name}/{self._number + n}" for n in range(PER_REQUEST)]
        self._number += PER_REQUEST
        items = [TOPIC | {"data": name, "priority": n} for n, name in enumerate(names)]
        answer, _ = await self.persist("POST", "/enqueue", items)
        for name, id in zip(names, answer.body, strict=True):
            assert self.ids.setdefault(id, name) == name, "an id was given twice"


async def buffer(url: str) -> None:
    client = Client(url)
    await client.persist("PUT", "/api/v1/topics/modes", {"namespace": TOPIC["namespace"], "mode": "buffered"})
    await client.close()


def answered(producers: list[Enqueuer]) -> dict[int, str]:
    return {id: name for producer in producers for id, name in producer.ids.items()}


def given(consumers: list[Consumer]) -> set[int]:
    return {id for consumer in consumers for id, _ in consumer.given}


async def survive(server: Host, connection: Connection, *faults: Callable[[], Awaitable[None]]) -> None:
    """Enqueue and consume while the faults happen: all that was answered is given, all that was acked stays gone."""
    producers = [Enqueuer(server.url, f"p{number}") for number in range(3)]
    consumers = [Consumer(server.url) for _ in range(2)]
    producing, consuming = asyncio.Event(), asyncio.Event()

    def enqueued(count: int) -> bool:
        return len(answered(producers)) >= count

    async with asyncio.TaskGroup() as group:
        for producer in producers:
            group.create_task(producer.run(producing))
        for consumer in consumers:
            group.create_task(consumer.run(consuming))
        for fault in faults:
            await until(partial(enqueued, len(answered(producers)) + 90))
            await fault()
        await until(partial(enqueued, len(answered(producers)) + 90))
        producing.set()
        await until(lambda: set(answered(producers)) <= given(consumers))
        consuming.set()
    for client in (*producers, *consumers):
        await client.close()
    everything = dict(one for consumer in consumers for one in consumer.given)
    for id, name in answered(producers).items():
        assert everything[id] == name
    # A request whose answer was lost may have been stored, and is sent again: whole, never in part.
    copies = Counter(everything.values())
    for producer in producers:
        requests = {name: int(name.rpartition("/")[2]) // PER_REQUEST for name in producer.ids.values()}
        for number in set(requests.values()):
            assert len({copies[name] for name, own in requests.items() if own == number}) == 1
    acked = sum((consumer.acked for consumer in consumers), Counter())
    assert max(acked.values()) == 1
    left = {row["id"] for row in await connection.fetch("SELECT id FROM queen.topic_items")}
    assert not left & set(acked)


@pytest.mark.soak
async def test_servers_killed_between_the_log_and_postgres_lose_nothing_and_store_nothing_twice(
    dsn: str, connection: Connection, tmp_path: Path
) -> None:
    chance = random.Random(3)

    async def kill_a_worker() -> None:
        await asyncio.sleep(chance.random() * 0.05)
        server.kill_a_worker(chance)

    async def kill_all() -> None:
        await asyncio.sleep(chance.random() * 0.05)
        server.kill()
        server.start()
        await server.ready()

    with host(dsn, tmp_path / "host", **SETTINGS) as server:
        server.start()
        await server.ready()
        await buffer(server.url)
        await survive(server, connection, kill_all, kill_a_worker, kill_a_worker, kill_all, kill_a_worker, kill_all)
        assert (tmp_path / "host" / "spool" / "topics").is_dir()


async def test_what_was_buffered_when_the_host_died_is_stored_at_its_next_start_and_a_torn_end_is_cut(
    proxy: Proxy, connection: Connection, tmp_path: Path
) -> None:
    with host(proxy.dsn, tmp_path / "host", **SETTINGS) as server:
        server.start()
        await server.ready()
        await buffer(server.url)
        producer = Enqueuer(server.url, "p")
        await producer.enqueue_once()
        async with proxy.away():
            for _ in range(20):
                await producer.enqueue_once()
            server.kill()
        files = list((tmp_path / "host" / "spool" / "topics").rglob("*.buf*"))
        assert files
        for path in files:
            content = path.read_bytes()
            path.write_bytes(content + content[24:60])
            # One that was finished before the kill becomes one that was not: they differ in their names alone.
            path.rename(path.with_name(path.name.removesuffix(".tmp") + ".tmp"))
        server.start()
        await server.ready()
        consumer = Consumer(server.url)
        stop = asyncio.Event()
        consuming = asyncio.create_task(consumer.run(stop))
        await until(lambda: set(producer.ids) <= given([consumer]))
        stop.set()
        await consuming
        assert sorted(consumer.given) == sorted(producer.ids.items())
        api = Api(server.url)
        scraped = (await api.call("GET", "/metrics/prometheus")).body
        assert f"queen_topic_wal_damaged_total {len(files)}.0" in scraped
        for client in (producer, consumer, api):
            await client.close()


def has_lost(proxy: Proxy, answers: int) -> bool:
    return proxy.lost_answers >= answers


async def test_a_flush_whose_outcome_is_unknown_is_not_made_twice(
    start_server: StartServer, proxy: Proxy, connection: Connection
) -> None:
    topics = TopicApi(
        await start_server(database_urls=(proxy.dsn,), namespace_modes=(("ns", "buffered"),), db_away_ms=500)
    )
    await topics.enqueue(item("first"))
    (first,) = await topics.dequeue(wait=True)
    assert await topics.ack(first) == [True]
    for round in range(3):
        proxy.lose_answers(1, of=lambda sent: b"COMMIT" in sent)
        await topics.enqueue(item(round))
        await until(partial(has_lost, proxy, round + 1))
        # Served and acked while the flusher does not know yet that it was stored.
        async with asyncio.timeout(100):
            id = None
            while id is None:
                id = await connection.fetchval("DELETE FROM queen.topic_items RETURNING id")
    await topics.enqueue(item("last"))
    async with asyncio.timeout(100):
        while True:
            answer = await topics.call("GET", "/dequeue", namespace="ns", topic="t", wait=True)
            if answer.status == 200 and answer.body:
                break
            await asyncio.sleep(0.05)
    assert [one["data"] for one in answer.body] == ["last"]


async def test_a_dequeue_that_waits_is_woken_by_a_flush_whose_outcome_is_unknown(
    start_server: StartServer, proxy: Proxy
) -> None:
    api = await start_server(database_urls=(proxy.dsn,), namespace_modes=(("ns", "buffered"),))
    topics = TopicApi(api)
    await topics.enqueue(item("first"))
    (first,) = await topics.dequeue(wait=True)
    assert await topics.ack(first) == [True]
    waiting = asyncio.create_task(topics.dequeue(wait=True, timeout=60_000))
    await until(lambda: len(broker_of(api).topics.dequeuer.waiting) == 1)
    proxy.lose_answers(1, of=lambda sent: b"COMMIT" in sent)
    await topics.enqueue(item("second"))
    async with asyncio.timeout(30):
        assert [one["data"] for one in await waiting] == ["second"]
    assert proxy.lost_answers == 1


async def test_two_hosts_buffer_for_the_same_namespace_and_agree_on_keys(
    start_server: StartServer, connection: Connection, tmp_path: Path
) -> None:
    hosts = [
        TopicApi(await start_server(queen_data_dir=tmp_path / f"host{number}", namespace_modes=(("ns", "buffered"),)))
        for number in range(2)
    ]

    async def send(number: int) -> list[int]:
        plain = await hosts[number % 2].enqueue(item(number), item(number))
        return plain + await hosts[number % 2].enqueue(item("keyed", idempotency_key="same"))

    answers: list[list[int]] = await asyncio.gather(*(send(number) for number in range(50)))
    assert len({ids[2] for ids in answers}) == 1
    ids = {id for ids in answers for id in ids}
    assert len(ids) == 101
    async with asyncio.timeout(100):
        while True:
            if await connection.fetchval("SELECT count(*) FROM queen.topic_items") == 101:
                break
            await asyncio.sleep(0.02)
    assert {row["id"] for row in await connection.fetch("SELECT id FROM queen.topic_items")} == ids

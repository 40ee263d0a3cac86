"""The event stream: counters every second, changes as they happen, and listeners that come, lag and go."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from queen.broker.events import EventKind, named
from queen.broker.heartbeat import Mode
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.proxy import Proxy
from tests.support.topic_api import NAMESPACE, TOPIC, TopicApi, item


class Stream:
    """The events of one listener."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self, kind: str) -> Any:
        """The data of the next event of a kind; others are passed over."""
        async with asyncio.timeout(100):
            name = ""
            async for raw in self.answer.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and name == kind:
                    return msgspec.json.decode(line.removeprefix("data: "))
        raise AssertionError(f"the stream ended before an event {kind!r}")

    async def until(self, kind: str, **wanted: Any) -> Any:
        """The first event of a kind with these values."""
        while True:
            data = await self.next(kind)
            if all(data[key] == value for key, value in wanted.items()):
                return data


@asynccontextmanager
async def listening(api: Api, **query: Any) -> AsyncIterator[Stream]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{api.url}/api/v1/events", params=query, headers=api.headers) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield Stream(answer)


def listeners(api: Api) -> int:
    assert api.worker is not None
    return api.worker.live.listeners


async def test_counters_come_at_once_and_go_on(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    await api.pop("q", autoAck=True, batch=2)
    async with listening(api) as stream:
        first = await stream.next("counters")
        assert first["totals"]["pushMessages"] == 3
        assert first["totals"]["popMessages"] == first["totals"]["ackMessages"] == 2
        assert first["shards"] == [{"shard": 0, "up": True, "reason": ""}]
        assert first["maintenance"] == {"push": False, "pop": False}
        assert first["spool"] == {"messages": 0, "bytes": 0, "failed": 0}
        assert [worker["workerId"] for worker in first["workers"]] == [0]
        await api.push("q", *range(10))
        while not (busy := await stream.next("counters"))["queues"]:
            pass
        assert busy["queues"][0]["queue"] == "q"
        assert busy["queues"][0]["push"] > 0
        assert busy["rates"]["push"] > 0
        while (depth := (await stream.next("counters"))["depth"])["stored"] != 13:
            pass
        assert {key: depth[key] for key in ("queues", "partitions", "pending", "deadLetters")} == {
            "queues": 1,
            "partitions": 1,
            "pending": 11,
            "deadLetters": 0,
        }


@pytest.mark.parametrize("workers", [1, 2])
async def test_changes_are_sent_to_the_listeners_of_every_worker(start_server: StartServer, workers: int) -> None:
    servers = [await start_server(worker_id=number, num_workers=workers) for number in range(workers)]
    here, there = servers[0], servers[-1]
    topics = TopicApi(here)
    async with listening(there) as stream:
        await stream.next("counters")
        await here.push("q", 1)
        await stream.until("queue", queue="q", change="created")
        await here.configure("q", leaseTime=5)
        await stream.until("queue", queue="q", change="changed")
        await here.call("POST", "/api/v1/resources/queues/q/pause")
        await stream.until("queue", queue="q", change="changed")
        await here.call("POST", "/api/v1/resources/queues/q/resume")
        await here.pop("q", consumerGroup="g")
        await here.call("POST", "/api/v1/consumer-groups/g/queues/q/seek", {"toEnd": True})
        await stream.until("group", group="g")
        await topics.enqueue(item(1))
        await topics.configure(max_retries=1)
        await stream.until("topic", namespace=NAMESPACE, topic=TOPIC)
        await topics.good("PUT", "/quotas", {"namespace": NAMESPACE, "per_minute": 100})
        await stream.until("quota", namespace=NAMESPACE)
        assert here.worker is not None
        await here.worker.broker.switch(Mode.POP_MAINTENANCE, True)
        await stream.until("maintenance", push=False, pop=True)
        await here.call("DELETE", "/api/v1/resources/queues/q")
        await stream.until("queue", queue="q", change="deleted")


async def test_a_change_without_a_notification_is_sent(api: Api, connection: Connection) -> None:
    await api.push("q", 1)
    async with listening(api) as stream:
        await stream.next("counters")
        await connection.execute("INSERT INTO queen.queues (name) VALUES ('by hand')")
        await stream.until("queue", queue="by hand")


async def test_dead_letters_are_sent(api: Api) -> None:
    await api.configure("q", retryLimit=0)
    await api.push("q", 1, 2)
    async with listening(api) as stream:
        await stream.next("counters")
        await api.ack(await api.pop("q", batch=2), "failed")
        told = await stream.next("deadLetter")
        assert told["queue"] == "q"
        assert (await stream.until("counters"))["totals"]["deadLetters"] >= told["count"] > 0


async def test_an_outage_of_postgresql_and_its_end_are_sent(start_server: StartServer, proxy: Proxy) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    async with listening(api) as stream:
        await stream.next("counters")
        async with proxy.away():
            assert (await stream.until("database", up=False))["reason"]
            assert (await stream.next("counters"))["shards"][0]["up"] is False
        await stream.until("database", up=True)


async def test_very_many_changes_are_one(api: Api) -> None:
    async with listening(api) as stream:
        await stream.next("counters")
        items = [{"queue": f"q-{number}", "payload": number} for number in range(300)]
        assert (await api.call("POST", "/api/v1/push", {"items": items})).status == 201
        assert await stream.next("resync") == {}


async def test_a_listener_that_leaves_is_forgotten(api: Api) -> None:
    async with listening(api) as one, listening(api) as other:
        for stream in (one, other):
            await stream.next("counters")
        assert listeners(api) == 2
    await until(lambda: listeners(api) == 0)


async def test_a_stream_ends_after_the_requested_number_of_counters(api: Api) -> None:
    async with listening(api, limit=2) as stream:
        text = (await stream.answer.read()).decode()
    assert text.count("event: counters") == 2
    assert listeners(api) == 0
    assert (await api.call("HEAD", "/api/v1/events")).status == 200


async def test_a_stream_ends_with_its_token(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, jwt_clock_skew=0)
    reader = api.bearing(issue("read-only", exp=int(time.time()) + 8))
    async with asyncio.timeout(100), listening(reader) as stream:
        assert b"event: counters" in await stream.answer.read()
    assert listeners(api) == 0
    await reader.close()


async def test_a_listener_that_does_not_read_is_dropped(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]), limit=1024)
    writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await until(lambda: listeners(api) == 1)
    assert api.worker is not None
    numbers = itertools.count()
    # Until there is more than the kernel takes on both sides.
    while listeners(api):
        names = [f"{'x' * 240}{next(numbers)}" for _ in range(150)]
        api.worker.broker.publish([named(EventKind.QUEUE_CHANGED, name) for name in names])
        await asyncio.sleep(0.06)
    writer.close()


async def test_a_stream_does_not_keep_a_server_from_stopping(start_server: StartServer) -> None:
    api = await start_server()
    async with listening(api) as stream:
        await stream.next("counters")
        assert api.worker is not None
        await api.worker.http.shutdown(30)
        assert await stream.answer.read() is not None
    assert listeners(api) == 0

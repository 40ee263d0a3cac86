"""Paused queues, groups and topics: what is stored waits, what was leased can be finished, resuming wakes at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.ageing import until, until_parked
from tests.support.api import Api, payloads
from tests.support.consumer import consuming
from tests.support.database import Connection
from tests.support.topic_api import NAMESPACE, TOPIC, TopicApi, item, values

NEVER = 60_000


async def switch(api: Api, path: str, body: Any = None) -> bool:
    """Pause or resume; returns whether that was a change."""
    answer = await api.call("POST", path, body)
    assert answer.status == 200, answer
    assert answer.body["paused"] is path.endswith("pause")
    changed: bool = answer.body["changed"]
    return changed


def queue_path(what: str, queue: str = "q") -> str:
    return f"/api/v1/resources/queues/{queue}/{what}"


def group_path(what: str, group: str = "g", queue: str = "q") -> str:
    return f"/api/v1/consumer-groups/{group}/queues/{queue}/{what}"


async def test_a_paused_queue_takes_pushes_and_gives_nothing(api: Api) -> None:
    await api.push("q", 1)
    held = await api.pop("q", "Default")
    assert await switch(api, queue_path("pause"))
    assert not await switch(api, queue_path("pause"))
    await api.push("q", 2)
    assert await api.pop("q") == []
    assert await api.pop("q", "Default") == []
    assert await api.pop("q", consumerGroup="other") == []
    assert await api.pop("q", wait=True, timeout=50) == []
    lease = held[0]["leaseId"]
    assert (await api.call("POST", f"/api/v1/lease/{lease}/extend", {})).status == 200
    assert [one["success"] for one in await api.ack(held)] == [True]
    assert await switch(api, queue_path("resume"))
    assert not await switch(api, queue_path("resume"))
    assert payloads(await api.pop("q", batch=10)) == [2]
    assert payloads(await api.pop("q", consumerGroup="other", batch=10)) == [1, 2]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("partition", [None, "Default"])
async def test_pops_that_wait_are_served_when_a_queue_is_resumed(
    start_server: StartServer, workers: int, partition: str | None
) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=workers, pop_safety_poll_ms=NEVER) for number in range(workers)
    ]
    here, there = servers[0], servers[-1]
    await here.push("q", 0)
    assert payloads(await there.pop("q", autoAck=True)) == [0]
    before = asyncio.create_task(there.pop("q", partition, wait=True, timeout=60_000))
    await until_parked(there, 1)
    await switch(here, queue_path("pause"))
    await here.push("q", 1)
    after = asyncio.create_task(there.pop("q", partition, wait=True, timeout=60_000, consumerGroup="g"))
    await until_parked(there, 2)
    assert await there.pop("q", partition) == []
    await switch(here, queue_path("resume"))
    assert payloads(await before) == [1]
    assert payloads(await after) == [0]


async def test_a_group_is_paused_alone(api: Api) -> None:
    await api.push("q", 1)
    await api.push("elsewhere", 1)
    await api.pop("elsewhere", consumerGroup="g")
    assert await switch(api, group_path("pause"))
    assert not await switch(api, group_path("pause"))
    waiting = asyncio.create_task(api.pop("q", consumerGroup="g", wait=True, timeout=60_000))
    await until_parked(api, 1)
    assert payloads(await api.pop("q", consumerGroup="other")) == [1]
    assert payloads(await api.pop("q")) == [1]
    await switch(api, queue_path("pause"))
    await switch(api, group_path("resume"))
    await until_parked(api, 1)
    assert not waiting.done()
    await switch(api, queue_path("resume"))
    assert payloads(await waiting) == [1]


async def test_a_pause_survives_a_restart_and_a_change_of_options(
    start_server: StartServer, connection: Connection
) -> None:
    first = await start_server()
    await first.push("q", 1)
    await switch(first, queue_path("pause"))
    await first.configure("q", leaseTime=5)
    assert await first.pop("q") == []
    second = await start_server(worker_id=1, num_workers=2)
    assert await second.pop("q") == []
    # By somebody who sends no notifications: the change log is read, and the pop is served.
    waiting = asyncio.create_task(second.pop("q", wait=True, timeout=60_000))
    await until_parked(second, 1)
    await connection.execute("UPDATE queen.queues SET paused = false")
    assert payloads(await waiting) == [1]


async def test_a_pop_of_a_namespace_is_served_by_the_queues_that_are_not_paused(start_server: StartServer) -> None:
    api = await start_server(pop_safety_poll_ms=NEVER)
    for name in ("a", "b"):
        await api.configure(name, namespace="n")
    await switch(api, queue_path("pause", "a"))
    await api.push("a", "a")
    await api.push("b", "b")

    async def pop() -> list[Any]:
        answer = await api.call("GET", "/api/v1/pop", namespace="n", wait=True, timeout=60_000, autoAck=True)
        return payloads(answer.body["messages"])

    assert await pop() == ["b"]
    waiting = asyncio.create_task(pop())
    await until_parked(api, 2)
    await switch(api, queue_path("resume", "a"))
    assert await waiting == ["a"]


async def test_a_websocket_gets_nothing_from_a_paused_queue_until_it_is_resumed(api: Api) -> None:
    async with consuming(api) as consumer:
        await consumer.subscribe("q", batch=10, credit=100, autoAck=True)
        await api.push("q", 1)
        assert payloads(await consumer.batch()) == [1]
        await switch(api, queue_path("pause"))
        await api.push("q", 2)
        await until_parked(api, 1)
        await switch(api, queue_path("resume"))
        assert payloads(await consumer.batch()) == [2]


async def test_a_group_that_is_deleted_is_not_paused_any_more(api: Api) -> None:
    await api.push("q", 1)
    await api.push("elsewhere", 1)
    await api.pop("elsewhere", consumerGroup="g")
    await switch(api, group_path("pause"))
    assert (await api.call("DELETE", "/api/v1/consumer-groups/g")).status == 200
    assert payloads(await api.pop("q", consumerGroup="g")) == [1]
    await api.pop("q", consumerGroup="h")
    await switch(api, group_path("pause", "h"))
    assert (await api.call("DELETE", "/api/v1/consumer-groups/h/queues/q")).status == 200
    assert payloads(await api.pop("q", consumerGroup="h")) == [1]


async def test_what_is_paused_is_seen(api: Api, connection: Connection) -> None:
    topics = TopicApi(api)
    await api.push("q", 1)
    await api.pop("q", consumerGroup="g")
    await topics.enqueue(item(1))
    for path in (queue_path("pause"), group_path("pause")):
        await switch(api, path)
    await switch(api, "/api/v1/topics/pause", {"namespace": NAMESPACE, "topic": TOPIC})
    (listed,) = (await api.call("GET", "/api/v1/resources/queues")).body["queues"]
    assert listed["paused"]
    (listed,) = (await api.call("GET", "/api/v1/status/queues")).body["queues"]
    assert listed["paused"]
    view = (await api.call("GET", "/api/v1/resources/queues/q")).body
    assert (view["paused"], view["pausedGroups"]) == (True, ["g"])
    watched = (await api.call("GET", "/api/v1/status/queues/q")).body["queue"]
    assert (watched["paused"], watched["pausedGroups"]) == (True, ["g"])
    (group,) = (await api.call("GET", "/api/v1/consumer-groups")).body
    assert (group["paused"], group["queuePaused"]) == (True, True)
    (counted,) = await topics.good("GET", "/counts", namespace=NAMESPACE)
    assert counted["paused"]
    metrics = (await api.call("GET", "/metrics/prometheus")).body.splitlines()
    for line in (
        'queen_queue_paused{queue="q"} 1.0',
        'queen_group_paused{group="g",queue="q"} 1.0',
        f'queen_topic_paused{{namespace="{NAMESPACE}",topic="{TOPIC}"}} 1.0',
    ):
        assert line in metrics
    noted = await connection.fetch("SELECT action, before ->> 'paused' AS paused FROM queen.audit ORDER BY id")
    assert [row["action"] for row in noted] == [
        "POST /api/v1/resources/queues/{queue}/pause",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/pause",
        "POST /api/v1/topics/pause",
    ]
    assert noted[0]["paused"] == "false"


async def test_what_does_not_exist_cannot_be_paused(api: Api) -> None:
    await api.push("elsewhere", 1)
    await api.pop("elsewhere", consumerGroup="g")
    for path in (queue_path("pause"), queue_path("resume"), group_path("pause"), group_path("resume")):
        answer = await api.call("POST", path)
        assert (answer.status, answer.body["error"]) == (404, "Queue not found")
    for what in ("pause", "resume"):
        answer = await api.call("POST", group_path(what, "nobody"))
        assert (answer.status, answer.body["error"]) == (404, "Consumer group not found")
    for what in ("pause", "resume"):
        answer = await api.call("POST", f"/api/v1/topics/{what}", {"namespace": NAMESPACE, "topic": TOPIC})
        assert (answer.status, answer.body["error"]) == (404, "Topic not found")


@pytest.mark.parametrize("ready", ["off", "on"])
async def test_a_paused_topic_takes_items_and_gives_none(start_server: StartServer, ready: str) -> None:
    api = await start_server(topic_ready_queues=ready, pop_safety_poll_ms=NEVER)
    topics, body = TopicApi(api), {"namespace": NAMESPACE, "topic": TOPIC}
    await topics.enqueue(*(item(number) for number in range(50)))
    # Often enough for a ready queue, where there are some.
    taken = [await topics.dequeue(1) for _ in range(30)]
    assert await switch(api, "/api/v1/topics/pause", body)
    assert not await switch(api, "/api/v1/topics/pause", body)
    assert await topics.dequeue(10) == []
    assert await topics.dequeue(10, wait=True, timeout=50) == []
    assert await topics.good("GET", "/dequeue/many", namespace=NAMESPACE, limit=10) == []
    assert await topics.ack(*taken[0]) == [True]
    await topics.enqueue(item(50))
    one = asyncio.create_task(topics.dequeue(1, wait=True, timeout=60_000))
    many = asyncio.create_task(
        topics.good("GET", "/dequeue/many", namespace=NAMESPACE, limit=1, wait=True, timeout=60_000)
    )
    assert api.worker is not None
    inside = api.worker.broker.topics
    await until(lambda: len(inside.dequeuer.waiting) == 1 and len(inside.multi_dequeuer.waiting) == 1)
    assert await switch(api, "/api/v1/topics/resume", body)
    assert sorted([*values(await one), *values(await many)]) == [30, 31]
    assert not await switch(api, "/api/v1/topics/resume", body)

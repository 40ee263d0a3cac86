"""Consumer groups that get only the newest message of each partition."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from queen.storage.database import Link, Record
from tests.conftest import StartServer
from tests.support.ageing import Connection
from tests.support.api import Answer, Api


async def pop(api: Api, queue: str = "tasks", group: str = "g", partition: str | None = None, **query: Any) -> Answer:
    path = f"/api/v1/pop/queue/{queue}" + (f"/partition/{partition}" if partition else "")
    asked: dict[str, Any] = {"consumerGroup": group, "conflation": True, "batch": 100} | query
    return await api.call("GET", path, **asked)


async def newest(api: Api, queue: str = "tasks", group: str = "g", **query: Any) -> list[Any]:
    """Pop and acknowledge; returns the payloads."""
    answer = await pop(api, queue, group, **query)
    assert answer.status == 200 and answer.body["conflation"] is True, answer
    if answer.body["messages"]:
        await api.ack(answer.body["messages"], group=group)
    return [message["data"] for message in answer.body["messages"]]


async def test_a_group_gets_the_newest_message_of_each_partition(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("tasks", *[f"{partition}{n}" for n in range(30)], partition=partition)
        await api.push("tasks", f"{partition}-last", partition=partition)
    assert sorted(await newest(api, partitions=10)) == ["a-last", "b-last"]
    assert await newest(api) == []
    await api.push("tasks", "more", partition="a")
    assert await newest(api) == ["more"]
    # Other groups are not concerned.
    assert len(await api.pop("tasks", consumerGroup="audit", batch=100, partitions=10)) == 63


async def test_what_comes_while_a_message_is_leased_is_delivered_next_and_only_the_last_of_it(api: Api) -> None:
    await api.push("tasks", 1, 2)
    first = (await pop(api)).body["messages"]
    await api.push("tasks", 3)
    await api.push("tasks", 4)
    assert (await pop(api)).body["messages"] == []
    await api.ack(first, group="g")
    assert [message["data"] for message in first] == [2]
    assert await newest(api) == [4]


async def test_a_failed_message_is_superseded_and_its_attempts_are_counted_for_the_newer_one(api: Api) -> None:
    await api.configure("tasks", retryLimit=2, retryDelay=0)
    dead = False
    for n in range(10):
        await api.push("tasks", n)
        (message,) = (await pop(api)).body["messages"]
        assert message["data"] == n
        (result,) = await api.ack([message], status="failed", group="g")
        dead = dead or result["dlq"]
        if dead:
            break
    assert dead and n == 2
    assert await newest(api) == []


async def test_the_policy_of_the_first_pop_stays_and_a_conflict_is_reported(api: Api) -> None:
    assert await newest(api) == []
    await api.push("tasks", 1, 2, 3)
    other = await pop(api, conflation=False)
    assert (other.body["conflation"], other.body["conflationConflict"]) == (True, True)
    assert [message["data"] for message in other.body["messages"]] == [3]
    await api.ack(other.body["messages"], group="g")
    empty = await pop(api, conflation=False)
    assert (empty.body["messages"], empty.body["conflationConflict"]) == ([], True)
    await api.push("tasks", 4, 5)
    silent = (await api.call("GET", "/api/v1/pop/queue/tasks", consumerGroup="g", batch=9)).body
    assert [message["data"] for message in silent["messages"]] == [5] and "conflationConflict" not in silent

    plain = await api.pop("tasks", consumerGroup="plain", batch=2)
    assert len(plain) == 2
    await api.ack(plain, group="plain")
    refused = await pop(api, group="plain", batch=2)
    assert refused.body["conflationConflict"] is True and "conflation" not in refused.body
    assert len(refused.body["messages"]) == 2
    assert not (await pop(api, group="plain")).body["messages"]
    # A group that is deleted begins anew.
    await api.ack(refused.body["messages"], group="plain")
    await api.call("DELETE", "/api/v1/consumer-groups/plain")
    assert await newest(api, group="plain") == [5]


async def test_a_pop_that_waits_is_woken_and_gets_the_newest(api: Api) -> None:
    waiting = asyncio.create_task(pop(api, wait=True, timeout=20_000))
    targeted = asyncio.create_task(pop(api, group="h", partition="Default", wait=True, timeout=20_000))
    await api.push("tasks", 1, 2)
    for task in (waiting, targeted):
        (message,) = (await task).body["messages"]
        assert message["data"] == 2


async def test_messages_that_come_during_a_claim_are_left_to_the_next(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.push("tasks", 0)
    assert await newest(api) == [0]
    real = Link.fetch

    async def pushing(link: Link, name: str, *args: Any) -> list[Record]:
        found = await real(link, name, *args)
        if name == "conflation_segments" and not pushed:
            pushed.append(1)
            await api.push("tasks", 1, 2)
        return found

    pushed: list[int] = []
    monkeypatch.setattr(Link, "fetch", pushing)
    answer = await pop(api, partition="Default", wait=True, timeout=20_000)
    assert [message["data"] for message in answer.body["messages"]] == [2]
    assert pushed


async def test_new_groups_begin_where_they_say(api: Api) -> None:
    await api.push("tasks", "old")
    assert await newest(api, subscriptionMode="new") == []
    assert await newest(api, group="h", subscriptionMode="all") == ["old"]
    await api.push("tasks", 1, 2)
    assert await newest(api) == [2]


async def test_deleted_messages_are_not_the_newest(api: Api) -> None:
    pushed = [*await api.push("tasks", 0, 1, 2), *await api.push("tasks", 3)]
    for one in pushed[2:]:
        path = f"/api/v1/messages/{one['partition_id']}/{one['transaction_id']}"
        assert (await api.call("DELETE", path)).status == 200
    assert await newest(api) == [1]
    assert await newest(api) == []


async def test_messages_that_are_too_young_are_not_the_newest(api: Api, connection: Connection) -> None:
    await api.configure("tasks", delayedProcessing=3600)
    await api.push("tasks", 1)
    await api.push("tasks", 2)
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '2 h'")
    await api.push("tasks", 3)
    assert await newest(api) == [2]
    assert await newest(api) == []


async def test_pops_of_a_namespace_conflate_each_queue_by_itself(api: Api) -> None:
    for queue in ("a", "b"):
        await api.call("POST", "/api/v1/configure", {"queue": queue, "namespace": "n", "options": {}})
        await api.push(queue, 1, 2)

    async def all_of() -> list[Any]:
        answer = await api.call("GET", "/api/v1/pop", namespace="n", consumerGroup="g", conflation=True, batch=9)
        assert answer.body["conflation"] is True
        if answer.body["messages"]:
            await api.ack(answer.body["messages"], group="g")
        return [message["data"] for message in answer.body["messages"]]

    assert [await all_of() for _ in range(3)] == [[2], [2], []]
    missing = await api.call("GET", "/api/v1/pop", namespace="none", consumerGroup="g", conflation=True)
    assert missing.body["messages"] == [] and missing.body["conflation"] is True


async def test_depth_says_how_many_messages_a_group_will_get(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("tasks", *range(5), partition=partition)
    await newest(api, partition="a")
    await api.push("tasks", 6, 7, partition="a")
    depth = (await api.call("GET", "/api/v1/resources/queues/tasks/depth", group="g")).body
    assert (depth["conflation"], depth["pending"], depth["effectivePending"]) == (True, 7, 2)
    depth = (await api.call("GET", "/api/v1/resources/queues/tasks/depth")).body
    assert (depth["conflation"], depth["effectivePending"]) == (False, depth["pending"])


async def test_messages_that_are_passed_over_are_counted(start_server: StartServer) -> None:
    api = await start_server()
    await api.push("tasks", *range(10))
    assert await newest(api) == [9]
    text = (await api.call("GET", "/metrics/prometheus")).body
    assert 'queen_conflated_messages_total{queue="tasks"} 9.0' in text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"consumerGroup": ""}, "conflation needs a consumerGroup: it is a policy of the group"),
        ({"autoAck": True}, "conflation and autoAck exclude each other: the newest message is acknowledged"),
    ],
)
async def test_bad_requests_are_refused(api: Api, query: dict[str, Any], message: str) -> None:
    answer = await pop(api, **query)
    assert answer.status == 400 and message in answer.body["error"]


async def test_consumers_at_random_process_the_last_message_of_every_partition(api: Api) -> None:
    last: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    done = asyncio.Event()

    async def produce(partition: str) -> None:
        for n in range(40):
            await api.push("tasks", n, partition=partition)
            last[partition] = n

    async def consume() -> None:
        while True:
            answer = await pop(api, partitions=3, wait=True, timeout=100)
            for message in answer.body["messages"]:
                seen.setdefault(message["partition"], []).append(message["data"])
            if answer.body["messages"]:
                await api.ack(answer.body["messages"], group="g")
            elif done.is_set():
                return

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    await asyncio.gather(*(produce(f"p{n}") for n in range(5)))
    done.set()
    await asyncio.gather(*consumers)
    assert {partition: numbers[-1] for partition, numbers in seen.items()} == last
    assert all(numbers == sorted(set(numbers)) for numbers in seen.values())

"""A queue of many partitions is shown page by page, by name, with the totals of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from queen.broker.inspect import queue_stats, resources
from tests.conftest import StartServer
from tests.support.api import Api


@pytest.mark.parametrize("path", ["/api/v1/resources/queues/q", "/api/v1/status/queues/q"])
async def test_partitions_come_page_by_page_with_the_totals_of_the_queue(api: Api, path: str) -> None:
    for number in range(7):
        await api.push("q", *range(number + 1), partition=f"p{number}")
    messages = await api.pop("q", partition="p6", batch=3, consumerGroup="g")
    await api.ack(messages, ["completed", "completed", "dlq"], group="g")
    await api.pop("q", partition="p5", batch=2, consumerGroup="g")
    whole = (await api.call("GET", path)).body
    assert whole["next"] is None
    assert len(whole["partitions"]) == 7
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        page = (await api.call("GET", path, limit=3, after=after)).body
        assert page["totals"] == whole["totals"]
        seen += page["partitions"]
        after = page["next"]
        if after is None:
            break
        assert after == page["partitions"][-1]["name"]
    assert seen == whole["partitions"]
    assert whole["totals"]["deadLetter"] == 1


async def test_a_queue_is_shown_without_its_partitions(api: Api) -> None:
    for number in range(3):
        await api.push("q", number, partition=f"p{number}")
    answer = (await api.call("GET", "/api/v1/status/queues/q", includePartitions="false")).body
    assert answer["partitions"] == []
    assert answer["next"] is None
    assert answer["totals"]["total"] == 3


async def test_counters_of_a_large_queue_are_those_of_the_last_count(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (resources, queue_stats):
        monkeypatch.setattr(module, "LARGE", 3)
    api = await start_server()
    for number in range(3):
        await api.push("large", number, number, partition=f"p{number}")
    await api.push("small", 1)
    messages = await api.pop("large", partition="p0", batch=1, consumerGroup="g")
    await api.ack(messages, group="g")
    api = await start_server(stats_cache_ms=600_000)
    path = "/api/v1/resources/queues"
    by_count = (await api.call("GET", path, sort="pending", limit=10, search="s")).body["queues"]
    assert [one["name"] for one in by_count] == ["small"]
    listed = {one["name"]: one for one in (await api.call("GET", path, sort="name", limit=10)).body["queues"]}
    assert listed["large"]["messages"] == {"total": 6, "pending": 5, "processing": 0}
    assert listed["large"]["countedAt"] <= (await api.call("GET", "/api/v1/resources/overview")).body["timestamp"]
    assert "countedAt" not in listed["small"]
    totals = (await api.call("GET", "/api/v1/status/queues/large", includePartitions="false")).body["totals"]
    assert (totals["total"], totals["pending"], totals["completed"]) == (6, 5, 1)
    status = (await api.call("GET", "/api/v1/status", queue="large", includeQueues=False)).body
    assert (status["messages"]["pending"], status["queues"]) == (5, [])


async def test_namespaces_and_tasks_sum_up_their_queues(api: Api) -> None:
    for queue, namespace in (("a", "x"), ("b", "x"), ("c", "")):
        await api.call("POST", "/api/v1/configure", {"queue": queue, "namespace": namespace, "task": "t"})
        await api.push(queue, 1, 2)
    (found,) = (await api.call("GET", "/api/v1/resources/namespaces")).body["namespaces"]
    assert (found["namespace"], found["queues"], found["partitions"]) == ("x", 2, 2)
    assert found["messages"] == {"total": 4, "pending": 4}
    (task,) = (await api.call("GET", "/api/v1/resources/tasks")).body["tasks"]
    assert (task["task"], task["queues"], task["messages"]["pending"]) == ("t", 3, 6)

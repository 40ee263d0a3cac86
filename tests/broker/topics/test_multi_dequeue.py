"""Dequeueing from several topics as if they were one."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item, named, values

NAMES = [f"t{n}" for n in range(6)]


@pytest.fixture
def topics(api: Api) -> TopicApi:
    return TopicApi(api)


async def many(topics: TopicApi, names: list[str] | None = None, **query: Any) -> list[dict[str, Any]]:
    """Dequeue from these topics, or from all of the namespace."""
    chosen = {} if names is None else {"topics": json.dumps(names)}
    items: list[dict[str, Any]] = await topics.good("GET", "/dequeue/many", namespace="ns", **chosen, **query)
    return items


async def test_order_of_service_is_one_over_all_topics(topics: TopicApi) -> None:
    luck = random.Random(7)
    past = datetime.now(UTC) - timedelta(hours=1)
    items = [
        item(
            n,
            luck.choice(NAMES),
            priority=luck.randrange(-2, 3),
            deliver_after=(past + timedelta(seconds=luck.randrange(5))).isoformat(),
        )
        for n in range(120)
    ]
    ids = await topics.enqueue(*items)
    expected = sorted(range(120), key=lambda n: (items[n]["priority"], items[n]["deliver_after"], ids[n]))
    served: list[dict[str, Any]] = []
    while some := await many(topics, limit=luck.choice((1, 3, 7, 20))):
        served += some
    assert values(served) == expected
    assert [one["topic"] for one in served] == [items[n]["topic"] for n in expected]
    assert await topics.ack(*served) == [True] * 120


async def test_only_the_named_topics_are_taken_from(topics: TopicApi) -> None:
    await topics.enqueue(item(1, "a"), item(2, "b"), item(3, "c"), item(4, "a", "other"))
    assert values(await many(topics, ["c", "a", "nowhere"])) == [1, 3]
    assert values(await many(topics)) == [2]
    assert await many(topics) == []
    assert await topics.good("GET", "/dequeue/many", namespace="nowhere") == []


@pytest.mark.parametrize("names", [None, ["a", "b"]])
async def test_waiting_dequeue_gets_what_comes_to_a_topic_that_was_idle_or_not_there(
    topics: TopicApi, names: list[str] | None
) -> None:
    assert await many(topics, names) == []
    for topic in ("a", "b", "a"):
        waiting = asyncio.create_task(many(topics, names, wait="true", timeout=60_000))
        await asyncio.sleep(0.05)
        await topics.enqueue(item("new", topic))
        assert [one["topic"] for one in await waiting] == [topic]


async def test_waiting_dequeue_gets_an_item_when_it_is_due_given_back_or_failed(topics: TopicApi) -> None:
    await topics.good("POST", "/configure", {"namespace": "ns", "topic": "a", "options": {"backoff_base_ms": 1}})
    await topics.enqueue(item("due", "a", delay=0.3), item("later", "b", delay=3600))
    [first] = await many(topics, wait="true", timeout=60_000)
    assert first["data"] == "due"
    for path in ("/nack", "/release"):
        waiting = asyncio.create_task(many(topics, wait="true", timeout=60_000))
        await asyncio.sleep(0.05)
        await topics.good("POST", path, [named(first)])
        [first] = await waiting
        assert first["data"] == "due"
    assert first["retries"] == 1


async def test_lease_that_lapses_brings_its_item_back(topics: TopicApi) -> None:
    await topics.enqueue(item(1, "a"))
    assert len(await many(topics, lease=0.2)) == 1
    [again] = await many(topics, wait="true", timeout=60_000)
    assert again["retries"] == 1


async def test_nothing_in_time_is_answered_empty(topics: TopicApi) -> None:
    assert await many(topics, ["a"], wait="true", timeout=50) == []


async def test_items_delivered_at_most_once_are_gone(topics: TopicApi) -> None:
    await topics.good("POST", "/configure", {"namespace": "ns", "topic": "a", "options": {"at_most_once": True}})
    await topics.enqueue(item("once", "a"), item("usual", "b"))
    got = await many(topics)
    assert values(got) == ["once", "usual"]
    assert await topics.ack(*got) == [False, True]


async def test_each_item_is_delivered_once_by_any_kind_of_dequeue(start_server: StartServer) -> None:
    workers = [TopicApi(await start_server(worker_id=n, num_workers=2)) for n in (0, 1)]
    count = 300
    await workers[0].enqueue(*(item(n, NAMES[n % 6]) for n in range(count)))
    got: list[int] = []

    async def take(topics: TopicApi, single: bool) -> None:
        while len(got) < count:
            some = await (topics.dequeue(4, topic=random.choice(NAMES)) if single else many(topics, limit=5))
            got.extend(values(some))

    async with asyncio.timeout(100):
        await asyncio.gather(*(take(topics, single) for topics in workers for single in (True, False, False)))
    assert sorted(got) == list(range(count))


async def test_another_worker_wakes_waiting_dequeues(start_server: StartServer) -> None:
    first, second = [TopicApi(await start_server(worker_id=n, num_workers=2)) for n in (0, 1)]
    waiting = asyncio.create_task(many(second, wait="true", timeout=60_000))
    await asyncio.sleep(0.05)
    await first.enqueue(item("over there", "x"))
    assert values(await waiting) == ["over there"]


async def test_items_for_a_client_that_went_away_are_given_to_the_next(topics: TopicApi) -> None:
    waiting = asyncio.create_task(many(topics, wait="true", timeout=60_000))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await topics.enqueue(item("kept", "a"))
    [kept] = await many(topics, wait="true", timeout=60_000)
    assert (kept["data"], kept["retries"]) == ("kept", 0)

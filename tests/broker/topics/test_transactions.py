"""Transactions that mix queues and topics: all of it happens, or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item, named, values


@pytest.fixture
def topics(api: Api) -> TopicApi:
    return TopicApi(api)


async def transact(topics: TopicApi, *operations: dict[str, Any]) -> dict[str, Any]:
    answer = await topics.api.call("POST", "/api/v1/transaction", {"operations": list(operations)})
    assert answer.status == 200, answer
    body: dict[str, Any] = answer.body
    return body


async def test_queues_and_topics_change_together(topics: TopicApi) -> None:
    await topics.api.push("orders", 1)
    (message,) = await topics.api.pop("orders")
    await topics.enqueue(item("job"))
    (job,) = await topics.dequeue()
    answer = await transact(
        topics,
        {"type": "ackItem"} | named(job, lease_owner=job["lease_owner"]),
        {"type": "enqueue", "items": [item("next", topic="later", priority=2), item("first", topic="later")]},
        {"type": "push", "items": [{"queue": "invoices", "payload": 7}]},
        {"type": "ack"} | {key: message[key] for key in ("transactionId", "partitionId", "leaseId")},
    )
    assert answer["success"], answer
    assert [result["type"] for result in answer["results"]] == ["ackItem", "enqueue", "enqueue", "push", "ack"]
    later = await topics.dequeue(topic="later")
    assert values(later) == ["first", "next"]
    assert [str(one["id"]) for one in reversed(later)] == [result["id"] for result in answer["results"][1:3]]
    assert [one["data"] for one in await topics.api.pop("invoices")] == [7]
    assert (await topics.counts())["leased"] == 0


async def test_an_item_that_is_not_leased_undoes_everything(topics: TopicApi) -> None:
    (id,) = await topics.enqueue(item("ready"))
    answer = await transact(
        topics,
        {"type": "push", "items": [{"queue": "q", "payload": 1}]},
        {"type": "enqueue", "items": [item("new", topic="other", idempotency_key="k")]},
        {"type": "ackItem", "id": str(id), "namespace": "ns", "topic": "t"},
    )
    assert not answer["success"] and str(id) in answer["error"]
    assert await topics.api.pop("q") == []
    assert await topics.dequeue(topic="other") == []
    assert values(await topics.dequeue()) == ["ready"]
    (new,) = await topics.enqueue(item("again", topic="other", idempotency_key="k"))
    assert values(await topics.dequeue(topic="other")) == ["again"], new


async def test_a_transaction_wakes_waiting_dequeues_of_the_topic(topics: TopicApi) -> None:
    waiting = asyncio.create_task(topics.dequeue(wait=True, timeout=60_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        assert (await transact(topics, {"type": "enqueue", "items": [item("x")]}))["success"]
        assert values(await waiting) == ["x"]


async def test_transactions_count_against_quotas(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 1),)))
    assert (await transact(topics, {"type": "enqueue", "items": [item("x")]}))["success"]
    body = {"operations": [{"type": "enqueue", "items": [item("y")]}]}
    refused = await topics.api.call("POST", "/api/v1/transaction", body)
    assert refused.status == 429 and refused.headers["Retry-After"]


async def test_enqueues_beside_transactions_and_moving_heads_lose_nothing(topics: TopicApi) -> None:
    """Transactions that make items ready and those that advance heads do not miss each other."""
    given: list[Any] = []
    producing = True

    async def produce(number: int) -> None:
        for n in range(40):
            one = item([number, n], priority=n % 2)
            if number % 2:
                await transact(topics, {"type": "enqueue", "items": [one]})
            else:
                await topics.enqueue(one)

    async def consume() -> None:
        while True:
            finished = not producing
            got = await topics.dequeue(7)
            given.extend(values(got))
            if got:
                await topics.ack(*got)
            elif finished:
                return

    async def advance() -> None:
        assert topics.api.worker is not None
        parts = topics.api.worker.broker.topics
        while producing:
            topic = await parts.catalog.one(("ns", "t"))
            if topic is not None:
                await parts.heads.advance(topic.id)
            await asyncio.sleep(0.001)

    consumers = [asyncio.create_task(work) for work in (consume(), consume(), advance())]
    await asyncio.gather(*(produce(number) for number in range(6)))
    producing = False
    await asyncio.gather(*consumers)
    assert sorted(given) == sorted([number, n] for number in range(6) for n in range(40))

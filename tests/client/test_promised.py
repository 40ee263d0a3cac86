"""What the Queen documents promise of the Python client, sentence by sentence as they are written there."""

from __future__ import annotations

from typing import Any

import pytest

from queen import Queen
from tests.support.api import Api


@pytest.fixture
async def tasks(queen: Queen) -> list[Any]:
    """Three tasks, and a list for what was processed."""
    await queen.queue("tasks").push([{"data": {"n": n}} for n in range(3)])
    return []


async def test_quick_start(api: Api) -> None:
    sent: list[str] = []
    async with Queen(api.url) as queen:
        await queen.queue("tasks").create()
        await queen.queue("tasks").push([{"data": {"task": "send-email", "to": "alice@example.com"}}])

        async def process(message: dict[str, Any]) -> None:
            sent.append(message["data"]["to"])

        await queen.queue("tasks").limit(1).consume(process)
    assert sent == ["alice@example.com"]


async def test_queue_with_options(queen: Queen) -> None:
    created = (
        await queen.queue("orders")
        .config({"leaseTime": 300, "retryLimit": 3, "priority": 5, "encryptionEnabled": False})
        .create()
    )
    assert created["configured"] is True and created["options"]["priority"] == 5
    assert (await queen.queue("orders").delete())["deleted"] is True


async def test_configuration_of_the_client(api: Api) -> None:
    dead = "http://127.0.0.1:1"
    for client in (
        Queen(api.url),
        Queen([api.url, dead]),
        Queen(
            {
                "urls": [dead, api.url],
                "timeout_millis": 30000,
                "retry_attempts": 3,
                "load_balancing_strategy": "affinity",
                "enable_failover": True,
            }
        ),
        Queen(url=api.url, bearer_token="token", headers={"X-Tenant": "one"}),
    ):
        async with client as queen:
            assert (await queen.admin.health())["status"] == "healthy"


async def test_subscription_modes(queen: Queen, tasks: list[Any]) -> None:
    async def handler(message: dict[str, Any]) -> None:
        tasks.append(message["data"]["n"])

    await queen.queue("tasks").group("batch-analytics").limit(3).consume(handler)
    assert tasks == [0, 1, 2]
    monitor = queen.queue("tasks").group("realtime-monitor").subscription_mode("new")
    await monitor.idle_millis(1000).consume(handler)
    assert tasks == [0, 1, 2]
    replay = queen.queue("tasks").group("replay").subscription_from("2025-10-28T10:00:00.000Z")
    await replay.limit(3).consume(handler)
    assert tasks == [0, 1, 2, 0, 1, 2]


async def test_consume_with_concurrency_batches_and_a_limit(queen: Queen, tasks: list[Any]) -> None:
    async def one(message: dict[str, Any]) -> None:
        tasks.append(message["data"]["n"])

    async def many(messages: list[dict[str, Any]]) -> None:
        tasks.append([message["data"]["n"] for message in messages])

    await queen.queue("tasks").concurrency(10).idle_millis(1000).group("a").consume(one)
    assert tasks == [0, 1, 2]
    await queen.queue("tasks").batch(20).concurrency(5).idle_millis(1000).group("b").consume(many)
    assert tasks == [0, 1, 2, [0, 1, 2]]


async def test_pop_and_acknowledge(queen: Queen, tasks: list[Any]) -> None:
    messages = await queen.queue("tasks").batch(10).wait(True).pop()
    assert (await queen.ack(messages[0], True))["success"] is True
    assert (await queen.ack(messages[1], False, {"error": "reason"}))["success"] is True
    again = await queen.queue("tasks").batch(10).pop()
    assert [message["data"]["n"] for message in again] == [1, 2]
    assert (await queen.ack([again[0], again[1]], True))["success"] is True
    assert await queen.queue("tasks").wait(False).pop() == []


async def test_transaction(queen: Queen, tasks: list[Any]) -> None:
    messages = await queen.queue("tasks").pop()
    await queen.transaction().ack(messages[0]).queue("output").push([{"data": {"result": "processed"}}]).commit()
    assert [message["data"] for message in await queen.queue("output").pop()] == [{"result": "processed"}]


async def test_buffering(queen: Queen) -> None:
    for i in range(10000):
        await queen.queue("events").buffer({"message_count": 500, "time_millis": 1000}).push([{"data": {"id": i}}])
    await queen.flush_all_buffers()
    await queen.queue("events").flush_buffer()
    stats = queen.get_buffer_stats()
    assert stats["totalBufferedMessages"] == 0 and stats["flushesPerformed"] >= 10
    stored = await queen.queue("events").batch(10000).pop()
    assert [message["data"]["id"] for message in stored] == list(range(10000))


async def test_dead_letters(queen: Queen) -> None:
    await queen.queue("risky").config({"retryLimit": 0, "dlqAfterMaxRetries": True}).create()
    await queen.queue("risky").push([{"data": 1}])
    await queen.ack(await queen.queue("risky").pop(), False, {"error": "broken"})
    dlq = await queen.queue("risky").dlq().limit(10).get()
    assert dlq["total"] == 1
    assert [msg.get("errorMessage") for msg in dlq["messages"]] == ["broken"]
    assert (await queen.queue("risky").dlq("consumer-group").limit(10).get())["total"] == 0


async def test_tracing(queen: Queen) -> None:
    await queen.queue("orders").push([{"data": {"orderId": 1, "total": 5}}])

    async def handler(msg: dict[str, Any]) -> None:
        name = f"order-{msg['data']['orderId']}"
        await msg["trace"]({"traceName": name, "eventType": "info", "data": {"text": "Order processing started"}})
        await msg["trace"]({"traceName": name, "eventType": "processing", "data": {"text": "Order completed"}})

    await queen.queue("orders").limit(1).consume(handler)
    assert (await queen.admin.get_traces_by_name("order-1"))["total"] == 2


async def test_renewal(queen: Queen, tasks: list[Any]) -> None:
    msg1, msg2, msg3 = await queen.queue("tasks").batch(3).pop()
    renewed = await queen.renew(msg1)
    assert renewed["success"] is True and renewed["newExpiresAt"]
    assert [one["success"] for one in await queen.renew([msg1, msg2, msg3])] == [True]
    await queen.ack(msg3)
    await queen.queue("tasks").push([{"data": {"n": 3}}])

    async def handler(message: dict[str, Any]) -> None:
        tasks.append(message["data"]["n"])

    await queen.queue("tasks").renew_lease(True, 60000).limit(1).consume(handler)
    assert tasks == [3]

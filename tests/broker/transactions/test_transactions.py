"""Transactions: pushes and acks that happen together or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.api import Answer, Api
from tests.support.database import Connection, dead_letters, expire_leases, stored_ids


def push(queue: str, *payloads: Any, ids: list[str] | None = None, partition: str = "Default") -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"queue": queue, "partition": partition, "payload": payload} for payload in payloads]
    for item, id in zip(items, ids or [], strict=False):
        item["transactionId"] = id
    return {"type": "push", "items": items}


def ack(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "ack",
        "transactionId": message["transactionId"],
        "partitionId": message["partitionId"],
        "leaseId": message["leaseId"],
    } | fields


async def run(api: Api, *operations: dict[str, Any]) -> Answer:
    answer = await api.call("POST", "/api/v1/transaction", {"operations": operations, "requiredLeases": []})
    assert answer.status == 200, answer
    return answer


async def test_a_transaction_acks_and_pushes_together(api: Api) -> None:
    await api.push("in", 1, ids=["t-1"])
    (message,) = await api.pop("in")
    answer = await run(api, ack(message), push("out", 2, 3, ids=["a", "b"]))
    assert answer.body["success"] is True
    first, second, third = answer.body["results"]
    assert first == {
        "index": 0,
        "type": "ack",
        "success": True,
        "transactionId": "t-1",
        "error": None,
        "dlq": False,
    }
    messages = await api.pop("out", batch=2)
    assert [message["data"] for message in messages] == [2, 3]
    for index, (result, message) in enumerate(zip((second, third), messages, strict=True), 1):
        assert result == {
            "index": index,
            "type": "push",
            "success": True,
            "transactionId": message["transactionId"],
            "messageId": message["id"],
            "partitionId": message["partitionId"],
            "queueName": "out",
        }
    assert await api.pop("in") == []


async def test_one_bad_operation_undoes_everything(api: Api, connection: Connection) -> None:
    await api.push("in", 1, 2)
    messages = await api.pop("in", batch=2)
    await api.push("out", 0, ids=["taken"])
    for bad, error in (
        (ack(messages[0], transactionId="nobody"), "ACK operation failed: Message not found"),
        (ack(messages[0], partitionId="nonsense"), "ACK operation failed: Message not found"),
        (
            ack(messages[0], partitionId="51756565-0000-8000-8000-00000000ffff"),
            "ACK operation failed: Message not found",
        ),
        (
            ack(messages[0], leaseId="019dd000-0000-7000-8000-000000000001"),
            "ACK operation failed: Invalid or expired lease",
        ),
        (ack(messages[0], leaseId="nonsense"), "ACK operation failed: Invalid or expired lease"),
        (ack(messages[0], status="retry"), "ACK operation failed: Unknown error"),
        (ack(messages[0], status="nonsense"), "ACK operation failed: Unknown error"),
        ({"type": "nonsense"}, "Unknown operation type: nonsense"),
        (push("out", 9, ids=["taken"]), "duplicate"),
        (push("out", 8, 9, ids=["same", "same"]), "duplicate"),
    ):
        for operations in ([ack(messages[1]), push("out", 7), bad], [bad, push("out", 7), ack(messages[1])]):
            answer = await run(api, *operations)
            assert answer.body["success"] is False, bad
            assert error in answer.body["error"]
    assert await stored_ids(connection, "out") == ["taken"]
    await expire_leases(connection, "in")
    assert [message["data"] for message in await api.pop("in", "Default", batch=5)] == [1, 2]
    assert await dead_letters(connection, "in") == []


async def test_after_a_refused_transaction_the_same_ids_can_be_pushed(api: Api) -> None:
    answer = await run(api, push("out", 1, ids=["a"]), {"type": "nonsense"})
    assert not answer.body["success"]
    answer = await run(api, push("out", 1, 2, ids=["a", "a"]))
    assert not answer.body["success"]
    (result,) = await api.push("out", 1, ids=["a"])
    assert result["status"] == "queued"


async def test_a_failure_in_a_transaction_is_a_dead_letter_at_once(api: Api, connection: Connection) -> None:
    await api.push("in", 1, 2, ids=["a", "b"])
    messages = await api.pop("in", batch=2)
    answer = await run(api, ack(messages[0], status="failed", error="boom"), push("out", 1))
    assert answer.body["results"][0]["dlq"] is True
    assert await dead_letters(connection, "in") == [("a", "boom", 0)]
    assert [message["data"] for message in await api.pop("in", batch=5)] == [2]


async def test_a_transaction_without_lease_ids_is_not_checked_against_them(api: Api) -> None:
    await api.push("in", 1)
    (message,) = await api.pop("in")
    assert (await run(api, ack(message, leaseId=None))).body["success"]
    assert await api.pop("in") == []


async def test_a_parked_pop_is_woken_by_a_transaction(api: Api) -> None:
    await api.push("in", 1)
    (message,) = await api.pop("in")
    waiting = asyncio.create_task(api.pop("out", wait=True, timeout=60_000))
    again = asyncio.create_task(api.pop("in", wait=True, timeout=60_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await run(api, ack(message), push("out", 2), push("in", 3))
        assert [message["data"] for message in await waiting] == [2]
        assert [message["data"] for message in await again] == [3]


@pytest.mark.parametrize("workers", [1, 2])
async def test_transactions_that_cross_each_other_all_succeed(start_server: StartServer, workers: int) -> None:
    """Each takes messages from two partitions and pushes to two, in any order: none may fail or wait for long."""
    servers = [await start_server(worker_id=number, num_workers=workers) for number in range(workers)]
    api = servers[0]
    partitions = [str(number) for number in range(8)]
    for partition in partitions:
        await api.push("work", *range(30), partition=partition)
    held = {partition: await api.pop("work", partition, batch=30) for partition in partitions}

    async def move(number: int) -> Answer:
        here, there = partitions[number % 8], partitions[(number * 5 + 3) % 8]
        server = servers[number % workers]
        return await run(
            server,
            push("done", number, partition=there),
            ack(held[here][number // 8]),
            push("done", number, partition=here),
            ack(held[there][number // 8]),
        )

    async with asyncio.timeout(100):
        answers = await asyncio.gather(*(move(number) for number in range(200)))
    assert [answer.body.get("error") for answer in answers if not answer.body["success"]] == []
    messages = await api.pop("done", batch=1000, partitions=8)
    assert sorted(message["data"] for message in messages) == sorted(list(range(200)) * 2)


async def test_transactions_pushes_pops_and_acks_go_on_side_by_side(api: Api, connection: Connection) -> None:
    """A pipeline: every message of `in` becomes exactly one of `out`, whatever happens beside it."""
    partitions = ["a", "b", "c"]
    for number in range(150):
        await api.push("in", number, partition=partitions[number % 3], ids=[str(number)])
    moved: list[int] = []

    async def mover() -> None:
        while len(moved) < 150:
            for message in await api.pop("in", batch=1, wait=True, timeout=300):
                answer = await run(api, ack(message), push("out", message["data"], partition=message["partition"]))
                assert answer.body["success"], answer
                moved.append(message["data"])

    async def bystander(number: int) -> None:
        for step in range(30):
            await api.push("out", -1, partition=partitions[step % 3], ids=[f"other-{number}-{step}"])
            await api.ack(await api.pop("out", batch=5, partitions=3, consumerGroup="bystander"))

    async with asyncio.timeout(100):
        await asyncio.gather(mover(), mover(), mover(), bystander(1), bystander(2))
    assert sorted(moved) == list(range(150))
    for index, partition in enumerate(partitions):
        messages = await api.pop("out", partition, batch=1000)
        assert [message["data"] for message in messages if message["data"] >= 0] == list(range(index, 150, 3))
        await stored_ids(connection, "out", partition)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "operations array required"),
        ({"operations": {}}, "operations array required"),
        ({"operations": []}, "operations array cannot be empty"),
        ({"operations": [5]}, "operations[0]"),
        ({"operations": [{"type": "push"}]}, "items array is required (at operations[0].items)"),
        ({"operations": [{"type": "push", "items": [5]}]}, "operations[0].items[0]"),
        ({"operations": [{"type": "push", "items": [{}]}]}, "operations[0].items[0].queue"),
        ({"operations": [{"type": "push", "items": [{"queue": "q", "partition": None}]}]}, "items[0].partition"),
        ({"operations": [{"type": "push", "items": [{"queue": "q"}, {"queue": ""}]}]}, "items[1].queue"),
        ({"operations": [{"type": "ack"}]}, "transactionId is required (at operations[0].transactionId)"),
        ({"operations": [{"type": "ack", "transactionId": "t"}]}, "partitionId is required"),
    ],
)
async def test_a_bad_transaction_is_refused_with_what_and_where(api: Api, body: object, error: str) -> None:
    answer = await api.call("POST", "/api/v1/transaction", body)
    assert answer.status == 400
    assert error in answer.body["error"]

"""One message per transaction id and partition within the window, however many workers push it, and however often."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.database import Connection, make_queue, stored_ids, stored_messages


async def test_the_duplicate_names_the_first_and_leaves_it_as_it_was(api: Api) -> None:
    (first,) = await api.push("q", "original", ids=["a"])
    (second,) = await api.push("q", "changed", ids=["a"])
    assert (second["status"], second["message_id"]) == ("duplicate", first["message_id"])
    (message,) = await api.pop("q", batch=5)
    assert message["data"] == "original"


async def test_the_same_id_on_another_partition_or_queue_is_another_message(api: Api) -> None:
    results = [
        *await api.push("q", 1, ids=["a"], partition="x"),
        *await api.push("q", 1, ids=["a"], partition="y"),
        *await api.push("r", 1, ids=["a"], partition="x"),
    ]
    assert {result["status"] for result in results} == {"queued"}


async def test_a_consumed_message_still_counts(api: Api) -> None:
    await api.push("q", 1, ids=["a"])
    await api.ack(await api.pop("q"))
    (again,) = await api.push("q", 1, ids=["a"])
    assert again["status"] == "duplicate"


async def test_inside_one_request_the_first_wins(api: Api, connection: Connection) -> None:
    results = await api.push("q", 1, 2, 3, 4, 5, ids=["a", "b", "a", "c", "b"])
    assert [result["status"] for result in results] == ["queued", "queued", "duplicate", "queued", "duplicate"]
    assert results[2]["message_id"] == results[0]["message_id"]
    assert results[4]["message_id"] == results[1]["message_id"]
    assert await stored_ids(connection, "q") == ["a", "b", "c"]


async def test_a_large_request_that_is_new_in_part_keeps_payloads_and_traces(api: Api, connection: Connection) -> None:
    """Large requests are packed as they come; of one with duplicates the rest has to be packed again."""
    traces = [str(uuid.uuid4()) if number % 3 == 0 else "" for number in range(120)]
    items = [
        {"queue": "q", "payload": {"n": number, "long": "x" * 5000}, "transactionId": str(number), "traceId": trace}
        for number, trace in enumerate(traces)
    ]
    first = await api.call("POST", "/api/v1/push", {"items": items[:60]})
    second = await api.call("POST", "/api/v1/push", {"items": items[30:]})
    assert [result["status"] for result in second.body] == ["duplicate"] * 30 + ["queued"] * 60
    answered = [*first.body, *second.body[30:]]
    assert [result["trace_id"] or "" for result in answered] == traces
    stored = await stored_messages(connection, "q")
    assert [json.loads(message.payload)["n"] for message in stored] == list(range(120))
    assert [message.id for message in stored] == [result["message_id"] for result in answered]


@pytest.mark.parametrize("workers", [1, 2])
async def test_of_many_pushes_sent_at_once_exactly_one_is_queued(start_server: StartServer, workers: int) -> None:
    servers = [await start_server(worker_id=number, num_workers=workers) for number in range(workers)]
    answers = await asyncio.gather(*(servers[number % workers].push("q", number, ids=["same"]) for number in range(60)))
    results = [result for (result,) in answers]
    assert Counter(result["status"] for result in results) == {"queued": 1, "duplicate": 59}
    assert len({result["message_id"] for result in results}) == 1


async def test_a_restarted_server_still_knows(start_server: StartServer) -> None:
    first = await start_server()
    (original,) = await first.push("q", 1, ids=["a"])
    for number in range(30):
        await first.push("q", *range(10), ids=[f"{number}-{item}" for item in range(10)])
    second = await start_server()
    (again,) = await second.push("q", 1, ids=["a"])
    assert (again["status"], again["message_id"]) == ("duplicate", original["message_id"])
    # And the first learns what the second added.
    await second.push("q", 1, ids=["b"])
    (again,) = await first.push("q", 1, ids=["b"])
    assert again["status"] == "duplicate"


async def test_outside_the_window_an_id_is_new(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", dedup_window_seconds=60)
    (first,) = await api.push("q", 1, ids=["a"])
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '61 s'")
    (second,) = await api.push("q", 1, ids=["a"])
    assert second["status"] == "queued"
    assert second["message_id"] != first["message_id"]
    (third,) = await api.push("q", 1, ids=["a"])
    assert (third["status"], third["message_id"]) == ("duplicate", second["message_id"])


async def test_without_a_window_nothing_is_a_duplicate(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", dedup_window_seconds=0)
    results = [*await api.push("q", 1, 2, ids=["a", "a"]), *await api.push("q", 3, ids=["a"])]
    assert {result["status"] for result in results} == {"queued"}
    messages = await api.pop("q", batch=5)
    assert [message["data"] for message in messages] == [1, 2, 3]
    assert all(result["success"] for result in await api.ack(messages))
    assert await api.pop("q") == []


async def test_ids_are_known_beyond_what_memory_holds(start_server: StartServer) -> None:
    """With the filter far too small for what is pushed, what it forgot is looked up."""
    api = await start_server(dedup_memory_mb=1, dedup_disk_mb=0)
    assert api.worker is not None
    await api.push("q", 1, ids=["first"])
    for start in range(0, 120_000, 10_000):
        await api.push("other", *[0] * 10_000, ids=[str(number) for number in range(start, start + 10_000)])
    # As many others as make it forget these.
    api.worker.broker.dedup.filter.add(np.random.default_rng(7).integers(1 << 63, size=300_000, dtype=np.uint64))
    assert api.worker.broker.dedup.filter.complete_since > 0
    (again,) = await api.push("q", 1, ids=["first"])
    assert again["status"] == "duplicate"
    results = await api.push("other", 1, 2, 3, ids=["7", "110000", "new"])
    assert [result["status"] for result in results] == ["duplicate", "duplicate", "queued"]


async def test_ids_that_memory_has_no_room_for_are_known_from_the_disk(start_server: StartServer) -> None:
    api = await start_server(dedup_memory_mb=1)
    assert api.worker is not None
    dedup = api.worker.broker.dedup
    await api.push("q", 1, ids=["first"])
    for start in range(0, 600_000, 50_000):
        dedup.filter.add(np.random.default_rng(start).integers(1 << 63, size=50_000, dtype=np.uint64))
    assert dedup.filter.complete_since == 0
    assert dedup.filter.disk_bytes > 0
    before = dedup.lookups
    await api.push("q", *range(100))
    assert dedup.lookups == before, "nothing is looked up that the disk knows to be new"
    (again,) = await api.push("q", 1, ids=["first"])
    assert again["status"] == "duplicate"


async def test_a_large_push_sent_again_is_recognised_at_once(api: Api) -> None:
    """As after a timeout: the client sends everything once more, and the answer must not take longer than the first."""
    ids = [str(number) for number in range(5000)]
    first = await api.push("q", *ids, ids=ids)
    again = await api.push("q", *ids, ids=ids)
    assert {result["status"] for result in again} == {"duplicate"}
    assert [result["message_id"] for result in again] == [result["message_id"] for result in first]


async def test_a_partition_longer_than_a_page_of_segments_is_searched_to_its_end(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server()
    for number in range(1100):
        await api.push("q", number, ids=[str(number)])
    fresh = await start_server()
    results = await fresh.push("q", *range(5), ids=["0", "1099", "550", "new", "1"])
    assert [result["status"] for result in results] == ["duplicate", "duplicate", "duplicate", "queued", "duplicate"]
    assert len(await stored_ids(connection, "q")) == 1101


@pytest.mark.parametrize("workers", [1, 2])
async def test_pushes_and_transactions_over_few_ids_store_each_once(
    start_server: StartServer, connection: Connection, workers: int
) -> None:
    """Requests of every shape race for the same ids; afterwards each id is there once, and every answer agrees."""
    servers = [await start_server(worker_id=number, num_workers=workers) for number in range(workers)]
    chance = random.Random(7)
    answered: list[tuple[str, str, str, str]] = []

    async def client(number: int) -> None:
        for _ in range(25):
            api = chance.choice(servers)
            items: list[dict[str, Any]] = [
                {
                    "queue": "q",
                    "partition": chance.choice("ab"),
                    "transactionId": f"t-{chance.randrange(400)}",
                    "payload": number,
                }
                for _ in range(chance.choice((1, 1, 2, 5)))
            ]
            if chance.random() < 0.4:
                body = {"operations": [{"type": "push", "items": items}]}
                answer = await api.call("POST", "/api/v1/transaction", body)
                assert answer.status == 200, answer
                if answer.body["success"]:
                    for item, result in zip(items, answer.body["results"], strict=True):
                        answered.append((item["partition"], item["transactionId"], "queued", result["messageId"]))
            else:
                answer = await api.call("POST", "/api/v1/push", {"items": items})
                assert answer.status == 201, answer
                for item, result in zip(items, answer.body, strict=True):
                    answered.append((item["partition"], item["transactionId"], result["status"], result["message_id"]))

    async with asyncio.timeout(100):
        await asyncio.gather(*(client(number) for number in range(24)))
    for partition in "ab":
        stored = await stored_messages(connection, "q", partition)
        ids = {message.transaction_id: message.id for message in stored}
        assert len(ids) == len(stored)
        own = [one for one in answered if one[0] == partition]
        assert {one[1] for one in own} == ids.keys()
        assert all(ids[transaction_id] == id for _, transaction_id, _, id in own)
        queued = Counter(one[1] for one in own if one[2] == "queued")
        assert set(queued.values()) == {1}
        assert queued.keys() == ids.keys()

"""Queues and topics live on one shard each, and clients need not know which."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import asyncpg
import pytest

from queen.errors import QueenError
from queen.http.api.table import all_routes
from queen.wire.shards import Name, fnv1a32, home
from tests.broker.sharding.names import queue_on, topic_on
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item, named, values


async def stored_queues(dsn: str) -> set[str]:
    connection = await asyncpg.connect(dsn)
    try:
        return {row["name"] for row in await connection.fetch("SELECT name FROM queen.queues")}
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968), (":orders", 0x133E0664)]
)
async def test_the_hash_is_fnv_1a_of_the_text_in_python_and_in_postgresql(
    text: str, value: int, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    assert fnv1a32(text) == value
    assert await connection.fetchval("SELECT queen.fnv1a32($1)", text) == value


async def test_the_hash_is_of_bytes_not_of_characters(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for text in ("ä:ö", "日本:語", "🙂:x"):
        assert fnv1a32(text) == await connection.fetchval("SELECT queen.fnv1a32($1)", text)


async def test_a_queue_is_made_where_its_hash_says(api: Api, dsns: tuple[str, str]) -> None:
    names = [f"orders-{number}" for number in range(12)]
    for name in names:
        await api.push(name, name)
    for shard, dsn in enumerate(dsns):
        assert await stored_queues(dsn) == {name for name in names if home(Name.queue(name), (0, 1)) == shard}


async def test_push_pop_and_ack_go_to_the_shard_of_the_queue(api: Api) -> None:
    for queue in (queue_on(0), queue_on(1)):
        await api.push(queue, 1, 2, 3)
        messages = await api.pop(queue, batch=10)
        assert [message["data"] for message in messages] == [1, 2, 3]
        assert all(result["success"] for result in await api.ack(messages))
        assert await api.pop(queue) == []


async def test_one_push_to_several_shards_is_answered_in_the_order_of_its_items(api: Api) -> None:
    here, there = queue_on(0), queue_on(1)
    items = [
        {"queue": queue, "payload": number, "transactionId": f"id-{number}"}
        for number, queue in enumerate([here, there, there, here, there])
    ]
    answer = await api.call("POST", "/api/v1/push", {"items": items})
    assert answer.status == 201
    assert [result["index"] for result in answer.body] == [0, 1, 2, 3, 4]
    assert [result["transaction_id"] for result in answer.body] == [f"id-{number}" for number in range(5)]
    assert [result["queueName"] for result in answer.body] == [here, there, there, here, there]
    assert {result["status"] for result in answer.body} == {"queued"}
    again = await api.call("POST", "/api/v1/push", {"items": items})
    assert {result["status"] for result in again.body} == {"duplicate"}
    assert [result["message_id"] for result in again.body] == [result["message_id"] for result in answer.body]


async def test_acks_of_several_shards_in_one_batch_are_answered_in_order(api: Api) -> None:
    here, there = queue_on(0), queue_on(1)
    await api.push(here, 1, 2)
    await api.push(there, 3, 4)
    first, second = await api.pop(here, batch=2), await api.pop(there, batch=2)
    mixed = [first[0], second[0], first[1], second[1]]
    results = await api.ack(mixed)
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["transactionId"] for result in results] == [message["transactionId"] for message in mixed]
    assert all(result["success"] for result in results)
    bad = await api.ack([first[0] | {"transactionId": "nobody"}, *second])
    assert [result["success"] for result in bad] == [False, True, True]


async def test_a_lease_is_extended_on_its_shard(api: Api) -> None:
    queue = queue_on(1)
    await api.push(queue, 1)
    (message,) = await api.pop(queue)
    answer = await api.call("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": 30})
    assert answer.status == 200


async def test_a_transaction_on_one_shard_is_carried_out(api: Api, topics: TopicApi) -> None:
    queue, other, topic = queue_on(1), queue_on(1, "other"), topic_on(1)
    await api.push(queue, 1)
    (message,) = await api.pop(queue)
    await topics.enqueue(item("before", topic))
    (leased,) = await topics.dequeue(topic=topic)
    answer = await api.call(
        "POST",
        "/api/v1/transaction",
        {
            "operations": [
                {"type": "ack", **{key: message[key] for key in ("transactionId", "partitionId", "leaseId")}},
                {"type": "push", "items": [{"queue": other, "payload": "moved"}]},
                {"type": "enqueue", "items": [item("after", topic)]},
                {"type": "ackItem", **named(leased)},
            ]
        },
    )
    assert answer.body["success"], answer
    assert [message["data"] for message in await api.pop(other)] == ["moved"]
    assert values(await topics.dequeue(topic=topic)) == ["after"]
    assert await api.pop(queue) == []


async def test_a_transaction_that_spans_shards_is_refused_and_does_nothing(api: Api, topics: TopicApi) -> None:
    here, there = queue_on(0), queue_on(1)
    await api.push(here, 1)
    (message,) = await api.pop(here)
    ack = {"type": "ack", **{key: message[key] for key in ("transactionId", "partitionId", "leaseId")}}
    for operations in (
        [ack, {"type": "push", "items": [{"queue": there, "payload": 2}]}],
        [{"type": "push", "items": [{"queue": here, "payload": 2}, {"queue": there, "payload": 3}]}],
        [ack, {"type": "enqueue", "items": [item(1, topic_on(1))]}],
    ):
        answer = await api.call("POST", "/api/v1/transaction", {"operations": operations})
        assert answer.status == 400
        assert "spans shards" in answer.body["error"]
        assert "shard 0" in answer.body["error"] and "shard 1" in answer.body["error"]
    assert await api.pop(there) == []
    assert await topics.dequeue(topic=topic_on(1)) == []
    assert (await api.ack([message]))[0]["success"]


async def test_lists_and_counts_are_of_all_shards(api: Api) -> None:
    names = [f"listed-{number}" for number in range(8)]
    for name in names:
        await api.configure(name, namespace="space")
        await api.push(name, 1)
    listed = (await api.call("GET", "/api/v1/resources/queues")).body["queues"]
    assert {queue["name"] for queue in listed} == set(names)
    page = (await api.call("GET", "/api/v1/resources/queues", limit=3, offset=2)).body
    assert [queue["name"] for queue in page["queues"]] == [queue["name"] for queue in listed[2:5]]
    assert page["total"] == 8
    (space,) = (await api.call("GET", "/api/v1/resources/namespaces")).body["namespaces"]
    assert (space["namespace"], space["queues"], space["messages"]["pending"]) == ("space", 8, 8)
    overview = (await api.call("GET", "/api/v1/resources/overview")).body
    assert (overview["queues"], overview["messages"]["pending"]) == (8, 8)
    status = (await api.call("GET", "/api/v1/status")).body
    assert {queue["name"] for queue in status["queues"]} == set(names)
    messages = (await api.call("GET", "/api/v1/messages", limit=5)).body
    assert (len(messages["messages"]), messages["total"]) == (5, 8)
    one = (await api.call("GET", f"/api/v1/resources/queues/{queue_on(1, 'listed-')}")).body
    assert one["totals"]["pending"] == 1


async def test_groups_are_of_all_shards(api: Api) -> None:
    queues = [queue_on(0), queue_on(1)]
    for queue in queues:
        await api.push(queue, 1, 2)
        await api.pop(queue, consumerGroup="g", batch=1, autoAck=True)
    listed = (await api.call("GET", "/api/v1/consumer-groups")).body
    assert {(group["name"], group["queueName"]) for group in listed} == {("g", queue) for queue in queues}
    detail = (await api.call("GET", "/api/v1/consumer-groups/g")).body
    assert detail.keys() == set(queues)
    deleted = (await api.call("DELETE", "/api/v1/consumer-groups/g")).body
    assert deleted["deletedPartitions"] == 2


async def test_a_pop_over_a_namespace_takes_from_every_shard(api: Api) -> None:
    queues = [queue_on(0), queue_on(1)]
    for queue in queues:
        await api.configure(queue, namespace="space")
        await api.push(queue, queue)
    seen = set()
    for _ in queues:
        answer = await api.call("GET", "/api/v1/pop", namespace="space", wait=True, timeout=60_000, autoAck=True)
        seen.add(answer.body["messages"][0]["data"])
    assert seen == set(queues)
    assert (await api.call("GET", "/api/v1/pop", namespace="space")).status == 204


async def test_a_waiting_pop_is_woken_by_a_push_to_its_shard(api: Api) -> None:
    for queue in (queue_on(0, "w"), queue_on(1, "w")):
        waiting = asyncio.create_task(api.pop(queue, wait=True, timeout=20_000))
        await asyncio.sleep(0)
        await api.push(queue, 1)
        assert [message["data"] for message in await waiting] == [1]


async def test_maintenance_holds_on_every_shard(api: Api) -> None:
    queue = queue_on(1)
    await api.push(queue, 1)
    answer = await api.call("POST", "/api/v1/system/maintenance/pop", {"enabled": True})
    assert answer.body["popMaintenanceMode"] is True
    assert await api.pop(queue) == []
    await api.call("POST", "/api/v1/system/maintenance/pop", {"enabled": False})
    assert len(await api.pop(queue)) == 1


async def test_dead_letters_and_traces_of_all_shards_are_listed(api: Api) -> None:
    for number, queue in enumerate((queue_on(0), queue_on(1))):
        await api.configure(queue, retryLimit=0, deadLetterQueue=True, dlqAfterMaxRetries=True)
        await api.push(queue, number)
        (message,) = await api.pop(queue)
        trace = {key: message[key] for key in ("transactionId", "partitionId")}
        answer = await api.call("POST", "/api/v1/traces", {**trace, "data": {}, "traceNames": ["tried"]})
        assert answer.status == 201, answer
        await api.ack([message], "failed", error="no")
    letters = (await api.call("GET", "/api/v1/dlq")).body
    assert {letter["data"] for letter in letters["messages"]} == {0, 1}
    assert letters["total"] == 2
    traces = (await api.call("GET", "/api/v1/traces/by-name/tried")).body
    assert {trace["queue_name"] for trace in traces["traces"]} == {queue_on(0), queue_on(1)}


async def test_topics_of_a_namespace_on_several_shards_work_as_one(topics: TopicApi) -> None:
    here, there = topic_on(0), topic_on(1)
    ids = await topics.enqueue(item(1, there), item(2, here), item(3, there))
    assert len(set(ids)) == 3
    assert values(await topics.dequeue(topic=here)) == [2]
    leased = await topics.dequeue(topic=there)
    assert [one["id"] for one in leased] == [ids[0], ids[2]]
    assert await topics.good("GET", "", namespace="ns") == sorted([here, there])
    counts = await topics.good("GET", "/counts", namespace="ns")
    assert {(one["topic"], one["leased"]) for one in counts} == {(here, 1), (there, 2)}
    refs = [named(leased[0]), {"id": ids[1], "namespace": "ns", "topic": here}, named(leased[1]), named(leased[1])]
    outcomes: list[dict[str, Any]] = await topics.good("POST", "/ack", refs)
    assert [outcome["success"] for outcome in outcomes][:3] == [True, True, True]


async def test_dequeueing_from_many_topics_goes_by_priority_over_all_shards(topics: TopicApi) -> None:
    here, there = topic_on(0), topic_on(1)
    await topics.enqueue(*(item(number, (here, there)[number % 2], priority=number // 2) for number in range(8)))
    first = await topics.good("GET", "/dequeue/many", namespace="ns", limit=3)
    assert sorted(values(first[:2])) == [0, 1]
    assert len(first) == 3 and values(first)[2] in (2, 3)
    rest = await topics.good("GET", "/dequeue/many", namespace="ns", topics=f'["{here}","{there}"]', limit=10)
    assert sorted(values(first) + values(rest)) == list(range(8))
    assert [one["priority"] for one in rest] == sorted(one["priority"] for one in rest)
    waiting = asyncio.create_task(topics.good("GET", "/dequeue/many", namespace="ns", wait=True, timeout=20_000))
    await asyncio.sleep(0)
    await topics.enqueue(item("woken", there))
    assert values(await waiting) == ["woken"]


async def test_a_websocket_consumes_from_every_shard(api: Api) -> None:
    queues = [queue_on(0), queue_on(1)]
    for queue in queues:
        await api.push(queue, queue)
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{api.url}/ws/v1/consume") as socket:
        for queue in queues:
            await socket.send_json({"type": "subscribe", "id": queue, "queue": queue, "credit": 5})
        seen: set[str] = set()
        while len(seen) < 2:
            told = await socket.receive_json(timeout=100)
            assert told["type"] != "error", told
            if told["type"] == "batch":
                seen.update(message["data"] for message in told["messages"])
                await socket.send_json(
                    {
                        "type": "ack",
                        "id": 1,
                        "acknowledgments": [
                            {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
                            for message in told["messages"]
                        ],
                    }
                )
        assert seen == set(queues)
    for queue in queues:
        assert await api.pop(queue) == []


async def test_an_idempotency_key_is_used_once_in_a_namespace_whichever_shard_its_topic_is_on(
    topics: TopicApi,
) -> None:
    here, there = topic_on(0), topic_on(1)
    for number, (first, second) in enumerate([(here, there), (there, here)]):
        key = f"key-{number}"
        (id,) = await topics.enqueue(item("first", first, idempotency_key=key))
        assert await topics.enqueue(item("second", second, idempotency_key=key)) == [id]
        assert await topics.enqueue(item("again", first, idempotency_key=key)) == [id]
    together = await topics.enqueue(
        item("one", here, idempotency_key="both"), item("two", there, idempotency_key="both"), item("three", there)
    )
    assert together[0] == together[1] != together[2]
    assert sorted(values(await topics.dequeue(topic=here))) == ["first", "one"]
    assert sorted(values(await topics.dequeue(topic=there))) == ["first", "three"]


async def test_a_key_claimed_by_a_server_that_died_does_not_block_its_item(
    topics: TopicApi, dsns: tuple[str, str]
) -> None:
    here, there = topic_on(0), topic_on(1)
    home_dsn = dsns[home(Name.namespace("ns"), (0, 1))]
    connection = await asyncpg.connect(home_dsn)
    await connection.execute(
        "INSERT INTO queen.topic_key_claims (namespace, key, shard) VALUES ('ns', 'mine', 0), ('ns', 'other', 1)"
    )
    assert len(await topics.enqueue(item("kept", here, idempotency_key="mine"))) == 1
    refused = await topics.call("POST", "/enqueue", [item("early", here, idempotency_key="other")])
    assert refused.status == 503
    await connection.execute("UPDATE queen.topic_key_claims SET claimed_at = now() - interval '1 hour'")
    assert len(await topics.enqueue(item("late", here, idempotency_key="other"))) == 1
    assert sorted(values(await topics.dequeue(topic=here))) == ["kept", "late"]
    assert await topics.dequeue(topic=there) == []
    await connection.close()


async def test_a_quota_holds_for_all_topics_of_a_namespace_together(topics: TopicApi) -> None:
    here, there = topic_on(0), topic_on(1)
    await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": 3})
    assert await topics.good("GET", "/quotas") == {"ns": 3}
    await topics.enqueue(item(1, here), item(2, there))
    await topics.enqueue(item(3, there))
    for topic in (here, there):
        assert (await topics.call("POST", "/enqueue", [item(4, topic)])).status == 429


async def test_shards_named_in_another_order_are_refused(start_server: StartServer, dsns: tuple[str, str]) -> None:
    await start_server(database_urls=dsns)
    with pytest.raises(QueenError, match="in the order of their numbers"):
        await start_server(database_urls=dsns[::-1])


async def test_a_server_that_knows_one_shard_of_two_makes_nothing_that_belongs_to_the_other(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    both = await start_server(database_urls=dsns, num_workers=2)
    await both.push(queue_on(0), 1)
    with pytest.raises(QueenError, match="is one of several shards"):
        await start_server(worker_id=1, database_urls=dsns[:1], num_workers=2)
    connection = await asyncpg.connect(dsns[0])
    with pytest.raises(asyncpg.PostgresError, match=f"queue {queue_on(1)} lives on shard 1, not on shard 0"):
        await connection.execute("INSERT INTO queen.queues (name) VALUES ($1)", queue_on(1))
    await connection.close()


async def test_an_installation_that_gets_a_second_shard_keeps_everything_where_it_is(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    names = [f"old-{number}" for number in range(6)]
    one = await start_server(database_urls=dsns[:1], num_workers=2)
    for name in names:
        await one.push(name, 1)
    two = await start_server(worker_id=1, database_urls=dsns, num_workers=2)
    for name in [*names, "new-1", "new-2", "new-3"]:
        await two.push(name, 2)
    assert await stored_queues(dsns[0]) == {*names, "new-1", "new-2", "new-3"}
    assert [message["data"] for message in await two.pop(names[0], batch=5)] == [1, 2]


def test_every_route_of_a_shard_has_a_placement() -> None:
    unplaced = [operation.key for operation in all_routes() if operation.kind == "shard" and not operation.placement]
    assert unplaced == []

"""Queues as a whole: configure, delete, clear, and the numbers that are shown of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from queen.http.api.resources import groups, queues
from queen.http.server.message import Access
from tests.conftest import StartServer
from tests.support.ageing import Connection, age, clean, until_parked
from tests.support.api import Answer, Api

DEFAULTS: dict[str, Any] = {
    "priority": 0,
    "leaseTime": 300,
    "retryLimit": 3,
    "retryDelay": 1000,
    "maxSize": 0,
    "ttl": 3600,
    "deadLetterQueue": False,
    "dlqAfterMaxRetries": False,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "retentionEnabled": False,
    "encryptionEnabled": False,
    "maxWaitTimeSeconds": 0,
    "dedupWindowSeconds": None,
}
OTHERS: dict[str, Any] = {
    "priority": 7,
    "leaseTime": 60,
    "retryLimit": 5,
    "retryDelay": 10,
    "maxSize": 5000,
    "ttl": 0,
    "deadLetterQueue": True,
    "dlqAfterMaxRetries": True,
    "delayedProcessing": 1,
    "windowBuffer": 2,
    "retentionSeconds": 3,
    "completedRetentionSeconds": 4,
    "retentionEnabled": True,
    "encryptionEnabled": True,
    "maxWaitTimeSeconds": 5,
    "dedupWindowSeconds": 6,
}
FLAGS = sorted(name for name, value in DEFAULTS.items() if isinstance(value, bool))
NUMBERS = sorted(DEFAULTS.keys() - FLAGS)


async def configure(api: Api, body: Any) -> Answer:
    return await api.call("POST", "/api/v1/configure", body)


async def queue_list(api: Api, **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", "/api/v1/resources/queues", **query)
    assert answer.status == 200
    queues: list[dict[str, Any]] = answer.body["queues"]
    return queues


async def queue_detail(api: Api, queue: str) -> dict[str, Any]:
    answer = await api.call("GET", f"/api/v1/resources/queues/{queue}")
    assert answer.status == 200, answer
    detail: dict[str, Any] = answer.body
    return detail


async def delete(api: Api, queue: str) -> Any:
    answer = await api.call("DELETE", f"/api/v1/resources/queues/{queue}")
    assert answer.status == 200, answer
    return answer.body


async def clear(api: Api, queue: str, **query: Any) -> Answer:
    return await api.call("DELETE", f"/api/v1/queues/{queue}/clear", **query)


async def test_configure_without_options_echoes_every_default(api: Api) -> None:
    answer = await configure(api, {"queue": "orders"})
    assert answer.status == 200
    assert answer.body["configured"] is True
    assert answer.body["queue"] == "orders"
    assert answer.body["namespace"] == answer.body["task"] == ""
    assert answer.body["options"] == DEFAULTS
    detail = await queue_detail(api, "orders")
    assert detail["id"] == answer.body["queueId"]
    assert [(p["name"], p["id"]) for p in detail["partitions"]] == [("Default", answer.body["partitionId"])]


async def test_configure_echoes_every_option_that_was_sent(api: Api) -> None:
    answer = await api.configure("orders", namespace="shop", task="pack", **OTHERS)
    assert answer["options"] == OTHERS
    assert (answer["namespace"], answer["task"]) == ("shop", "pack")


async def test_configure_replaces_everything_and_keeps_messages_and_cursors(api: Api) -> None:
    first = await api.configure("orders", namespace="shop", task="pack", **OTHERS | {"delayedProcessing": 0})
    await api.configure("orders")
    await api.push("orders", 1, 2)
    await api.pop("orders", autoAck=True)
    second = await api.configure("orders", leaseTime=10)
    assert second["options"] == DEFAULTS | {"leaseTime": 10}
    assert (second["namespace"], second["task"]) == ("", "")
    assert second["queueId"] == first["queueId"]
    assert second["partitionId"] == first["partitionId"]
    assert [message["data"] for message in await api.pop("orders")] == [2]


async def test_numbers_may_be_sent_as_text_and_null_means_the_default(api: Api) -> None:
    sent: dict[str, Any] = {
        "leaseTime": " 60 ",
        "retryLimit": "+5",
        "priority": 4.0,
        "retentionEnabled": "TRUE",
        "maxSize": None,
    }
    answer = await api.configure("orders", **sent)
    expected = {"leaseTime": 60, "retryLimit": 5, "priority": 4, "retentionEnabled": True, "maxSize": 0}
    assert answer["options"] == DEFAULTS | expected
    assert (await configure(api, {"queue": "orders", "options": None})).body["options"] == DEFAULTS


@pytest.mark.parametrize("bad", [60.5, "abc", "60.5", "", -1, "-1", 10**20, "9" * 25, True, [], {}])
async def test_what_is_no_whole_number_is_refused_with_the_name_of_the_option(api: Api, bad: Any) -> None:
    for name in NUMBERS:
        answer = await configure(api, {"queue": "orders", "options": {"leaseTime": 5, name: bad}})
        assert answer.status == 400, (name, bad)
        assert answer.body["error"].startswith(f"option {name} must be a whole number"), answer.body
        assert f"options.{name}" in answer.body["error"]
    assert await queue_list(api) == []


@pytest.mark.parametrize("bad", ["abc", 1, 0, "", [], {}])
async def test_what_is_neither_true_nor_false_is_refused_with_the_name_of_the_option(api: Api, bad: Any) -> None:
    for name in FLAGS:
        answer = await configure(api, {"queue": "orders", "options": {name: bad}})
        assert answer.status == 400, (name, bad)
        assert answer.body["error"].startswith(f"option {name} must be true or false"), answer.body
    assert await queue_list(api) == []


async def test_numbers_up_to_the_largest_integer_are_taken(api: Api) -> None:
    largest: dict[str, Any] = dict.fromkeys(NUMBERS, 2**31 - 1)
    assert (await api.configure("orders", **largest))["options"] == DEFAULTS | largest
    assert (await api.configure("orders", maxSize=2**40))["options"]["maxSize"] == 2**40
    await api.push("orders", 1)
    for name in sorted(set(NUMBERS) - {"maxSize"}):
        answer = await configure(api, {"queue": "orders", "options": {name: 2**31}})
        assert answer.status == 400
        assert "from 0 to 2147483647" in answer.body["error"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "queue is required"),
        ({"queue": None}, "queue is required"),
        ({"queue": ""}, "queue is required"),
        ({"queue": 5}, "queue is required"),
        ({"queue": "x" * 256}, "Queue must be at most 255 characters, not 256 (at queue)"),
        ({"queue": "a\nb"}, "Queue must not contain control characters (at queue)"),
        ({"queue": "q", "namespace": 5}, "namespace must be a string (at namespace)"),
        ({"queue": "q", "task": "x" * 256}, "Task must be at most 255 characters, not 256 (at task)"),
        ({"queue": "q", "options": [1]}, "options must be an object, not [1] (at options)"),
        ([], "request body must be a JSON object"),
    ],
)
async def test_configure_says_what_is_wrong_with_its_body(api: Api, body: Any, error: str) -> None:
    answer = await configure(api, body)
    assert (answer.status, answer.body) == (400, {"error": error})


async def test_configure_needs_a_body_that_is_json(api: Api) -> None:
    empty = await api.call("POST", "/api/v1/configure")
    assert (empty.status, empty.body) == (400, {"error": "Empty request body"})
    malformed = await api.call("POST", "/api/v1/configure", data=b"{")
    assert malformed.status == 400
    assert malformed.body["error"].startswith("Invalid JSON: ")


async def test_messages_expire_only_if_a_ttl_is_set(api: Api, connection: Connection) -> None:
    await api.configure("lasting")
    await api.configure("fleeting", ttl=3600)
    for queue in ("lasting", "fleeting"):
        await api.push(queue, 1)
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '2 hours'")
    assert await api.pop("fleeting") == []
    assert [message["data"] for message in await api.pop("lasting")] == [1]


async def test_new_options_take_effect_for_the_next_pop(api: Api) -> None:
    await api.configure("orders", delayedProcessing=600)
    await api.push("orders", 1)
    assert await api.pop("orders") == []
    await api.configure("orders")
    assert len(await api.pop("orders")) == 1


async def test_new_options_free_a_pop_that_waits_for_a_delay(api: Api) -> None:
    await api.configure("orders", delayedProcessing=600)
    await api.push("orders", 1)
    waiting = asyncio.create_task(api.pop("orders", wait=True, timeout=20_000))
    await until_parked(api)
    await api.configure("orders")
    async with asyncio.timeout(100):
        assert len(await waiting) == 1


async def test_what_one_worker_configures_is_effective_on_the_other(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    for api in (one, two):
        await api.push("orders", "before")
    await one.configure("orders", maxSize=3, leaseTime=7)
    (first, second) = await two.push("orders", "fits", "is too much")
    assert (first["status"], second["status"]) == ("queued", "failed")
    assert second["error"].startswith("Queue 'orders' would exceed max capacity (3)")
    await two.configure("orders", maxSize=4)
    (third,) = await one.push("orders", "fits now")
    assert third["status"] == "queued"
    await one.configure("orders", delayedProcessing=600)
    assert await two.pop("orders") == []
    await two.configure("orders")
    assert len(await one.pop("orders", batch=10)) == 4


async def test_a_pop_that_waits_for_a_queue_gets_what_is_pushed_after_another_worker_made_it(
    start_server: StartServer,
) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    waiting = asyncio.create_task(two.pop("orders", wait=True, timeout=20_000))
    await until_parked(two)
    await one.configure("orders")
    await one.push("orders", 1)
    async with asyncio.timeout(100):
        assert [message["data"] for message in await waiting] == [1]


async def test_deleting_a_queue_says_whether_it_existed(api: Api) -> None:
    await api.push("orders", 1)
    assert await delete(api, "orders") == {"deleted": True, "queue": "orders", "existed": True}
    assert await delete(api, "orders") == {"deleted": True, "queue": "orders", "existed": False}
    assert await queue_list(api) == []
    missing = await api.call("GET", "/api/v1/resources/queues/orders")
    assert (missing.status, missing.body) == (404, {"error": "Queue not found"})


async def test_a_queue_that_was_deleted_comes_back_empty_and_with_default_options(api: Api) -> None:
    await api.configure("a b/c", leaseTime=7, namespace="shop")
    await api.push("a b/c", "old", ids=["t-1"])
    await api.pop("a%20b%2Fc", autoAck=True)
    await delete(api, "a%20b%2Fc")
    (result,) = await api.push("a b/c", "new", ids=["t-1"])
    assert result["status"] == "queued"
    assert [message["data"] for message in await api.pop("a%20b%2Fc", batch=10)] == ["new"]
    assert [(queue["name"], queue["namespace"]) for queue in await queue_list(api)] == [("a b/c", "a b/c")]


async def test_acks_of_a_deleted_queue_find_no_message(api: Api) -> None:
    await api.push("orders", 1, 2)
    messages = await api.pop("orders", batch=2)
    await delete(api, "orders")
    await api.push("orders", 3)
    for result in await api.ack(messages):
        assert not result["success"]
        assert result["error"].startswith("Message not found")
    assert [message["data"] for message in await api.pop("orders", batch=2)] == [3]


async def test_cursors_dead_letters_and_traces_go_with_the_queue_but_subscriptions_stay(
    api: Api, connection: Connection
) -> None:
    for queue in ("doomed", "spared"):
        await api.configure(queue, retryLimit=0)
        await api.pop(queue, consumerGroup="late", subscriptionMode="new")
        await api.push(queue, 1, 2)
        messages = await api.pop(queue)
        await api.ack(messages, "failed")
        trace = {key: messages[0][key] for key in ("transactionId", "partitionId")}
        await connection.execute(
            "INSERT INTO queen.traces (queue_id, partition_id, message_offset, transaction_id, group_name, event_type,"
            " data, worker_id) SELECT queue_id, id, 0, $2, '', '', '', '' FROM queen.partitions"
            " WHERE queue_id = (SELECT id FROM queen.queues WHERE name = $1)",
            queue,
            trace["transactionId"],
        )
    await delete(api, "doomed")
    for table in ("partitions", "cursors", "dead_letters", "traces"):
        assert await connection.fetchval(f"SELECT count(*) FROM queen.{table}") == 1, table
    assert await connection.fetchval("SELECT count(*) FROM queen.subscriptions") == 2
    await clean(api)
    assert await connection.fetchval("SELECT count(DISTINCT partition_id) FROM queen.segments") == 1
    assert await connection.fetchval("SELECT count(*) FROM queen.dropped_partitions") == 0


async def test_a_pop_that_waits_on_a_deleted_queue_gets_what_is_pushed_to_its_successor(
    start_server: StartServer,
) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    await one.push("orders", "old")
    await one.pop("orders", autoAck=True)
    waiting = [asyncio.create_task(api.pop("orders", wait=True, timeout=20_000)) for api in (one, two)]
    for api in (one, two):
        await until_parked(api)
    await two.call("DELETE", "/api/v1/resources/queues/orders")
    await one.push("orders", "new", partition="a")
    await one.push("orders", "new", partition="b")
    async with asyncio.timeout(100):
        assert [[message["data"] for message in await pop] for pop in waiting] == [["new"], ["new"]]


async def test_pushes_go_on_while_their_queue_is_deleted_again_and_again(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    stop = asyncio.Event()
    pushed = 0

    async def push(api: Api, name: str) -> None:
        nonlocal pushed
        number = 0
        while not stop.is_set():
            number += 1
            results = await api.push("orders", number, partition=f"{name}-{number % 5}")
            assert results[0]["status"] == "queued"
            pushed += 1

    pushers = [asyncio.create_task(push(api, str(name))) for name, api in enumerate((one, one, two, two))]
    try:
        for api in (one, two) * 10:
            goal = pushed + 10
            async with asyncio.timeout(100):
                while pushed < goal:
                    await asyncio.sleep(0.002)
                    assert not any(pusher.done() for pusher in pushers)
            await delete(api, "orders")
    finally:
        stop.set()
        await asyncio.gather(*pushers)
    await delete(one, "orders")
    await two.push("orders", "last")
    assert [message["data"] for message in await one.pop("orders", batch=100, partitions=100)] == ["last"]


async def test_deleting_a_queue_of_ten_thousand_partitions_is_quick(api: Api, connection: Connection) -> None:
    await make_partitions(connection, "wide", 10_000)
    await delete(api, "wide")
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors") == 0


async def test_clearing_a_queue_removes_all_messages_for_every_group(api: Api, connection: Connection) -> None:
    await api.configure("orders", leaseTime=17)
    for partition in ("a", "b"):
        await api.push("orders", 1, 2, 3, partition=partition)
    await api.pop("orders", partition="a", autoAck=True)
    await api.pop("orders", partition="a", consumerGroup="g", autoAck=True)
    answer = await clear(api, "orders")
    assert (answer.status, answer.body) == (
        200,
        {"cleared": True, "queue": "orders", "partition": None, "messages": 6},
    )
    for group in ("__QUEUE_MODE__", "g", "fresh"):
        assert await api.pop("orders", consumerGroup=group, batch=10) == []
    assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 0
    totals = (await queue_detail(api, "orders"))["totals"]
    assert set(totals.values()) == {0}
    await api.push("orders", 4, partition="a")
    for group in ("__QUEUE_MODE__", "g", "fresh"):
        assert [message["data"] for message in await api.pop("orders", consumerGroup=group, batch=10)] == [4]
    assert await connection.fetchval("SELECT lease_time FROM queen.queues") == 17


async def test_clearing_one_partition_leaves_the_others(api: Api) -> None:
    for partition in ("a", "b b"):
        await api.push("orders", 1, 2, 3, partition=partition)
    answer = await clear(api, "orders", partition="b b")
    assert answer.body == {"cleared": True, "queue": "orders", "partition": "b b", "messages": 3}
    assert (await clear(api, "orders", partition="b b")).body["messages"] == 0
    messages = await api.pop("orders", batch=10, partitions=10)
    assert [message["partition"] for message in messages] == ["a"] * 3


async def test_clearing_what_does_not_exist_is_not_found(api: Api) -> None:
    answer = await clear(api, "orders")
    assert (answer.status, answer.body) == (404, {"error": "Queue not found"})
    await api.configure("orders")
    answer = await clear(api, "orders", partition="x")
    assert (answer.status, answer.body) == (404, {"error": "Partition not found"})
    assert (await clear(api, "orders")).body["messages"] == 0


async def test_what_was_cleared_can_be_pushed_again_and_acks_of_it_are_harmless(api: Api) -> None:
    await api.push("orders", 1, 2, ids=["t-1", "t-2"])
    messages = await api.pop("orders", batch=2)
    await clear(api, "orders")
    results = await api.push("orders", 3, 4, ids=["t-1", "t-2"])
    assert [result["status"] for result in results] == ["queued", "queued"]
    assert [result["success"] for result in await api.ack(messages)] == [True, True]
    assert [message["data"] for message in await api.pop("orders", batch=10)] == [3, 4]


async def test_clearing_while_pushing_loses_nothing_that_was_pushed_afterwards(api: Api) -> None:
    stop = asyncio.Event()

    async def push(name: str) -> None:
        while not stop.is_set():
            await api.push("orders", name, name, partition=name)

    pushers = [asyncio.create_task(push(name)) for name in "abc"]
    try:
        for _ in range(20):
            assert (await clear(api, "orders")).status in (200, 404)
    finally:
        stop.set()
        await asyncio.gather(*pushers)
    await clear(api, "orders")
    await api.push("orders", "last", partition="b")
    assert [message["data"] for message in await api.pop("orders", batch=100, partitions=9)] == ["last"]


async def test_queues_are_listed_newest_first_with_what_they_hold(api: Api) -> None:
    assert await queue_list(api) == []
    await api.configure("first", namespace="shop", task="pack")
    await api.push("second.part", 1, 2, 3, 4)
    await api.push("second.part", 5, partition="other")
    await api.pop("second.part", partition="Default", autoAck=True)
    await api.pop("second.part", partition="Default", batch=2)
    second, first = await queue_list(api)
    assert second["id"] == (await queue_detail(api, "second.part"))["id"]
    assert second.pop("createdAt").endswith("Z")
    assert second == {
        "id": second["id"],
        "name": "second.part",
        "namespace": "second",
        "task": "part",
        "partitions": 2,
        "messages": {"total": 5, "pending": 2, "processing": 2},
        "paused": False,
    }
    assert (first["name"], first["namespace"], first["task"], first["partitions"]) == ("first", "shop", "pack", 1)
    assert first["messages"] == {"total": 0, "pending": 0, "processing": 0}


async def listed(api: Api, path: str, **query: Any) -> tuple[list[str], int]:
    """The names on a page, and how many there are in all."""
    body = (await api.call("GET", f"/api/v1/{path}", **query)).body
    items = body["partitions"] if "partitions" in body else body["queues"]
    return [one["name"] for one in items], body.get("total", body["pagination"].get("total"))


@pytest.mark.parametrize("path", ["resources/queues", "status/queues"])
async def test_queues_are_searched_and_sorted_by_the_server(api: Api, path: str) -> None:
    for name, partitions, messages in (("Billing.b", 1, 5), ("billing.a", 3, 1), ("shop", 2, 3)):
        for partition in range(partitions):
            await api.push(name, *range(messages), partition=f"p{partition}")
    await api.pop("Billing.b", batch=4, autoAck=True)
    for query, names, total in (
        ({}, ["shop", "billing.a", "Billing.b"], 3),
        ({"order": "asc"}, ["Billing.b", "billing.a", "shop"], 3),
        ({"sort": "name", "order": "desc", "search": "BILL"}, ["billing.a", "Billing.b"], 2),
        ({"sort": "partitions"}, ["billing.a", "shop", "Billing.b"], 3),
        ({"sort": "partitions", "order": "asc", "search": "l"}, ["Billing.b", "billing.a"], 2),
        ({"sort": "stored"}, ["shop", "Billing.b", "billing.a"], 3),
        ({"sort": "pending"}, ["shop", "billing.a", "Billing.b"], 3),
        ({"sort": "density"}, ["Billing.b", "shop", "billing.a"], 3),
        ({"sort": "pending", "namespace": "billing"}, ["billing.a"], 1),
        ({"search": "%"}, [], 0),
    ):
        everything, found = await listed(api, path, limit=100, **query)
        assert sorted(everything) == sorted(names), query
        # By name as PostgreSQL sorts, which may leave upper and lower case alone.
        assert everything == names or query.get("sort") == "name", query
        assert found == total
        paged = [
            name for offset in range(total) for name in (await listed(api, path, limit=1, offset=offset, **query))[0]
        ]
        assert paged == everything, query


@pytest.mark.parametrize("path", ["resources/queues", "status/queues"])
async def test_queues_are_sorted_by_the_lag_of_the_group_that_is_furthest_behind(
    api: Api, connection: Connection, path: str
) -> None:
    for name, seconds in (("late", 5000), ("latest", 90_000), ("soon", 100), ("done", 200), ("unread", 900_000)):
        await api.push(name, *range(3), partition=name)
        await age(connection, seconds, name)
    for name in ("late", "latest", "soon"):
        await api.pop(name, consumerGroup="slow", batch=1, autoAck=True)
    for name in ("done", "soon"):
        await api.pop(name, consumerGroup="quick", batch=10, autoAck=True)
    for query, names, total in (
        ({"sort": "lag"}, ["latest", "late", "soon", "done", "unread"], 5),
        ({"sort": "lag", "order": "asc"}, ["unread", "done", "soon", "late", "latest"], 5),
        ({"sort": "lag", "search": "LATE"}, ["latest", "late"], 2),
    ):
        assert await listed(api, path, limit=100, **query) == (names, total)
        paged = [await listed(api, path, limit=1, offset=offset, **query) for offset in range(total)]
        assert paged == [([name], total) for name in names]
    queues = (await api.call("GET", f"/api/v1/{path}", sort="lag", limit=100)).body["queues"]
    lags = {one["name"]: one.get("maxTimeLag") for one in queues}
    assert (lags["done"], lags["unread"]) == (0, None)
    assert lags["latest"] >= 90_000 > lags["late"] >= 5000 > lags["soon"] >= 100
    assert all("maxTimeLag" not in one for one in (await api.call("GET", f"/api/v1/{path}", limit=9)).body["queues"])


async def test_partitions_are_searched_and_sorted_by_the_server(api: Api) -> None:
    for name, count in (("a1", 1), ("a2", 3), ("b1", 2)):
        await api.push("q", *range(count), partition=name)
    await api.push("other", 1, partition="a9")
    path = "resources/partitions"
    assert await listed(api, path, queue="q", sort="stored") == (["a2", "b1", "a1"], 3)
    assert await listed(api, path, queue="q", sort="stored", order="asc", limit=2) == (["a1", "b1"], 3)
    assert await listed(api, path, queue="q", sort="newest", search="A") == (["a2", "a1"], 2)
    assert await listed(api, path, queue="q", order="desc", limit=1, offset=1) == (["a2"], 3)
    assert await listed(api, path, search="a", limit=2) == (["a9", "a1"], 3)
    assert await listed(api, path, search="a", limit=2, offset=2) == (["a2"], 3)
    assert await listed(api, path, order="desc", limit=2) == (["b1", "a2"], 4)
    answer = await api.call("GET", f"/api/v1/{path}", sort="stored")
    assert (answer.status, answer.body["error"]) == (400, "sort must be name where no queue is named")


async def test_queues_are_listed_in_pages_and_by_namespace_and_task(api: Api) -> None:
    for number in range(5):
        await api.configure(f"q{number}", namespace="odd" if number % 2 else "even", task=f"t{number}")
    answer = await api.call("GET", "/api/v1/resources/queues", limit=2, offset=1)
    assert [queue["name"] for queue in answer.body["queues"]] == ["q3", "q2"]
    assert (answer.body["total"], answer.body["pagination"]) == (5, {"limit": 2, "offset": 1})
    assert [queue["name"] for queue in await queue_list(api, namespace="odd")] == ["q3", "q1"]
    assert [queue["name"] for queue in await queue_list(api, namespace="odd", task="t1")] == ["q1"]
    assert await queue_list(api, limit=2, offset=5) == []
    assert len(await queue_list(api, limit="x", offset="-3")) == 5


async def test_a_queue_shows_its_partitions_by_name_with_their_counts(api: Api, connection: Connection) -> None:
    await api.configure("orders", retryLimit=0)
    await api.push("orders", 1, 2, 3, 4, 5, partition="b")
    await api.push("orders", 6, partition="a")
    await api.ack(await api.pop("orders", partition="b"), "failed")
    await api.pop("orders", partition="b", autoAck=True)
    leased = await api.pop("orders", partition="b", batch=2)
    await api.ack(leased[:1])
    detail = await queue_detail(api, "orders")
    assert [partition["name"] for partition in detail["partitions"]] == ["Default", "a", "b"]
    default, a, b = detail["partitions"]
    nothing = {"total": 0, "pending": 0, "processing": 0, "completed": 0, "failed": 0, "deadLetter": 0}
    assert default["stats"] == nothing
    assert default["oldestMessage"] is default["newestMessage"] is None
    assert a["stats"] == nothing | {"total": 1, "pending": 1}
    assert b["stats"] == {"total": 5, "pending": 2, "processing": 1, "completed": 2, "failed": 0, "deadLetter": 1}
    assert detail["totals"] == {
        "total": 6,
        "pending": 3,
        "processing": 1,
        "completed": 2,
        "failed": 0,
        "deadLetter": 1,
    }
    assert b["id"] == leased[0]["partitionId"]
    oldest = await connection.fetchval(
        "SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') FROM queen.segments"
        " ORDER BY partition_id, base_offset LIMIT 1"
    )
    assert b["oldestMessage"] == b["newestMessage"] == oldest


async def test_of_several_groups_the_largest_number_of_each_partition_counts(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("orders", 1, 2, 3, 4, partition=partition)
    await api.pop("orders", partition="a", batch=3, autoAck=True)
    await api.pop("orders", partition="a", consumerGroup="g", batch=2)
    await api.pop("orders", partition="b", consumerGroup="g", batch=4, autoAck=True)
    await api.pop("orders", partition="b", consumerGroup="h", batch=1, autoAck=True)
    detail = await queue_detail(api, "orders")
    a, b = (partition["stats"] for partition in detail["partitions"])
    assert (a["pending"], a["processing"], a["completed"]) == (4, 2, 3)
    assert (b["pending"], b["processing"], b["completed"]) == (3, 0, 4)
    (listed,) = await queue_list(api)
    assert listed["messages"] == {"total": 8, "pending": 5, "processing": 2}


async def test_an_expired_lease_is_not_processing(api: Api, connection: Connection) -> None:
    await api.push("orders", 1, 2)
    await api.pop("orders", batch=2)
    assert (await queue_list(api))[0]["messages"] == {"total": 2, "pending": 0, "processing": 2}
    await connection.execute("UPDATE queen.cursors SET lease_until = now() - interval '1 second'")
    assert (await queue_list(api))[0]["messages"] == {"total": 2, "pending": 2, "processing": 0}


async def test_partitions_are_listed_in_pages_for_one_queue_or_all(api: Api) -> None:
    for queue in ("x", "y"):
        for partition in ("a", "b", "c"):
            await api.push(queue, 1, partition=partition)
    answer = await api.call("GET", "/api/v1/resources/partitions", queue="y")
    assert [(p["queue"], p["name"], p["stats"]["total"]) for p in answer.body["partitions"]] == [
        ("y", "a", 1),
        ("y", "b", 1),
        ("y", "c", 1),
    ]
    assert (answer.body["total"], answer.body["pagination"]) == (3, {"limit": 1000, "offset": 0})
    answer = await api.call("GET", "/api/v1/resources/partitions", limit=2, offset=2)
    assert [(p["queue"], p["name"]) for p in answer.body["partitions"]] == [("x", "c"), ("y", "a")]
    assert answer.body["total"] == 6
    missing = await api.call("GET", "/api/v1/resources/partitions", queue="z")
    assert (missing.status, missing.body) == (404, {"error": "Queue not found"})


async def test_namespaces_and_tasks_sum_up_their_queues(api: Api) -> None:
    await api.configure("plain")
    await api.configure("empty", namespace="shop", task="idle")
    await api.push("shop.pack", 1, 2, 3)
    await api.push("shop.pack", 4, partition="other")
    await api.push("post.pack", 5)
    await api.pop("shop.pack", partition="Default", batch=2, autoAck=True)
    namespaces = await api.call("GET", "/api/v1/resources/namespaces")
    assert namespaces.body == {
        "namespaces": [
            {"namespace": "post", "queues": 1, "partitions": 1, "messages": {"total": 1, "pending": 1}},
            {"namespace": "shop", "queues": 2, "partitions": 3, "messages": {"total": 4, "pending": 2}},
        ]
    }
    tasks = await api.call("GET", "/api/v1/resources/tasks")
    assert tasks.body == {
        "tasks": [
            {"task": "idle", "queues": 1, "partitions": 1, "messages": {"total": 0, "pending": 0}},
            {"task": "pack", "queues": 2, "partitions": 3, "messages": {"total": 5, "pending": 3}},
        ]
    }


async def test_the_overview_of_an_empty_server_is_all_zeros(api: Api) -> None:
    answer = await api.call("GET", "/api/v1/resources/overview")
    assert answer.status == 200
    assert answer.body.pop("timestamp").endswith("Z")
    zeros = {"avg": 0, "median": 0, "min": 0, "max": 0}
    assert answer.body == {
        "queues": 0,
        "partitions": 0,
        "namespaces": 0,
        "tasks": 0,
        "messages": {"total": 0, "pending": 0, "processing": 0, "completed": 0, "failed": 0, "deadLetter": 0},
        "lag": {"time": zeros, "offset": zeros},
        "throughput": {"ingestedPerSecond": 0, "processedPerSecond": 0},
        "statsAge": 0,
    }


async def test_the_overview_counts_everything(api: Api) -> None:
    await api.configure("shop.pack", namespace="shop", task="pack", retryLimit=0)
    await api.push("shop.pack", *range(30))
    await api.push("shop.send", 1, 2, 3)
    await api.ack(await api.pop("shop.pack"), "failed")
    await api.pop("shop.pack", batch=4, autoAck=True)
    await api.pop("shop.pack", batch=5)
    await api.pop("shop.send", batch=3, consumerGroup="g", autoAck=True)
    body = (await api.call("GET", "/api/v1/resources/overview")).body
    assert (body["queues"], body["partitions"], body["namespaces"], body["tasks"]) == (2, 2, 1, 2)
    assert body["messages"] == {
        "total": 33,
        "pending": 25,
        "processing": 5,
        "completed": 7,
        "failed": 1,
        "deadLetter": 1,
    }
    assert body["lag"]["offset"] == {"avg": 25, "median": 25, "min": 25, "max": 25}
    assert body["throughput"]["ingestedPerSecond"] == round(33 / 300, 3)
    assert body["throughput"]["processedPerSecond"] == round(8 / 300, 3)
    await clear(api, "shop.pack")
    body = (await api.call("GET", "/api/v1/resources/overview")).body
    assert (body["messages"]["total"], body["messages"]["pending"]) == (33, 0)


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("GET", "resources/queues/a%00", "Queue must not contain control characters (at <queue> in the path)"),
        ("DELETE", "resources/queues/a%00", "Queue must not contain control characters (at <queue> in the path)"),
        ("DELETE", "queues/a%0A/clear", "Queue must not contain control characters (at <queue> in the path)"),
        ("DELETE", "queues/a/clear?partition=%00", "Partition must not contain control characters (at partition)"),
        ("GET", "resources/queues?namespace=%00", "Namespace must not contain control characters (at namespace)"),
        ("GET", "resources/partitions?queue=%00", "Queue must not contain control characters (at queue)"),
    ],
)
async def test_names_that_nothing_can_have_are_refused(api: Api, method: str, path: str, error: str) -> None:
    answer = await api.call(method, f"/api/v1/{path}")
    assert (answer.status, answer.body) == (400, {"error": error})


async def test_refreshing_statistics_says_of_how_many_things_they_are(api: Api) -> None:
    await api.push("shop.pack", 1)
    await api.push("shop.send", 1, partition="a")
    await api.push("shop.send", 1, partition="b")
    answer = await api.call("POST", "/api/v1/stats/refresh")
    assert (answer.status, answer.body) == (
        200,
        {
            "partition": {"partitionsUpdated": 3},
            "queue": {"queuesUpdated": 2},
            "namespace": {"namespacesUpdated": 1},
            "task": {"tasksUpdated": 2},
            "system": {"systemUpdated": 1},
            "cleanup": {},
        },
    )


async def test_the_depth_of_a_queue_is_what_it_stores_and_what_each_group_has_before_it(api: Api) -> None:
    await api.push("deep", 1, 2, 3, partition="a")
    await api.push("deep", 4, partition="b")
    assert (await depth(api, "deep")).items() >= {"queue": "deep", "depth": 4, "groups": {}}.items()
    for partition in ("a", "b"):
        await api.pop("deep", partition, consumerGroup="reads", batch=1, autoAck=True)
    assert (await depth(api, "deep"))["groups"] == {"reads": 2}
    assert await api.pop("deep", consumerGroup="late", subscriptionMode="new") == []
    assert (await depth(api, "deep"))["groups"] == {"late": 0, "reads": 2}
    await api.push("deep", 5, 6, partition="c")
    await api.push("deep", 7, partition="b")
    assert (await depth(api, "deep")).items() >= {"depth": 7, "groups": {"late": 3, "reads": 3}}.items()
    listed = (await api.call("GET", "/api/v1/consumer-groups")).body
    assert {group["name"]: group["totalLag"] for group in listed} == {"late": 3, "reads": 3}
    (message,) = await api.pop("deep", "b", consumerGroup="reads")
    assert (await depth(api, "deep"))["groups"]["reads"] == 3, "what is leased is not consumed"
    await api.ack([message], group="reads")
    assert (await depth(api, "deep"))["groups"]["reads"] == 2
    await api.call("DELETE", "/api/v1/queues/deep/clear")
    assert (await depth(api, "deep")).items() >= {"depth": 0, "groups": {"late": 0, "reads": 0}}.items()


async def test_the_depth_of_an_empty_queue_is_zero_and_of_a_missing_one_not_found(api: Api) -> None:
    await api.configure("empty")
    assert (await depth(api, "empty")).items() >= {"queue": "empty", "depth": 0, "groups": {}}.items()
    assert (await api.call("GET", "/api/v1/resources/queues/missing/depth")).status == 404


async def depth(api: Api, queue: str) -> dict[str, Any]:
    answer = await api.call("GET", f"/api/v1/resources/queues/{queue}/depth")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.body
    return found


def test_each_route_asks_for_the_access_it_needs() -> None:
    declared = [*queues.routes.operations, *groups.routes.operations]
    access = {(operation.method, operation.path): operation.access for operation in declared}
    for (method, pattern), level in access.items():
        if method == "GET":
            assert level is Access.READ_ONLY, pattern
        elif method == "DELETE" or pattern.endswith("/refresh"):
            assert level is Access.ADMIN, pattern
        else:
            assert level is Access.READ_WRITE, pattern
    assert len(access) == 27


async def test_ten_thousand_partitions_are_counted(api: Api, connection: Connection) -> None:
    await make_partitions(connection, "wide", 10_000)
    (queue,) = await queue_list(api)
    assert queue["partitions"] == 10_000
    assert queue["messages"] == {"total": 100_000, "pending": 50_000, "processing": 0}


async def make_partitions(connection: Connection, queue: str, count: int) -> None:
    """A queue with many partitions of ten messages each, of which two groups consumed five and seven."""
    await connection.execute("INSERT INTO queen.queues (name) VALUES ($1)", queue)
    await connection.execute("INSERT INTO queen.groups (name) VALUES ('one'), ('two')")
    await connection.execute(
        "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at)"
        " SELECT id, 'p' || n, 10, now() FROM queen.queues, generate_series(1, $1::integer) n",
        count,
    )
    await connection.execute(
        "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
        " SELECT id, base, 5, now(), '', '' FROM queen.partitions, unnest('{0,5}'::integer[]) base"
    )
    await connection.execute(
        "INSERT INTO queen.cursors (partition_id, group_id, committed, total_consumed)"
        " SELECT p.id, g.id, 3 + 2 * g.id, 3 + 2 * g.id FROM queen.partitions p, queen.groups g"
    )
    await connection.execute("ANALYZE")

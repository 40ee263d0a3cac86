"""Consumer groups: where they are, seeking, deleting."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

from queen.broker.events import Event
from queen.broker.maintenance.cleanup import UnusedGroups
from queen.broker.maintenance.election import Session
from queen.storage.database import Database
from tests.conftest import StartServer
from tests.support.ageing import Connection, age, broker_of, until, until_parked
from tests.support.api import Answer, Api

GROUPS = "/api/v1/consumer-groups"
BEGINNING = "1970-01-01T00:00:00Z"


async def groups(api: Api) -> list[dict[str, Any]]:
    answer = await api.call("GET", GROUPS)
    assert answer.status == 200
    rows: list[dict[str, Any]] = answer.body
    return rows


async def detail(api: Api, group: str) -> dict[str, Any]:
    answer = await api.call("GET", f"{GROUPS}/{group}")
    assert answer.status == 200
    queues: dict[str, Any] = answer.body
    return queues


async def lagging(api: Api, **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", f"{GROUPS}/lagging", **query)
    assert answer.status == 200
    rows: list[dict[str, Any]] = answer.body
    return rows


async def seek(api: Api, group: str, queue: str, body: Any) -> Answer:
    return await api.call("POST", f"{GROUPS}/{group}/queues/{queue}/seek", body)


async def skip(api: Api, group: str, queue: str, partition: str) -> Answer:
    return await api.call("POST", f"{GROUPS}/{group}/queues/{queue}/partitions/{partition}/seek")


async def delete(api: Api, group: str, queue: str | None = None, **query: Any) -> Any:
    path = f"{GROUPS}/{group}" + (f"/queues/{queue}" if queue else "")
    answer = await api.call("DELETE", path, **query)
    assert answer.status == 200
    return answer.body


async def take(api: Api, queue: str, group: str = "g", partition: str | None = None, batch: int = 100) -> list[Any]:
    """Consume what there is; returns the payloads."""
    query = {"consumerGroup": group, "batch": batch, "autoAck": True, "partitions": 100}
    return [message["data"] for message in await api.pop(queue, partition, **query)]


async def test_there_are_no_groups_at_first(api: Api) -> None:
    await api.push("orders", 1)
    assert await groups(api) == []
    assert await lagging(api) == []
    assert await detail(api, "nobody") == {}


async def test_groups_are_listed_by_name_and_queue_with_their_exact_lag(api: Api) -> None:
    for queue in ("b", "a"):
        for partition in ("x", "y"):
            await api.push(queue, 1, 2, 3, partition=partition)
    await take(api, "b", "g", batch=4)
    await take(api, "a", "g")
    await take(api, "a", "__QUEUE_MODE__", "x", batch=1)
    rows = await groups(api)
    assert [(row["name"], row["queueName"]) for row in rows] == [("__QUEUE_MODE__", "a"), ("g", "a"), ("g", "b")]
    assert rows[2] == {
        "name": "g",
        "topics": ["b"],
        "queueName": "b",
        "members": 2,
        "partitionsWithLag": 1,
        "totalLag": 2,
        "maxTimeLag": 0,
        "state": "Stable",
        "subscriptionMode": None,
        "subscriptionTimestamp": None,
        "subscriptionCreatedAt": None,
        "paused": False,
        "queuePaused": False,
        "leases": 0,
        "totalConsumed": 4,
        "namespace": "b",
        "task": "",
    }
    assert [(row["members"], row["partitionsWithLag"], row["totalLag"]) for row in rows] == [
        (1, 1, 2),
        (2, 0, 0),
        (2, 1, 2),
    ]


async def test_a_group_is_dead_until_it_consumes_and_lagging_when_it_is_late(
    start_server: StartServer, connection: Connection
) -> None:
    api, other = await start_server(), await start_server()
    await api.push("orders", 1, 2)
    await api.pop("orders", consumerGroup="g")
    assert [row["state"] for row in await groups(api)] == ["Dead"]
    await take(api, "orders", "h", batch=1)
    await age(connection, 310)
    # One that has not looked yet: stored messages get older, but when they were stored does not change.
    api = other
    rows = await groups(api)
    assert [row["state"] for row in rows] == ["Lagging", "Lagging"]
    assert all(310 <= row["maxTimeLag"] < 330 for row in rows)
    await take(api, "orders", "h")
    rows = await groups(api)
    assert [(row["name"], row["state"], row["maxTimeLag"] > 0) for row in rows] == [
        ("g", "Lagging", True),
        ("h", "Stable", False),
    ]


async def test_time_lag_is_the_age_of_the_first_message_not_consumed(api: Api, connection: Connection) -> None:
    await api.push("orders", 1, 2)
    await age(connection, 1000)
    await api.push("orders", 3)
    await age(connection, 500)
    await api.push("orders", 4)
    for taken, lag in ((1, 1500), (1, 500), (1, 0), (1, 0)):
        await take(api, "orders", batch=taken)
        (row,) = await groups(api)
        assert lag <= row["maxTimeLag"] < lag + 20


async def test_time_lag_is_computed_again_whenever_the_group_has_moved(api: Api, connection: Connection) -> None:
    await api.push("orders", 1, 2)
    await age(connection, 1000)
    await api.push("orders", 3)
    await take(api, "orders", batch=1)
    first = [(await groups(api))[0]["maxTimeLag"] >= 1000 for _ in range(2)]
    await take(api, "orders", batch=1)
    between = (await groups(api))[0]["maxTimeLag"] < 500
    assert (await seek(api, "g", "orders", {"timestamp": "2000-01-01T00:00:00Z"})).status == 200
    (row,) = await groups(api)
    assert (first, between, row["totalLag"], row["maxTimeLag"] >= 1000) == ([True, True], True, 3, True)


async def test_lagging_partitions_come_with_the_latest_first(api: Api, connection: Connection) -> None:
    for partition, seconds in (("old", 5000), ("older", 4000), ("new", 0)):
        await api.push("orders", 1, 2, 3, partition=partition)
        await take(api, "orders", "g", partition, batch=1)
        await age(connection, seconds)
    (leased,) = await api.pop("orders", "old", consumerGroup="h")
    rows = await lagging(api)
    assert [(row["consumer_group"], row["partition_name"]) for row in rows] == [
        ("g", "old"),
        ("h", "old"),
        ("g", "older"),
    ]
    assert rows[0] == {
        "consumer_group": "g",
        "queue_name": "orders",
        "partition_name": "old",
        "partition_id": leased["partitionId"],
        "worker_id": None,
        "offset_lag": 2,
        "time_lag_seconds": rows[0]["time_lag_seconds"],
        "lag_hours": 2.5,
        "oldest_unconsumed_at": rows[0]["oldest_unconsumed_at"],
        "last_consumed_at": rows[0]["last_consumed_at"],
    }
    assert 9000 <= rows[0]["time_lag_seconds"] < 9030
    assert (rows[1]["worker_id"], rows[1]["offset_lag"], rows[1]["last_consumed_at"]) == (leased["leaseId"], 3, None)
    assert [row["partition_name"] for row in await lagging(api, minLagSeconds=5000)] == ["old", "old"]
    assert len(await lagging(api, minLagSeconds=0)) == 4
    assert [row["partition_name"] for row in await lagging(api, limit=1, offset=2)] == ["older"]


@pytest.mark.parametrize("bad", ["x", "1.5", "-1", "9" * 30])
async def test_a_threshold_that_is_no_whole_number_is_refused(api: Api, bad: str) -> None:
    answer = await api.call("GET", f"{GROUPS}/lagging", minLagSeconds=bad)
    assert answer.status == 400
    assert answer.body == {"error": f"minLagSeconds must be a whole number from 0 up to 999999999999, not {bad!r}"}


async def test_a_group_shows_where_it_is_on_each_partition(api: Api, connection: Connection) -> None:
    await api.push("orders", 1, 2, 3, partition="b")
    await api.push("orders", 1, partition="a")
    await api.push("bills", 1, 2)
    await take(api, "orders", "a group", "b", batch=1)
    (leased,) = await api.pop("orders", "b", consumerGroup="a group")
    await take(api, "orders", "a group", "a")
    await take(api, "bills", "a group", batch=1)
    await age(connection, 60)
    body = await detail(api, quote("a group"))
    assert list(body) == ["bills", "orders"]
    a, b = body["orders"]["partitions"]
    assert b == {
        "partition": "b",
        "workerId": leased["leaseId"],
        "lastConsumedAt": b["lastConsumedAt"],
        "totalConsumed": 1,
        "offsetLag": 2,
        "timeLagSeconds": b["timeLagSeconds"],
        "leaseActive": True,
    }
    assert 60 <= b["timeLagSeconds"] < 80
    assert b["lastConsumedAt"].endswith("Z")
    assert (a["partition"], a["offsetLag"], a["timeLagSeconds"], a["leaseActive"]) == ("a", 0, 0, False)
    assert [p["partition"] for p in body["bills"]["partitions"]] == ["Default"]


async def test_seeking_to_the_end_skips_what_is_there(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("orders", 1, 2, 3, partition=partition)
    await take(api, "orders", "g", "a", batch=1)
    await take(api, "orders", "g", "b", batch=1)
    await take(api, "orders", "other", "a", batch=1)
    answer = await seek(api, "g", "orders", {"toEnd": True})
    assert (answer.status, answer.body) == (
        200,
        {
            "success": True,
            "consumerGroup": "g",
            "queueName": "orders",
            "seekToEnd": True,
            "targetTimestamp": None,
            "partitionsUpdated": 2,
            "seekId": answer.body["seekId"],
            "cursor": None,
        },
    )
    assert await take(api, "orders", "g") == []
    assert await take(api, "orders", "other", "a") == [2, 3]
    await api.push("orders", 4, partition="b")
    assert await take(api, "orders", "g") == [4]


async def test_seeking_to_a_time_goes_on_with_the_first_message_after_it(api: Api, connection: Connection) -> None:
    for number in range(6):
        await api.push("orders", number, number + 0.5)
        await age(connection, 100)
    await take(api, "orders")
    now = datetime.now(UTC)
    for seconds, first in ((1000, 0), (550, 1), (450, 2), (350, 3), (250, 4), (150, 5), (50, None)):
        moment = (now - timedelta(seconds=seconds)).isoformat()
        answer = await seek(api, "g", "orders", {"timestamp": moment})
        assert (answer.body["seekToEnd"], answer.body["targetTimestamp"]) == (False, moment)
        assert answer.body["partitionsUpdated"] == 1
        expected = [] if first is None else [n + half for n in range(first, 6) for half in (0, 0.5)]
        assert await take(api, "orders") == expected


async def test_seeking_to_the_very_time_of_a_message_goes_on_after_it(api: Api) -> None:
    for number in range(3):
        await api.push("orders", number)
    messages = await api.pop("orders", batch=3, consumerGroup="g")
    await api.ack(messages, group="g")
    for number, message in enumerate(messages):
        await seek(api, "g", "orders", {"timestamp": message["createdAt"]})
        assert await take(api, "orders") == list(range(number + 1, 3))


async def test_a_seek_finds_its_place_among_gaps_and_never_goes_below_the_floor(
    api: Api, connection: Connection
) -> None:
    for number in range(40):
        await api.push("orders", number)
        await age(connection, 1000)
    await take(api, "orders")
    await connection.execute("DELETE FROM queen.segments WHERE base_offset < 8 OR base_offset BETWEEN 15 AND 24")
    await connection.execute("UPDATE queen.partitions SET floor_offset = 8")
    stored = [number for number in range(40) if number >= 8 and not 15 <= number <= 24]
    for number in range(-2, 42):
        moment = datetime.now(UTC) - timedelta(seconds=1000 * (40 - number) - 500)
        await seek(api, "g", "orders", {"timestamp": moment.isoformat()})
        (row,) = await groups(api)
        committed = await connection.fetchval("SELECT committed FROM queen.cursors")
        assert committed >= 8
        assert [n for n in stored if n >= committed] == [n for n in stored if n > number], number
        assert row["totalLag"] == 40 - committed


async def test_seeking_to_the_beginning_delivers_everything_again(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("orders", 1, 2, partition=partition)
    await take(api, "orders")
    assert (await seek(api, "g", "orders", {"timestamp": BEGINNING})).body["partitionsUpdated"] == 2
    assert await take(api, "orders") == [1, 2, 1, 2]
    await api.call("DELETE", "/api/v1/queues/orders/clear", partition="a")
    await seek(api, "g", "orders", {"timestamp": BEGINNING})
    assert await take(api, "orders") == [1, 2]


async def test_a_seek_ends_leases_but_keeps_the_count_of_failures(api: Api, connection: Connection) -> None:
    await api.configure("orders", retryDelay=0)
    await api.push("orders", 1, 2)
    await api.ack(await api.pop("orders", consumerGroup="g", batch=2), "failed", group="g")
    messages = await api.pop("orders", consumerGroup="g", batch=2)
    await seek(api, "g", "orders", {"timestamp": BEGINNING})
    assert [result["error"] for result in await api.ack(messages, group="g")] == ["Invalid or expired lease"] * 2
    assert await connection.fetchval("SELECT attempts FROM queen.cursors") == 1
    assert await take(api, "orders") == [1, 2]


async def test_a_pop_that_waits_gets_what_a_seek_back_uncovers(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    await one.push("orders", 1)
    for partition in (None, "Default"):
        await take(one, "orders")
        for api, other in ((one, two), (two, one)):
            query = {"consumerGroup": "g", "wait": True, "timeout": 20_000, "autoAck": True}
            waiting = asyncio.create_task(api.pop("orders", partition, **query))
            await until_parked(api)
            await seek(other, "g", "orders", {"timestamp": BEGINNING})
            async with asyncio.timeout(100):
                assert [message["data"] for message in await waiting] == [1]


async def test_groups_are_paged_searched_and_sorted_by_the_server(api: Api, connection: Connection) -> None:
    await api.push("orders", *range(5))
    await age(connection, 60)
    await api.configure("bills", namespace="money", task="count")
    await api.push("bills", *range(9))
    for group, queue, count in (("one", "orders", 3), ("two", "orders", 5), ("one", "bills", 1)):
        await api.pop(queue, consumerGroup=group, batch=count, autoAck=True)
    for query, expected in (
        ({}, ["one bills", "one orders", "two orders"]),
        ({"order": "desc"}, ["two orders", "one orders", "one bills"]),
        ({"sort": "queue"}, ["one bills", "one orders", "two orders"]),
        ({"sort": "lag"}, ["one bills", "one orders", "two orders"]),
        ({"sort": "time"}, ["one orders", "one bills", "two orders"]),
        ({"lagging": True, "sort": "lag", "order": "asc"}, ["one orders", "one bills"]),
        ({"queue": "orders"}, ["one orders", "two orders"]),
        ({"search": "ILL"}, ["one bills"]),
        ({"group": "one"}, ["one bills", "one orders"]),
        ({"group": "on"}, []),
        ({"group": "one", "queue": "orders"}, ["one orders"]),
        ({"namespace": "money"}, ["one bills"]),
        ({"task": "count", "group": "two"}, []),
    ):
        rows = (await api.call("GET", GROUPS, **query)).body
        names = [f"{row['name']} {row['queueName']}" for row in rows]
        assert names == expected, query
        page = (await api.call("GET", GROUPS, limit=1, offset=1, **query)).body
        assert page["total"] == len(expected)
        # The second may have changed between the two, which shows in how long they lag.
        assert [row | {"maxTimeLag": 0} for row in page["consumer_groups"]] == [
            row | {"maxTimeLag": 0} for row in rows[1:2]
        ]
        assert page["pagination"] == {"limit": 1, "offset": 1}


async def preview(api: Api, **query: Any) -> dict[str, Any]:
    answer = await api.call("GET", f"{GROUPS}/g/queues/q/seek/preview", **query)
    assert answer.status == 200, answer
    effect: dict[str, Any] = answer.body
    return effect


async def test_a_seek_to_an_offset_goes_to_the_nearest_that_each_partition_holds(api: Api) -> None:
    for partition, count in (("long", 10), ("short", 3)):
        await api.push("q", *range(count), partition=partition)
        await api.pop("q", partition, consumerGroup="g", autoAck=True, batch=2)
    answer = await api.call("POST", f"{GROUPS}/g/queues/q/seek", {"offset": 7})
    assert (answer.body["partitionsUpdated"], answer.body["seekToEnd"]) == (2, False)
    assert [one["data"] for one in await api.pop("q", "long", consumerGroup="g", batch=10)] == [7, 8, 9]
    assert await api.pop("q", "short", consumerGroup="g") == []
    answer = await api.call("POST", f"{GROUPS}/g/queues/q/partitions/short/seek", {"offset": 1})
    assert (answer.body["updated"], answer.body["offset"]) == (True, 1)
    assert [one["data"] for one in await api.pop("q", "short", consumerGroup="g", batch=10)] == [1, 2]
    await api.call("POST", f"{GROUPS}/g/queues/q/seek", {"toBeginning": True})
    assert len(await api.pop("q", consumerGroup="g", batch=100, partitions=2)) == 13
    answer = await api.call("POST", f"{GROUPS}/g/queues/q/partitions/short/seek")
    assert answer.body["offset"] == 3


async def test_a_preview_says_what_a_seek_then_does(api: Api, connection: Connection) -> None:
    await api.push("q", *range(10), partition="p")
    await age(connection, 3600)
    await api.push("q", *range(5), partition="p")
    await api.push("q", 1, 2, partition="other")
    for partition, count in (("p", 4), ("other", 2)):
        await api.pop("q", partition, consumerGroup="g", autoAck=True, batch=count)
    await api.pop("q", "p", consumerGroup="g")
    an_hour_ago = (datetime.now(UTC) - timedelta(minutes=30)).isoformat()
    for place, redelivered, skipped, changed in (
        ({"toEnd": True}, 0, 11, 1),
        ({"toBeginning": True}, 6, 0, 2),
        ({"timestamp": an_hour_ago}, 2, 6, 2),
        ({"offset": 3}, 1, 0, 1),
    ):
        effect = await preview(api, **place)
        assert (effect["redelivered"], effect["skipped"], effect["partitionsChanged"]) == (
            redelivered,
            skipped,
            changed,
        )
        assert effect["leases"] == 1
    effect = await preview(api, offset=3, partition="p", limit=1)
    (move,) = effect["partitions"]
    assert (move["partition"], move["position"], move["target"], move["leased"]) == ("p", 4, 3, True)
    assert len((await preview(api, toEnd=True, limit=1))["partitions"]) == 1
    # Nothing has moved so far.
    assert [one["offsetLag"] for one in (await detail(api, "g"))["q"]["partitions"]] == [0, 11]
    await api.call("POST", f"{GROUPS}/g/queues/q/seek", {"timestamp": an_hour_ago})
    assert [one["offsetLag"] for one in (await detail(api, "g"))["q"]["partitions"]] == [2, 5]


async def test_a_preview_counts_partitions_that_a_subscription_covers(api: Api) -> None:
    await api.push("q", 0, partition="a")
    await api.pop("q", consumerGroup="g", subscriptionMode="new")
    await api.push("q", 1, 2, partition="b")
    effect = await preview(api, toEnd=True)
    assert (effect["redelivered"], effect["skipped"]) == (0, 2)
    assert (await api.call("GET", f"{GROUPS}/nobody/queues/q/seek/preview", toEnd=True)).body["partitions"] == []
    assert (await api.call("GET", f"{GROUPS}/g/queues/q/seek/preview", toEnd=True, partition="no")).status == 404


async def test_a_released_lease_gives_its_messages_to_the_next_pop_at_once(api: Api) -> None:
    path = f"{GROUPS}/g/queues/q/partitions/Default/release"
    await api.push("q", 1, 2)
    held = await api.pop("q", consumerGroup="g", batch=2)
    waiting = asyncio.create_task(api.pop("q", consumerGroup="g", batch=2, wait=True, timeout=60_000))
    await until(lambda: broker_of(api).popper.parked == 1)
    answer = await api.call("POST", path, {"leaseId": "00000000-0000-0000-0000-000000000000"})
    assert answer.status == 409
    assert held[0]["leaseId"] in answer.body["error"]
    answer = await api.call("POST", path, {"leaseId": held[0]["leaseId"]})
    assert (answer.status, answer.body["leaseId"]) == (200, held[0]["leaseId"])
    again = await waiting
    assert [one["data"] for one in again] == [1, 2]
    assert not any(one["success"] for one in await api.ack(held, group="g"))
    assert (await api.call("POST", path)).body["leaseId"] == again[0]["leaseId"]
    assert (await api.call("POST", path)).status == 404
    for wrong in (f"{GROUPS}/nobody/queues/q/partitions/Default", f"{GROUPS}/g/queues/q/partitions/no"):
        assert (await api.call("POST", f"{wrong}/release")).status == 404


async def test_a_page_shows_where_a_group_starts_on_partitions_it_has_not_met(api: Api) -> None:
    await api.push("orders", 1, 2, partition="old")
    await take(api, "orders", "g", "old")
    await api.pop("orders", consumerGroup="new", subscriptionMode="new")
    await api.push("orders", 3, partition="later")
    answer = await api.call("GET", f"{GROUPS}/new/queues/orders/partitions", sort="name")
    found = {one["partition"]: one["offsetLag"] for one in answer.body["partitions"]}
    assert (found["later"], found["old"]) == (1, 0)


async def test_seeking_an_unknown_group_moves_nothing(api: Api) -> None:
    await api.push("orders", 1)
    await take(api, "orders", "g")
    for group, queue in (("nobody", "orders"), ("g", "nothing")):
        answer = await seek(api, group, queue, {"toEnd": True})
        assert (answer.status, answer.body["success"], answer.body["partitionsUpdated"]) == (200, True, 0)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "Must specify either 'toEnd': true or 'timestamp'"),
        ({"toEnd": False}, "Must specify either 'toEnd': true or 'timestamp'"),
        ({"timestamp": None}, "Must specify either 'toEnd': true or 'timestamp'"),
        (
            {"timestamp": "yesterday"},
            "timestamp must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not 'yesterday'",
        ),
        ({"timestamp": 5}, "timestamp must be a string or null, not a whole number (at timestamp)"),
        ({"timestamp": ""}, "timestamp must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not ''"),
        ([], "request body must be a JSON object"),
    ],
)
async def test_a_seek_says_what_is_wrong_with_its_body(api: Api, body: Any, error: str) -> None:
    answer = await seek(api, "g", "orders", body)
    assert (answer.status, answer.body) == (400, {"error": error})


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "%00", "ConsumerGroup"),
        ("DELETE", "%00", "ConsumerGroup"),
        ("DELETE", "g/queues/%00", "Queue"),
        ("POST", "%00/subscription", "ConsumerGroup"),
        ("POST", "%00/queues/q/seek", "ConsumerGroup"),
        ("POST", "g/queues/%00/seek", "Queue"),
        ("POST", "g/queues/q/partitions/%00/seek", "Partition"),
    ],
)
async def test_names_that_nothing_can_have_are_refused(api: Api, method: str, path: str, kind: str) -> None:
    body = {"subscriptionTimestamp": "2026-04-26T10:59:28Z"} if path.endswith("subscription") else {"toEnd": True}
    answer = await api.call(method, f"{GROUPS}/{path}", body if method == "POST" else None)
    assert answer.status == 400
    assert answer.body["error"].startswith(f"{kind} must not contain control characters (at <")


async def test_a_seek_needs_a_body(api: Api) -> None:
    answer = await api.call("POST", f"{GROUPS}/g/queues/orders/seek")
    assert (answer.status, answer.body) == (400, {"error": "Empty request body"})


async def test_times_at_the_ends_of_the_calendar_are_accepted(api: Api) -> None:
    await api.push("orders", 1)
    await take(api, "orders")
    for moment, status in (
        ("0001-01-01T00:00:00+14:00", 400),
        ("0001-01-01", 200),
        ("9999-12-31T23:59:59.999999Z", 200),
        ("9999-12-31T23:59:59-01:00", 400),
    ):
        assert (await seek(api, "g", "orders", {"timestamp": moment})).status == status, moment


async def test_skipping_one_partition_leaves_the_others(api: Api) -> None:
    for partition in ("a b", "c"):
        await api.push("orders", 1, 2, partition=partition)
    await take(api, "orders", "g", "a%20b", batch=1)
    await take(api, "orders", "g", "c", batch=1)
    answer = await skip(api, "g", "orders", "a%20b")
    assert answer.status == 200
    moved_to = answer.body.pop("cursorMovedTo")
    assert answer.body == {
        "success": True,
        "consumerGroup": "g",
        "queueName": "orders",
        "partitionName": "a b",
        "updated": True,
        "offset": 2,
        "seekId": answer.body["seekId"],
    }
    assert datetime.now(UTC) - datetime.fromisoformat(moved_to) < timedelta(seconds=30)
    assert await take(api, "orders") == [2]


async def test_skipping_where_the_group_has_never_been_changes_nothing(api: Api) -> None:
    await api.push("orders", 1)
    answer = await skip(api, "nobody", "orders", "Default")
    assert (answer.status, answer.body["updated"], answer.body["cursorMovedTo"]) == (200, False, None)
    for queue, partition in (("orders", "x"), ("nothing", "Default")):
        answer = await skip(api, "g", queue, partition)
        assert (answer.status, answer.body) == (404, {"error": "Partition not found"})


async def test_a_deleted_group_starts_over(api: Api, connection: Connection) -> None:
    for queue in ("orders", "bills"):
        await api.push(queue, 1, 2)
        await take(api, queue, "g")
        await take(api, queue, "other")
    assert await delete(api, "g") == {
        "success": True,
        "consumerGroup": "g",
        "deletedPartitions": 2,
        "metadataDeleted": True,
    }
    assert [row["name"] for row in await groups(api)] == ["other", "other"]
    assert await take(api, "orders", "g") == [1, 2]
    assert await take(api, "orders", "other") == []
    assert (await delete(api, "nobody"))["deletedPartitions"] == 0


async def test_a_group_deleted_for_one_queue_stays_where_it_is_on_others(api: Api) -> None:
    for queue in ("orders", "bills"):
        await api.push(queue, 1)
        await take(api, queue)
    assert await delete(api, "g", "orders", deleteMetadata=False) == {
        "success": True,
        "consumerGroup": "g",
        "queueName": "orders",
        "deletedPartitions": 1,
        "metadataDeleted": False,
    }
    assert await take(api, "bills") == []
    assert await take(api, "orders") == [1]
    assert (await delete(api, "g", "nothing"))["deletedPartitions"] == 0


async def group_names(connection: Connection) -> set[str]:
    return {row["name"] for row in await connection.fetch("SELECT name FROM queen.groups")}


async def test_a_group_that_is_deleted_everywhere_is_gone(api: Api, connection: Connection) -> None:
    for queue in ("orders", "bills"):
        await api.push(queue, 1)
        await take(api, queue)
    await delete(api, "g", "orders")
    assert "g" in await group_names(connection)
    await delete(api, "g", deleteMetadata=False)
    assert "g" in await group_names(connection)
    await delete(api, "g")
    assert "g" not in await group_names(connection)
    assert await take(api, "orders") == [1]


async def test_groups_that_ask_for_what_does_not_exist_leave_nothing_behind(api: Api, connection: Connection) -> None:
    await api.push("orders", 1)
    for number in range(5):
        assert await api.pop("nothing", consumerGroup=f"g{number}") == []
        partition = f"51756565-0000-8000-8000-{number + 1000:012x}"
        ack = {"transactionId": "t", "partitionId": partition, "consumerGroup": f"a{number}"}
        assert (await api.call("POST", "/api/v1/ack", ack)).body[0]["success"] is False
        operation = {"type": "ack", "transactionId": "t", "partitionId": partition, "consumerGroup": f"t{number}"}
        assert (await api.call("POST", "/api/v1/transaction", {"operations": [operation]})).body["success"] is False
        ref = {"id": 5, "namespace": f"n{number}", "topic": "nothing"}
        for path in ("/ack", "/nack", "/api/v1/topics/extend", "/api/v1/topics/release", "/dlq/delete", "/dlq/retry"):
            answer = await api.call("POST", path, ref)
            assert "not found" in str(answer.body), (path, answer)
        assert (await api.call("GET", "/dequeue", namespace=f"n{number}", topic="nothing")).body == []
        assert (await api.call("GET", "/api/v1/topics/dequeue/many", namespace=f"n{number}")).body == []
    assert await group_names(connection) <= {"__QUEUE_MODE__"}
    # Nor is a queue or a topic counted that there is not.
    meter = broker_of(api).meter
    assert set(meter.queues) == {"orders"}
    assert (meter.topics, meter.topic_requests) == ({}, {})


async def test_groups_that_have_consumed_nothing_for_an_hour_go(
    api: Api, connection: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.push("orders", 1)
    await take(api, "orders", "used")
    await connection.execute("INSERT INTO queen.groups (name) VALUES ('unused'), ('unused too')")
    monkeypatch.setattr("queen.broker.maintenance.cleanup._UNUSED_SECONDS", 0.0)
    published: list[Event] = []
    database = Database(dsn)
    session = await Session.open(database)
    job = UnusedGroups(100, published.extend)
    await job.run(session)
    await connection.execute("INSERT INTO queen.groups (name) VALUES ('new')")
    assert {"unused", "new"} < await group_names(connection)
    await job.run(session)
    assert await group_names(connection) - {"__QUEUE_MODE__"} == {"used", "new"}
    assert {event[5] for event in published} == {"unused", "unused too"}
    await session.close()
    await database.close()


async def test_dead_letters_outlive_their_group(api: Api, connection: Connection) -> None:
    await api.configure("orders", retryLimit=0)
    await api.push("orders", 1)
    await api.ack(await api.pop("orders", consumerGroup="g"), "failed", group="g")
    await delete(api, "g")
    assert await connection.fetchval("SELECT count(*) FROM queen.dead_letters") == 1


async def test_deleting_a_group_ends_its_leases_and_wakes_waiting_pops(api: Api) -> None:
    await api.push("orders", 1)
    messages = await api.pop("orders", consumerGroup="g")
    waiting = asyncio.create_task(api.pop("orders", consumerGroup="g", wait=True, timeout=20_000))
    await until_parked(api)
    await delete(api, "g")
    async with asyncio.timeout(100):
        assert [message["data"] for message in await waiting] == [1]
    (result,) = await api.ack(messages, group="g")
    assert (result["success"], result["error"]) == (False, "Invalid or expired lease")


async def test_seeks_deletes_pops_and_acks_at_once_never_fail(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    partitions = [f"p{number}" for number in range(8)]
    for partition in partitions:
        await one.push("orders", *range(5), partition=partition)
    stop = asyncio.Event()
    popped = 0

    async def consume(api: Api) -> None:
        nonlocal popped
        while not stop.is_set():
            messages = await api.pop("orders", consumerGroup="g", batch=20, partitions=8, wait=True, timeout=200)
            popped += len(messages)
            if messages:
                await api.ack(messages, group="g")

    consumers = [asyncio.create_task(consume(api)) for api in (one, two, one, two)]
    try:
        for round in range(30):
            api = (one, two)[round % 2]
            body = {"toEnd": True} if round % 3 == 1 else {"timestamp": BEGINNING}
            answer = await seek(api, "g", "orders", body)
            assert answer.status == 200
            if round % 5 == 0:
                await delete(api, "g")
    finally:
        stop.set()
        await asyncio.gather(*consumers)
    assert popped > 0
    await delete(one, "g")
    assert sorted(await take(two, "orders")) == sorted(list(range(5)) * 8)


async def test_ten_thousand_partitions_are_sought_and_listed_quickly(api: Api, connection: Connection) -> None:
    await connection.execute("INSERT INTO queen.queues (name) VALUES ('wide')")
    await connection.execute("INSERT INTO queen.groups (name) VALUES ('g')")
    await connection.execute(
        "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at, created_at)"
        " SELECT id, 'p' || n, 10, now(), now() - interval '1 day' FROM queen.queues, generate_series(1, 10000) n"
    )
    await connection.execute(
        "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
        " SELECT id, n, 1, now() - make_interval(secs => 10 - n), '', '' FROM queen.partitions, generate_series(0, 9) n"
    )
    await connection.execute(
        "INSERT INTO queen.cursors (partition_id, group_id, committed) SELECT id, 1, 10 FROM queen.partitions"
    )
    await connection.execute("ANALYZE")
    answer = await seek(api, "g", "wide", {"timestamp": BEGINNING})
    assert answer.body["partitionsUpdated"] == 10_000
    (row,) = await groups(api)
    assert (row["members"], row["partitionsWithLag"], row["totalLag"]) == (10_000, 10_000, 100_000)


async def test_a_late_ack_does_not_bring_a_deleted_group_back(api: Api) -> None:
    await api.push("orders", 1, 2)
    (message,) = await api.pop("orders", consumerGroup="late")
    assert (await api.call("DELETE", "/api/v1/consumer-groups/late")).status == 200
    (result,) = await api.ack([message], group="late")
    assert (result["success"], result["error"]) == (False, "Invalid or expired lease")
    assert await api.pop("orders", consumerGroup="late", subscriptionMode="new") == []
    await api.push("orders", 3)
    assert [message["data"] for message in await api.pop("orders", consumerGroup="late", batch=9)] == [3]


async def positions(api: Api, queue: str = "q", **query: Any) -> dict[str, Any]:
    answer = await api.call("GET", f"{GROUPS}/g/queues/{queue}/partitions", **query)
    assert answer.status == 200, answer
    body: dict[str, Any] = answer.body
    return body


async def test_positions_of_a_group_are_searched_sorted_and_paged(api: Api, connection: Connection) -> None:
    for number in range(5):
        await api.push("q", *range(number + 1), partition=f"p{number}")
    await take(api, "q", "g", "p3", batch=3)
    await take(api, "q", "g", "p4", batch=1)
    await api.pop("q", partition="p2", batch=1, consumerGroup="g")
    await api.call("GET", "/api/v1/pop/queue/q", consumerGroup="others")
    page = await positions(api)
    assert [(one["partition"], one["offsetLag"], one["leaseActive"]) for one in page["partitions"]] == [
        ("p2", 3, True),
        ("p3", 1, False),
        ("p4", 4, False),
    ]
    assert page["total"] == 3
    whole = (await api.call("GET", f"{GROUPS}/g")).body["q"]["partitions"]
    # A second may have passed between the two.
    without_age = [one | {"timeLagSeconds": 0} for one in page["partitions"]]
    assert without_age == [one | {"timeLagSeconds": 0} for one in whole]
    names = {
        "behind": ["p4", "p2", "p3"],
        "consumed": ["p3", "p4", "p2"],
    }
    for sort, wanted in names.items():
        assert [one["partition"] for one in (await positions(api, sort=sort))["partitions"]] == wanted
        page = await positions(api, sort=sort, order="asc", limit=1, offset=1)
        assert [one["partition"] for one in page["partitions"]] == [wanted[1]]
    assert (await positions(api, sort="last"))["partitions"][-1]["partition"] == "p2"
    assert [one["partition"] for one in (await positions(api, order="desc", limit=2))["partitions"]] == ["p4", "p3"]
    found = await positions(api, search="P3")
    assert (found["total"], [one["partition"] for one in found["partitions"]]) == (1, ["p3"])
    await age(connection, 90)
    assert all(90 <= one["timeLagSeconds"] < 110 for one in (await positions(api))["partitions"])


async def test_positions_that_a_subscription_promises_are_listed_like_the_others(api: Api) -> None:
    await api.push("q", 1, partition="old")
    await api.pop("q", consumerGroup="g", subscriptionMode="new", partition="old")
    await api.call("POST", f"{GROUPS}/g/subscription", {"subscriptionTimestamp": "2020-01-01T00:00:00Z"})
    await api.push("q", 2, 3, partition="young")
    listed = (await positions(api, sort="behind"))["partitions"]
    whole = (await api.call("GET", f"{GROUPS}/g")).body["q"]["partitions"]
    assert sorted(one["partition"] for one in listed) == sorted(one["partition"] for one in whole)
    assert {one["partition"]: one["offsetLag"] for one in listed} == {
        one["partition"]: one["offsetLag"] for one in whole
    }


async def test_positions_on_an_unknown_queue_or_of_an_unknown_group(api: Api) -> None:
    await api.push("q", 1)
    assert await positions(api) == {"partitions": [], "total": 0, "pagination": {"limit": 1000, "offset": 0}}
    assert (await api.call("GET", f"{GROUPS}/g/queues/none/partitions")).status == 404

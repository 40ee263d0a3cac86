"""Where a group starts on a queue it meets for the first time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.ageing import Connection, age, broker_of, until
from tests.support.api import Answer, Api

GROUPS = "/api/v1/consumer-groups"


async def take(api: Api, queue: str, group: str = "g", partition: str | None = None, **query: Any) -> list[Any]:
    """Consume what there is; returns the payloads."""
    messages = await api.pop(
        queue, partition, consumerGroup=group, **{"batch": 100, "partitions": 100, "autoAck": True} | query
    )
    return [message["data"] for message in messages]


async def subscription(api: Api, group: str, body: Any) -> Answer:
    return await api.call("POST", f"{GROUPS}/{group}/subscription", body)


async def summary(api: Api, group: str = "g") -> dict[str, Any]:
    rows: list[dict[str, Any]] = (await api.call("GET", GROUPS)).body
    (row,) = (row for row in rows if row["name"] == group)
    return row


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    "start", [{"subscriptionMode": "new"}, {"subscriptionMode": "new-only"}, {"subscriptionFrom": "now"}]
)
async def test_a_new_group_skips_what_is_there_and_gets_what_comes(api: Api, start: dict[str, str]) -> None:
    for partition in ("a", "b"):
        await api.push("orders", "old", partition=partition)
    assert await take(api, "orders", **start) == []
    await api.push("orders", "new", partition="a")
    await api.push("orders", "new", partition="c")
    assert await take(api, "orders") == ["new", "new"]
    assert sorted(await take(api, "orders", "other")) == ["new", "new", "old", "old"]


@pytest.mark.parametrize("start", ["", "all", "from_beginning", "anything"])
async def test_other_modes_start_at_the_first_message(api: Api, connection: Connection, start: str) -> None:
    await api.push("orders", "old")
    assert await take(api, "orders", subscriptionMode=start) == ["old"]
    assert await connection.fetchval("SELECT count(*) FROM queen.subscriptions") == 0


async def test_a_group_starts_after_the_time_it_asks_for(api: Api, connection: Connection) -> None:
    for number in range(4):
        await api.push("orders", number, partition="a")
        await api.push("orders", number, partition="b")
        await age(connection, 100)
    assert await take(api, "orders", subscriptionFrom=ago(250)) == [2, 3, 2, 3]
    row = await summary(api)
    assert row["subscriptionMode"] == "timestamp"
    assert abs(datetime.fromisoformat(row["subscriptionTimestamp"]) - datetime.fromisoformat(ago(250))) < timedelta(
        seconds=30
    )
    assert row["subscriptionCreatedAt"].endswith("Z")


async def test_a_time_that_cannot_be_read_is_ignored(api: Api) -> None:
    await api.push("orders", "old")
    assert await take(api, "orders", subscriptionFrom="yesterday") == ["old"]


async def test_only_the_first_pop_decides_where_a_group_starts(api: Api) -> None:
    await api.push("orders", "old", partition="a")
    await take(api, "orders", subscriptionMode="new")
    await api.push("orders", "new", partition="a")
    assert await take(api, "orders", subscriptionMode="all", subscriptionFrom=ago(1000)) == ["new"]


async def test_queue_mode_always_starts_at_the_beginning(start_server: StartServer) -> None:
    api = await start_server(default_subscription_mode="new")
    await api.push("orders", "old")
    messages = await api.pop("orders", subscriptionMode="new", subscriptionFrom="now")
    assert [message["data"] for message in messages] == ["old"]


async def test_the_server_says_where_groups_start_that_do_not_say(start_server: StartServer) -> None:
    api = await start_server(default_subscription_mode="new")
    await api.push("orders", "old")
    assert await take(api, "orders", "silent") == []
    assert await take(api, "orders", "explicit", subscriptionMode="all") == ["old"]
    await api.push("orders", "new")
    assert await take(api, "orders", "silent") == ["new"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_new_group_subscribes_at_its_first_pop_of_an_empty_or_unknown_queue(api: Api, known: bool) -> None:
    if known:
        await api.configure("orders")
    assert await take(api, "orders", subscriptionMode="new") == []
    await api.push("orders", "first")
    assert await take(api, "orders", subscriptionMode="new") == ["first"]


async def test_a_new_group_that_waits_for_an_unknown_queue_gets_its_first_message(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    waiting = asyncio.create_task(take(one, "orders", subscriptionMode="new", wait=True, timeout=20_000))

    async def one_waits() -> bool:
        return broker_of(one).popper.parked > 0

    await until(one_waits)
    await two.push("orders", "first")
    async with asyncio.timeout(100):
        assert await waiting == ["first"]


async def test_a_new_group_may_start_on_one_partition_and_later_on_another(api: Api) -> None:
    for partition in ("a", "b", "c"):
        await api.push("orders", "old", partition=partition)
    for partition in ("a", "b"):
        assert await take(api, "orders", partition=partition, subscriptionMode="new") == []
        await api.push("orders", "new", partition=partition)
        assert await take(api, "orders", partition=partition) == ["new"]
    assert await take(api, "orders", partition="c") == ["old"]


async def test_a_subscription_of_one_worker_holds_on_the_other(start_server: StartServer) -> None:
    one = await start_server(worker_id=0, num_workers=2)
    two = await start_server(worker_id=1, num_workers=2)
    await one.push("orders", "old")
    assert await take(one, "orders", subscriptionMode="new") == []
    assert await take(two, "orders") == []
    await two.push("orders", "new")
    assert await take(two, "orders") == ["new"]
    assert await take(one, "orders") == []


async def test_a_new_group_is_listed_from_its_first_pop_on(api: Api, connection: Connection) -> None:
    for partition in ("a", "b"):
        await api.push("orders", 1, 2, partition=partition)
    await take(api, "orders", subscriptionMode="new")
    row = await summary(api)
    assert row["subscriptionMode"] == "new"
    assert datetime.now(UTC) - datetime.fromisoformat(row["subscriptionTimestamp"]) < timedelta(seconds=30)
    assert (row["members"], row["partitionsWithLag"], row["totalLag"], row["state"]) == (2, 0, 0, "Dead")
    await api.push("orders", 3, 4, 5, partition="b")
    row = await summary(api)
    assert (row["members"], row["partitionsWithLag"], row["totalLag"]) == (2, 1, 3)
    await connection.execute("UPDATE queen.subscriptions SET since = since - interval '10 minutes'")
    await age(connection, 400)
    (late, later) = (await api.call("GET", f"{GROUPS}/lagging", minLagSeconds=300)).body
    assert (late["offset_lag"], late["worker_id"], late["last_consumed_at"]) == (2, None, None)
    assert later["offset_lag"] == 5
    partitions = (await api.call("GET", f"{GROUPS}/g")).body["orders"]["partitions"]
    assert [(p["partition"], p["offsetLag"], p["totalConsumed"]) for p in partitions] == [("a", 2, 0), ("b", 5, 0)]


async def test_a_deleted_group_that_keeps_its_subscription_starts_there_again(api: Api) -> None:
    await api.push("orders", "old")
    await take(api, "orders", subscriptionMode="new")
    await api.push("orders", "new")
    assert await take(api, "orders") == ["new"]
    await api.call("DELETE", f"{GROUPS}/g", deleteMetadata=False)
    assert await take(api, "orders") == ["new"]
    await api.call("DELETE", f"{GROUPS}/g/queues/orders", deleteMetadata="false")
    assert await take(api, "orders") == ["new"]
    await api.call("DELETE", f"{GROUPS}/g/queues/orders")
    assert await take(api, "orders") == ["old", "new"]


async def test_a_group_deleted_with_its_subscription_may_subscribe_again(api: Api) -> None:
    await api.push("orders", "old")
    await take(api, "orders", subscriptionMode="new")
    await api.push("orders", "new")
    await api.call("DELETE", f"{GROUPS}/g")
    assert await take(api, "orders", subscriptionMode="new") == []
    await api.push("orders", "newest")
    assert await take(api, "orders") == ["newest"]


async def test_a_subscription_outlives_its_queue(api: Api) -> None:
    await api.push("orders", "old")
    await take(api, "orders", subscriptionMode="new")
    await api.call("DELETE", "/api/v1/resources/queues/orders")
    await api.push("orders", "first of the next queue")
    assert (await summary(api))["subscriptionMode"] == "new"
    assert await take(api, "orders") == ["first of the next queue"]


async def test_a_new_group_can_seek_back_to_what_it_skipped(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("orders", "old", partition=partition)
    await take(api, "orders", subscriptionMode="new")
    answer = await api.call("POST", f"{GROUPS}/g/queues/orders/seek", {"timestamp": "1970-01-01T00:00:00Z"})
    assert answer.body["partitionsUpdated"] == 2
    assert await take(api, "orders") == ["old", "old"]


async def test_moving_a_subscription_affects_partitions_not_met_yet(api: Api, connection: Connection) -> None:
    for partition in ("met", "unmet"):
        await api.push("orders", "old", partition=partition)
    await age(connection, 100)
    await take(api, "orders", subscriptionMode="new")
    await api.push("orders", "new", partition="met")
    assert await take(api, "orders") == ["new"]
    moment = ago(200)
    answer = await subscription(api, "g", {"subscriptionTimestamp": moment})
    assert (answer.status, answer.body) == (
        200,
        {"success": True, "consumerGroup": "g", "newTimestamp": moment, "rowsUpdated": 1},
    )
    assert await take(api, "orders") == ["old"]


async def test_a_pop_that_waits_gets_what_a_moved_subscription_uncovers(api: Api, connection: Connection) -> None:
    await api.push("orders", "old")
    await age(connection, 100)
    waiting = asyncio.create_task(take(api, "orders", subscriptionMode="new", wait=True, timeout=20_000))

    async def one_waits() -> bool:
        return broker_of(api).popper.parked > 0

    await until(one_waits)
    await subscription(api, "g", {"subscriptionTimestamp": ago(200)})
    async with asyncio.timeout(100):
        assert await waiting == ["old"]


async def test_moving_what_is_not_subscribed_moves_nothing(api: Api) -> None:
    await api.push("orders", 1)
    await take(api, "orders")
    for group in ("g", "nobody"):
        assert (await subscription(api, group, {"subscriptionTimestamp": ago(0)})).body["rowsUpdated"] == 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "Missing subscriptionTimestamp in request body"),
        ({"subscriptionTimestamp": None}, "Missing subscriptionTimestamp in request body"),
        (
            {"subscriptionTimestamp": "soon"},
            "subscriptionTimestamp must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not 'soon'",
        ),
        (
            {"subscriptionTimestamp": 7},
            "subscriptionTimestamp must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not 7",
        ),
    ],
)
async def test_moving_a_subscription_says_what_is_wrong_with_its_body(api: Api, body: Any, error: str) -> None:
    answer = await subscription(api, "g", body)
    assert (answer.status, answer.body) == (400, {"error": error})

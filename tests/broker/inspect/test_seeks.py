"""Seeks over many partitions: in parts, estimated beforehand, and undone."""

from __future__ import annotations

from typing import Any

from tests.support.ageing import Connection, clean
from tests.support.api import Answer, Api

PATH = "/api/v1/consumer-groups/g/queues/orders"
PARTITIONS = ["a", "b", "c", "d", "e"]


async def half_read(api: Api) -> None:
    """Ten messages on each partition, of which the group `g` has read the first four."""
    await api.configure("orders")
    for name in PARTITIONS:
        await api.push("orders", *range(10), partition=name)
        popped = await api.pop("orders", name, consumerGroup="g", batch=4, autoAck=True)
        assert len(popped) == 4


async def post(api: Api, path: str, body: Any) -> Answer:
    return await api.call("POST", f"{PATH}/{path}", body)


async def positions(api: Api) -> list[int]:
    """How many messages the group has before it, partition by partition."""
    answer = await api.call("GET", f"{PATH}/partitions", sort="name")
    return [one["offsetLag"] for one in answer.body["partitions"]]


async def test_an_undone_seek_leaves_the_group_where_it_was(api: Api) -> None:
    await half_read(api)
    sought = (await post(api, "seek", {"toEnd": True})).body
    assert await positions(api) == [0] * 5

    undone = await post(api, "seek/undo", {"seekId": sought["seekId"]})
    assert (undone.status, undone.body["partitionsUpdated"], undone.body["cursor"]) == (200, 5, None)
    assert await positions(api) == [6] * 5

    again = await post(api, "seek/undo", {"seekId": sought["seekId"]})
    assert (again.status, again.body["error"]) == (409, f"Seek {sought['seekId']} was undone before")
    # What was undone can be done again.
    await post(api, "seek/undo", {"seekId": undone.body["seekId"]})
    assert await positions(api) == [0] * 5

    kept = (await api.call("GET", f"{PATH}/seeks")).body["seeks"]
    assert [one["target"] for one in kept] == [f"undo {undone.body['seekId']}", f"undo {sought['seekId']}", "end"]
    assert [one["partitionsChanged"] for one in kept] == [5, 5, 5]
    assert [one["undoneBy"] for one in kept] == [None, kept[0]["seekId"], undone.body["seekId"]]


async def test_a_seek_in_parts_is_one_seek(api: Api) -> None:
    await half_read(api)
    body: dict[str, Any] = {"toBeginning": True, "limit": 2}
    parts = [(await post(api, "seek", body)).body]
    assert await positions(api) == [10, 10, 6, 6, 6]
    while parts[-1]["cursor"]:
        parts.append((await post(api, "seek", body | {"cursor": parts[-1]["cursor"]})).body)
    assert [part["partitionsUpdated"] for part in parts] == [2, 2, 1]
    assert len({part["seekId"] for part in parts}) == 1
    assert await positions(api) == [10] * 5

    undo: dict[str, Any] = {"seekId": parts[0]["seekId"], "limit": 3}
    first = (await post(api, "seek/undo", undo)).body
    assert (first["partitionsUpdated"], await positions(api)) == (3, [6, 6, 6, 10, 10])
    last = (await post(api, "seek/undo", undo | {"cursor": first["cursor"]})).body
    assert (last["partitionsUpdated"], last["cursor"], await positions(api)) == (2, None, [6] * 5)


async def test_a_seek_of_one_partition_can_be_undone(api: Api) -> None:
    await half_read(api)
    sought = (await post(api, "partitions/b/seek", {"offset": 9})).body
    assert await positions(api) == [6, 1, 6, 6, 6]
    assert (await post(api, "seek/undo", {"seekId": sought["seekId"]})).body["partitionsUpdated"] == 1
    assert await positions(api) == [6] * 5


async def test_positions_that_a_partition_no_longer_holds_become_the_nearest(api: Api) -> None:
    await half_read(api)
    sought = (await post(api, "seek", {"toEnd": True})).body
    await api.call("DELETE", "/api/v1/queues/orders/clear", partition="a")
    await post(api, "seek/undo", {"seekId": sought["seekId"]})
    assert await positions(api) == [0, 6, 6, 6, 6]


async def test_unknown_seeks_and_cursors_are_refused(api: Api) -> None:
    await half_read(api)
    answer = await post(api, "seek/undo", {"seekId": 12345})
    assert (answer.status, answer.body["error"]) == (404, "Seek 12345 not found; positions are kept for 24 hours")
    answer = await post(api, "seek", {"toEnd": True, "limit": 2, "cursor": "12345:0"})
    assert (answer.status, answer.body["error"]) == (400, "cursor is not one of a seek of this group on this queue")
    assert await positions(api) == [6] * 5


async def test_positions_are_kept_for_a_day_and_of_the_newest_seeks(api: Api, connection: Connection) -> None:
    await half_read(api)
    for number in range(25):
        await post(api, "seek", {"offset": number % 10})
    kept = (await api.call("GET", f"{PATH}/seeks")).body["seeks"]
    assert (len(kept), kept[0]["target"]) == (20, "offset 4")

    await connection.execute("UPDATE queen.seeks SET sought_at = sought_at - interval '25 hours'")
    for _ in range(2):
        await clean(api)
    assert await connection.fetchval("SELECT count(*) FROM queen.seeks") == 0
    assert await connection.fetchval("SELECT count(*) FROM queen.seek_positions") == 0


async def test_an_estimate_comes_at_once_and_the_count_with_a_later_request(api: Api) -> None:
    await half_read(api)
    exact = (await api.call("GET", f"{PATH}/seek/preview", toEnd=True)).body
    assert exact["exact"] is True
    assert [exact[name] for name in ("skipped", "redelivered", "partitionsChanged", "partitionsKnown")] == [30, 0, 5, 5]
    # With so few partitions the sample is all of them.
    estimate = (await api.call("GET", f"{PATH}/seek/preview", toEnd=True, within=0)).body
    assert estimate["exact"] is False and estimate["partitions"] == []
    names = ("skipped", "redelivered", "leases", "partitionsChanged", "partitionsKnown")
    assert [estimate[name] for name in names] == [exact[name] for name in names]
    waited = (await api.call("GET", f"{PATH}/seek/preview", toEnd=True, within=30_000)).body
    assert waited == exact

"""Reading by offset without consuming, which partitions were written to, and how much a queue has left."""

from __future__ import annotations

from typing import Any

from tests.support.api import Api
from tests.support.database import Connection

LATEST = "2100-01-01T00:00:00Z"


async def fetch(api: Api, *entries: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    answer = await api.call("POST", "/api/v1/fetch", {"entries": entries} | fields)
    assert answer.status == 200, answer
    found: list[dict[str, Any]] = answer.body["entries"]
    return found


async def changed(api: Api, **entry: Any) -> tuple[dict[str, Any], str]:
    answer = await api.call("POST", "/api/v1/partitions/changed", {"entries": [entry]})
    assert answer.status == 200, answer
    return answer.body["entries"][0], answer.body["safeTime"]


def offsets(entry: dict[str, Any]) -> list[int]:
    return [record["offset"] for record in entry["records"]]


async def test_messages_are_read_by_offset_and_stay_for_consumers(api: Api) -> None:
    await api.push("q", {"n": 0}, {"n": 1}, ids=["a", "b"])
    await api.push("q", {"n": 2}, ids=["c"])
    await api.push("q", "other", partition="p")
    await api.call("DELETE", f"/api/v1/messages/{(await api.push('q', 3, ids=['d']))[0]['partition_id']}/b")
    first, second, nowhere, beyond = await fetch(
        api,
        {"queue": "q"},
        {"queue": "q", "partition": "p"},
        {"queue": "q", "partition": "nowhere"},
        {"queue": "q", "offset": 5},
    )
    assert [(r["offset"], r["transactionId"], r["payload"]) for r in first["records"]] == [
        (0, "a", {"n": 0}),
        (2, "c", {"n": 2}),
        (3, "d", 3),
    ]
    assert (first["highWatermark"], first["logStartOffset"], first["error"]) == (4, 0, None)
    assert [record["payload"] for record in second["records"]] == ["other"]
    assert (nowhere["error"], nowhere["records"]) == ("UNKNOWN_TOPIC_OR_PARTITION", [])
    assert (beyond["error"], beyond["highWatermark"]) == ("OFFSET_OUT_OF_RANGE", 4)
    middle, end = await fetch(api, {"queue": "q", "offset": 1}, {"queue": "q", "offset": 4})
    assert (offsets(middle), offsets(end), end["error"]) == ([2, 3], [], None)
    assert len(await api.pop("q", "Default", batch=10)) == 3
    assert (await fetch(api)) == []


async def test_a_fetch_answers_as_much_as_fits_and_at_least_one_message(api: Api) -> None:
    await api.push("q", *["x" * 1000 for _ in range(20)])
    await api.push("q", *["x" * 1000 for _ in range(20)], partition="p")
    (few,) = await fetch(api, {"queue": "q", "maxBytes": 2500})
    assert offsets(few) == [0, 1, 2]
    both = await fetch(api, {"queue": "q"}, {"queue": "q", "partition": "p"}, maxBytes=1)
    assert [offsets(entry) for entry in both] == [[0], []]
    read: list[int] = []
    while len(read) < 20:
        (entry,) = await fetch(api, {"queue": "q", "offset": len(read), "maxBytes": 7000})
        read += offsets(entry)
    assert read == list(range(20))


async def test_what_retention_removed_is_out_of_range(api: Api) -> None:
    await api.push("q", 1, 2)
    assert (await api.call("DELETE", "/api/v1/queues/q/clear")).status == 200
    await api.push("q", 3)
    below, kept = await fetch(api, {"queue": "q"}, {"queue": "q", "offset": 2})
    assert (below["error"], below["logStartOffset"]) == ("OFFSET_OUT_OF_RANGE", 2)
    assert [record["payload"] for record in kept["records"]] == [3]


async def test_partitions_that_were_written_to_are_listed_in_pages(api: Api, connection: Connection) -> None:
    for name in ("a", "b", "c"):
        await api.push("q", 1, partition=name)
    first, _ = await changed(api, queue="q", limit=2)
    second, safe = await changed(api, queue="q", limit=2, after=first["next"])
    assert [one["name"] for one in first["partitions"] + second["partitions"]] == ["a", "b", "c"]
    assert second["next"] is None
    assert (first["partitions"][0]["lastOffset"], first["partitions"][0]["logStart"]) == (0, 0)
    await api.push("q", 2, partition="b")
    again, _ = await changed(api, queue="q", since=safe)
    assert ("b", 1) in [(one["name"], one["lastOffset"]) for one in again["partitions"]]
    assert all(one["lastWriteAt"] >= safe for one in again["partitions"])
    assert (await changed(api, queue="q", since=LATEST))[0]["partitions"] == []
    assert (await changed(api, queue="nowhere"))[0]["error"] == "UNKNOWN_TOPIC_OR_PARTITION"
    # What a transaction writes that began earlier has a time of its own, and is seen later.
    async with connection.transaction():
        began = await connection.fetchval("SELECT now()")
        await connection.execute("SELECT pg_current_xact_id()")
        _, safe = await changed(api, queue="q")
        assert safe <= began.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def test_the_depth_of_a_queue_is_that_of_a_group_or_of_the_slowest(api: Api) -> None:
    await api.push("q", 1, 2, 3, partition="a")
    await api.push("q", 1, partition="b")
    await api.ack(await api.pop("q", "a", consumerGroup="fast", batch=2), group="fast")
    await api.ack(await api.pop("q", "a", consumerGroup="slow", batch=1), group="slow")
    depth = (await api.call("GET", "/api/v1/resources/queues/q/depth")).body
    assert (depth["depth"], depth["pending"], depth["partitionsPending"], depth["effectivePending"]) == (4, 3, 2, 3)
    assert depth["partitions"] == [{"partition": "a", "pending": 2}, {"partition": "b", "pending": 1}]
    fast = (await api.call("GET", "/api/v1/resources/queues/q/depth", group="fast")).body
    assert (fast["group"], fast["pending"], fast["conflation"], list(fast["groups"])) == ("fast", 2, False, ["fast"])

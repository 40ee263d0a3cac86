"""How the whole is: the shapes that dashboards read, and numbers that are exact."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.ageing import age, until
from tests.support.api import Api
from tests.support.database import Connection

COUNTERS = {"total", "pending", "processing", "completed", "failed", "deadLetter"}
THROUGHPUT = {
    "timestamp",
    "ingested",
    "processed",
    "popMessages",
    "ingestedPerSecond",
    "processedPerSecond",
    "popPerSecond",
    "avgLagMs",
    "maxLagMs",
    "avgEventLoopLagMs",
    "maxEventLoopLagMs",
    "minFreeSlots",
    "dbErrors",
    "ackFailed",
    "dlqCount",
    "queenCpuUserPct",
    "queenCpuSysPct",
    "queenRssMb",
    "dbPoolActive",
    "dbPoolIdle",
    "dbPoolSize",
}


async def get(api: Api, path: str, **query: Any) -> Any:
    answer = await api.call("GET", f"/api/v1/{path}", **query)
    assert answer.status == 200, answer
    return answer.body


async def test_the_status_of_a_server_that_just_began_has_the_running_minute(api: Api) -> None:
    await api.push("shop", *range(5))
    await api.ack(await api.pop("shop", batch=3))
    await api.pop("shop", batch=2)
    status = await get(api, "status")
    assert list(status) == [
        "timeRange",
        "bucketMinutes",
        "pointCount",
        "throughput",
        "queues",
        "messages",
        "leases",
        "deadLetterQueue",
        "workers",
        "errors",
        "statsAge",
    ]
    assert (status["bucketMinutes"], status["pointCount"]) == (1, len(status["throughput"]))
    assert all(set(point) == THROUGHPUT for point in status["throughput"])
    assert sum(point["ingested"] for point in status["throughput"]) == 5
    assert sum(point["processed"] for point in status["throughput"]) == 3
    assert sum(point["popMessages"] for point in status["throughput"]) == 5
    (queue,) = status["queues"]
    assert set(queue) == {"id", "name", "namespace", "task", "partitions", "totalConsumed"}
    assert (queue["name"], queue["partitions"], queue["totalConsumed"]) == ("shop", 1, 3)
    assert status["messages"] == {
        "total": 5,
        "pending": 2,
        "processing": 2,
        "completed": 3,
        "failed": 0,
        "deadLetter": 0,
        "requests": {"push": 1, "pop": 2, "ack": 1},
        "batchEfficiency": {"push": 5.0, "pop": 2.5, "ack": 3.0},
    }
    assert status["leases"] == {"active": 1, "partitionsWithLeases": 1, "totalBatchSize": 2, "totalAcked": 0}
    assert status["deadLetterQueue"] == {"totalMessages": 0, "affectedPartitions": 0, "topErrors": []}
    assert status["errors"] == {"dbErrors": 0, "ackFailed": 0, "dlqMessages": 0}
    (worker,) = status["workers"]
    assert set(worker) == {
        "hostname",
        "workerId",
        "avgEventLoopLagMs",
        "maxEventLoopLagMs",
        "freeSlots",
        "dbConnections",
        "jobQueueSize",
        "messagesProcessed",
        "port",
    }
    assert worker["messagesProcessed"] == 5 + 5 + 3
    assert status["statsAge"] == 0


async def test_the_status_of_an_empty_server_has_no_queues(api: Api) -> None:
    status = await get(api, "status")
    assert status["queues"] == []
    assert status["messages"]["total"] == 0
    assert status["messages"]["batchEfficiency"] == {"push": 0, "pop": 0, "ack": 0}


async def test_the_status_can_be_that_of_one_queue_namespace_or_task(api: Api) -> None:
    await api.push("shop.pack", 1, 2, 3)
    await api.push("shop.send", 1, 2)
    await api.push("bank.send", 1)
    for query, names, messages in (
        ({"queue": "shop.pack"}, ["shop.pack"], 3),
        ({"namespace": "shop"}, ["shop.pack", "shop.send"], 5),
        ({"task": "send"}, ["bank.send", "shop.send"], 3),
        ({"namespace": "shop", "task": "send"}, ["shop.send"], 2),
        ({"queue": "nobody"}, [], 0),
    ):
        status = await get(api, "status", **query)
        assert [queue["name"] for queue in status["queues"]] == names
        assert status["messages"]["total"] == messages
        assert sum(point["ingested"] for point in status["throughput"]) == messages
        assert status["workers"], "how the workers are is shown whatever the filter"


async def test_the_status_tells_what_dead_letters_died_of(api: Api) -> None:
    await api.configure("shop", retryLimit=0)
    await api.push("shop", 1, 2, 3)
    for error in ("boom", "boom", "bang"):
        await api.ack(await api.pop("shop"), "failed", error=error)
    status = await get(api, "status")
    assert status["deadLetterQueue"] == {
        "totalMessages": 3,
        "affectedPartitions": 1,
        "topErrors": [{"error": "boom", "count": 2}, {"error": "bang", "count": 1}],
    }
    assert status["errors"] == {"dbErrors": 0, "ackFailed": 3, "dlqMessages": 3}
    assert (await get(api, "status", queue="other"))["deadLetterQueue"]["totalMessages"] == 0


async def test_queues_are_listed_by_page_and_what_is_processed_counts_as_pending(api: Api) -> None:
    for name in ("a.x", "b.x", "b.y"):
        await api.push(name, 1, 2, 3)
    await api.pop("b.y", batch=2)
    page = await get(api, "status/queues", limit=2, offset=0)
    assert [queue["name"] for queue in page["queues"]] == ["b.y", "b.x"]
    assert page["pagination"] == {"limit": 2, "offset": 0, "total": 3}
    assert page["queues"][0]["messages"] == {"total": 3, "pending": 3, "processing": 2}
    about = {"id", "name", "namespace", "task", "createdAt", "partitions", "messages", "paused"}
    assert set(page["queues"][0]) == about
    page = await get(api, "status/queues", limit=2, offset=2)
    assert [queue["name"] for queue in page["queues"]] == ["a.x"]
    assert [queue["name"] for queue in (await get(api, "status/queues", namespace="b", task="y"))["queues"]] == ["b.y"]


async def test_a_queue_is_shown_with_its_configuration_and_partitions(api: Api) -> None:
    await api.configure("shop", leaseTime=30, retryLimit=0, maxSize=100, priority=7, ttl=3600)
    await api.push("shop", *range(4), partition="a")
    await api.push("shop", 1, partition="b")
    await api.ack(await api.pop("shop", "a", batch=2))
    await api.ack(await api.pop("shop", "a"), "failed")
    detail = await get(api, "status/queues/shop")
    assert set(detail) == {"queue", "partitions", "totals", "next"}
    queue = detail["queue"]
    about = {"id", "name", "namespace", "task", "priority", "createdAt", "config", "options", "paused", "pausedGroups"}
    assert set(queue) == about
    assert (queue["name"], queue["priority"]) == ("shop", 7)
    assert {name: queue["options"][name] for name in ("leaseTime", "retryLimit", "maxSize", "priority", "ttl")} == {
        "leaseTime": 30,
        "retryLimit": 0,
        "maxSize": 100,
        "priority": 7,
        "ttl": 3600,
    }
    assert queue["config"] == {
        "leaseTime": 30,
        "retryLimit": 0,
        "retryDelay": 1000,
        "ttl": 3600,
        "maxQueueSize": 100,
        "deadLetterQueue": False,
    }
    assert [partition["name"] for partition in detail["partitions"]] == ["Default", "a", "b"]
    partition = detail["partitions"][1]
    assert list(partition) == [
        "id",
        "name",
        "createdAt",
        "messages",
        "stats",
        "cursor",
        "lastActivity",
        "oldestMessage",
        "newestMessage",
    ]
    assert partition["messages"] == partition["stats"]
    assert partition["messages"] == {
        "total": 4,
        "pending": 1,
        "processing": 0,
        "completed": 2,
        "failed": 0,
        "deadLetter": 1,
    }
    assert partition["cursor"]["totalConsumed"] == 3
    assert partition["lastActivity"] >= partition["newestMessage"]
    assert detail["partitions"][0]["lastActivity"] is None
    assert detail["totals"]["messages"] == {key: detail["totals"][key] for key in COUNTERS}
    assert (detail["totals"]["total"], detail["totals"]["pending"]) == (5, 2)


async def test_messages_of_a_queue_are_listed_newest_first(api: Api, connection: Connection) -> None:
    await api.push("shop", *range(5), ids=list("abcde"))
    await age(connection, 30 * 86_400)
    await api.push("shop", 5, ids=["f"])
    messages = await get(api, "status/queues/shop/messages", limit=4, offset=1)
    assert [message["transactionId"] for message in messages] == ["e", "d", "c", "b"]
    assert list(messages[0]) == [
        "id",
        "transactionId",
        "partitionId",
        "queuePath",
        "queue",
        "partition",
        "status",
        "createdAt",
        "producerSub",
    ]
    assert messages[0]["queuePath"] == "shop/Default"


@pytest.mark.parametrize("path", ["status/queues/nobody", "status/queues/nobody/messages"])
async def test_a_queue_that_is_not_there_is_not_found(api: Api, path: str) -> None:
    answer = await api.call("GET", f"/api/v1/{path}")
    assert (answer.status, answer.body) == (404, {"error": "Queue not found"})


async def test_stored_messages_are_counted_by_the_time_they_were_stored(api: Api, connection: Connection) -> None:
    """Ten segments an hour apart in each of three partitions, of which some messages were removed."""
    for number in range(10):
        for partition in "abc":
            await api.push("shop", *range(number + 1), partition=partition)
        await age(connection, 3600)
    await api.push("shop", 1, 2, partition="a")
    await api.push("other", 1)
    await connection.execute("UPDATE queen.partitions SET floor_offset = 5 WHERE name = 'b'")
    answer = await get(api, "status/analytics", queue="shop")
    assert (answer["interval"], len(answer["dataPoints"])) == ("hour", 25)
    expected = await _brute_force_hours(connection)
    found = {point["timestamp"]: point["messages"] for point in answer["dataPoints"] if point["messages"]}
    assert found == expected
    assert sum(found.values()) == 3 * 55 + 2 - 5
    everything = await get(api, "status/analytics", interval="day")
    assert sum(point["messages"] for point in everything["dataPoints"]) == 3 * 55 + 3 - 5
    minutes = await get(api, "status/analytics", interval="minute", namespace="shop")
    assert sum(point["messages"] for point in minutes["dataPoints"]) == 3 * 55 + 2 - 5


async def test_messages_of_dense_partitions_are_counted_between_any_two_times(api: Api, connection: Connection) -> None:
    """Segments seconds apart, so that a span has many of them and its end is inside a run."""
    generator = random.Random(7)
    now = datetime.now(UTC)
    await api.push("shop", 0)
    partition_id = await connection.fetchval("SELECT id FROM queen.partitions")
    offset, at = 1, now - timedelta(hours=3)
    for _ in range(400):
        count = generator.randint(1, 5)
        at += timedelta(seconds=generator.choice((0, 1, 7, 30)))
        await connection.execute(
            "INSERT INTO queen.segments VALUES ($1, $2, $3, $4, '\\x00', '\\x00')", partition_id, offset, count, at
        )
        offset += count
    await connection.execute(
        "UPDATE queen.segments SET created_at = $1 WHERE base_offset = 0", now - timedelta(hours=4)
    )
    await connection.execute("UPDATE queen.partitions SET next_offset = $1, last_at = $2", offset, at)
    for _ in range(20):
        since = now - timedelta(seconds=generator.randint(3600, 14_000))
        until = since + timedelta(seconds=generator.randint(1, 7000))
        answer = await get(
            api, "status/analytics", interval="minute", **{"from": since.isoformat(), "to": until.isoformat()}
        )
        rows = await connection.fetch(
            "SELECT date_trunc('minute', created_at) AS bucket, sum(count) AS messages FROM queen.segments"
            " WHERE created_at >= $1 AND created_at < $2 GROUP BY 1",
            since,
            until,
        )
        found = {point["timestamp"]: point["messages"] for point in answer["dataPoints"] if point["messages"]}
        assert found == {row["bucket"].strftime("%Y-%m-%dT%H:%M:%SZ"): row["messages"] for row in rows}


@pytest.mark.parametrize(
    ("path", "query", "error"),
    [
        ("status", {"from": "yesterday"}, "from must be an ISO-8601 time"),
        ("status", {"to": "12"}, "to must be an ISO-8601 time"),
        ("status", {"from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, "must be before to"),
        ("status", {"queue": "a\x00"}, "Queue must not contain control characters"),
        ("status/queues", {"namespace": "a\n"}, "Namespace must not contain control characters"),
        ("status/analytics", {"interval": "second"}, "interval must be one of day, hour, minute, not 'second'"),
        ("status/analytics", {"interval": "minute", "from": "2020-01-01", "to": "2021-01-01"}, "more than 10000"),
        (
            "analytics/system-metrics",
            {"workerId": "x"},
            "workerId must be a whole number from 0 up to 999999999, not 'x'",
        ),
        ("analytics/worker-metrics", {"workerId": "-1"}, "workerId must be a whole number"),
        ("analytics/queue-ops", {"from": "x"}, "from must be an ISO-8601 time"),
        ("analytics/queue-lag", {"queue": "\x7f"}, "Queue must not contain control characters"),
        ("analytics/retention", {"to": "never"}, "to must be an ISO-8601 time"),
        ("analytics/queue-parked-replicas", {"from": "9999-12-31T00:00:00Z"}, "must be before to"),
    ],
)
async def test_bad_parameters_are_refused_with_what_and_where(
    api: Api, path: str, query: dict[str, Any], error: str
) -> None:
    answer = await api.call("GET", f"/api/v1/{path}", **query)
    assert answer.status == 400
    assert error in answer.body["error"]


async def test_the_first_and_the_last_possible_time_can_be_requested(api: Api) -> None:
    for path in ("status", "analytics/queue-ops", "analytics/retention", "analytics/system-metrics"):
        await get(api, path, **{"from": "0001-01-01T00:00:00Z", "to": "9999-12-31T23:59:59Z"})


async def test_numbers_are_exact_whatever_happened(start_server: StartServer, connection: Connection) -> None:
    """Random pushes, pops, acks and failures of three groups through two workers, against a count of every message."""
    servers = [await start_server(worker_id=number, num_workers=2) for number in range(2)]
    generator = random.Random(11)
    queues = ["alpha", "beta", "gamma"]
    pushed = dict.fromkeys(queues, 0)
    popped = dict.fromkeys(queues, 0)
    acks = {"completed": 0, "failed": 0}
    for name in queues:
        await servers[0].configure(name, retryLimit=1, retryDelay=0)
    for _ in range(150):
        api, queue = generator.choice(servers), generator.choice(queues)
        if generator.random() < 0.4:
            count = generator.randint(1, 20)
            await api.push(queue, *range(count), partition=generator.choice("abcd"))
            pushed[queue] += count
            continue
        group = generator.choice(["one", "two", "three"])
        messages = await api.pop(queue, batch=generator.randint(1, 15), consumerGroup=group)
        popped[queue] += len(messages)
        if messages and generator.random() < 0.8:
            status = generator.choice(["completed", "completed", "failed"])
            await api.ack(messages, status, group=group)
            acks[status] += len(messages)
    expected = await _brute_force(connection)
    asked = generator.choice(servers)
    listed = {row["name"]: row["messages"] for row in (await get(asked, "status/queues"))["queues"]}
    assert {name: listed[name]["total"] for name in queues} == pushed
    assert {name: listed[name]["pending"] for name in queues} == expected["pending"]
    details = [await get(asked, f"status/queues/{name}") for name in queues]
    assert {detail["queue"]["name"]: detail["totals"]["pending"] for detail in details} == expected["pending"]
    groups = {(row["name"], row["queueName"]): row["totalLag"] for row in await get(asked, "consumer-groups")}
    assert groups == expected["lags"]

    async def counted() -> bool:
        operations = await get(asked, "analytics/queue-ops")
        series = operations["series"]
        return {
            "pushed": {name: _sum(series, name, "pushMessages") for name in queues},
            "popped": {name: _sum(series, name, "popMessages") for name in queues},
            "acks": {
                "completed": sum(point["ackSuccess"] for point in series),
                "failed": sum(point["ackFailed"] for point in series),
            },
        } == {"pushed": pushed, "popped": popped, "acks": acks}

    # What the other worker counted is there with its next sample.
    await until(counted)
    status = await get(asked, "status")
    assert status["messages"]["total"] == sum(pushed.values())
    assert status["messages"]["pending"] == sum(expected["pending"].values())
    assert status["deadLetterQueue"]["totalMessages"] == expected["dead"]
    assert status["errors"]["dlqMessages"] == expected["dead"]


def _sum(series: list[dict[str, Any]], queue: str, key: str) -> int:
    return sum(point[key] for point in series if point["queueName"] == queue)


async def _brute_force(connection: Connection) -> Mapping[str, Any]:
    """The same numbers, counted message by message from the rows."""
    partitions = await connection.fetch(
        "SELECT p.*, q.name AS queue FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
    )
    cursors = await connection.fetch(
        "SELECT c.*, g.name AS group FROM queen.cursors c JOIN queen.groups g ON g.id = c.group_id"
    )
    pending: dict[str, int] = {}
    lags: dict[tuple[str, str], int] = {}
    for partition in partitions:
        stored = range(partition["floor_offset"], partition["next_offset"])
        own = [cursor for cursor in cursors if cursor["partition_id"] == partition["id"]]
        behind = [sum(1 for offset in stored if offset >= cursor["committed"]) for cursor in own]
        pending[partition["queue"]] = pending.get(partition["queue"], 0) + max(behind, default=len(stored))
        for cursor, messages in zip(own, behind, strict=True):
            key = (cursor["group"], partition["queue"])
            lags[key] = lags.get(key, 0) + messages
    dead = await connection.fetchval("SELECT count(*) FROM queen.dead_letters")
    return {"pending": pending, "lags": lags, "dead": dead}


async def _brute_force_hours(connection: Connection) -> dict[str, int]:
    rows = await connection.fetch(
        "SELECT date_trunc('hour', s.created_at) AS bucket,"
        " sum(s.count - greatest(0, least(s.count, p.floor_offset - s.base_offset))) AS messages"
        " FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = 'shop' GROUP BY 1"
    )
    return {row["bucket"].strftime("%Y-%m-%dT%H:%M:%SZ"): row["messages"] for row in rows if row["messages"]}

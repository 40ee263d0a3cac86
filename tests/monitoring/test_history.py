"""What was counted, over time: flushed to PostgreSQL, read back, and kept for as long as it should be."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from queen.embedded import EmbeddedPostgres
from tests.conftest import StartServer
from tests.support.ageing import clean, until
from tests.support.api import Api
from tests.support.database import Connection

SAMPLED = {"avg", "min", "max", "last"}


async def get(api: Api, name: str, **query: Any) -> Any:
    answer = await api.call("GET", f"/api/v1/analytics/{name}", **query)
    assert answer.status == 200, answer
    return answer.body


async def flush(api: Api) -> None:
    assert api.worker is not None
    await api.worker.recorder.flush()


async def work(api: Api, queue: str) -> None:
    """Six messages pushed by two requests, four popped and acked, and a pop that finds nothing."""
    await api.push(queue, 1, 2, 3)
    await api.push(queue, 4, 5, 6)
    await api.ack(await api.pop(queue, batch=4))
    await api.pop(queue, "elsewhere")


async def test_what_was_counted_is_the_same_before_and_after_a_flush(api: Api, connection: Connection) -> None:
    await work(api, "shop")
    before = (await get(api, "worker-metrics"))["summary"]
    assert await connection.fetchval("SELECT count(*) FROM queen.metric_minutes") == 0
    await flush(api)
    after = (await get(api, "worker-metrics"))["summary"]
    assert await connection.fetchval("SELECT sum(push_messages) FROM queen.metric_minutes") == 6
    await flush(api)
    assert before == after == (await get(api, "worker-metrics"))["summary"]
    assert after == {
        "totalPushMessages": 6,
        "totalPopMessages": 4,
        "totalAckMessages": 4,
        "totalPushRequests": 2,
        "totalPopRequests": 2,
        "totalAckRequests": 1,
        "totalDbErrors": 0,
        "totalAckFailed": 0,
        "totalDlq": 0,
        "pendingMessages": 2,
    }


async def test_worker_metrics_have_the_shape_that_dashboards_read(api: Api) -> None:
    await work(api, "shop")
    metrics = await get(api, "worker-metrics")
    assert list(metrics) == ["timeRange", "bucketMinutes", "pointCount", "timeSeries", "workers", "queues", "summary"]
    assert metrics["bucketMinutes"] == 15
    assert list(metrics["timeSeries"][0]) == [
        "timestamp",
        "pushMessages",
        "popMessages",
        "ackMessages",
        "pushRequests",
        "popRequests",
        "ackRequests",
        "jobsDone",
        "pushPerSecond",
        "popPerSecond",
        "ackPerSecond",
        "avgEventLoopLagMs",
        "maxEventLoopLagMs",
        "avgFreeSlots",
        "minFreeSlots",
        "dbConnections",
        "avgJobQueueSize",
        "maxJobQueueSize",
        "backoffSize",
        "avgLagMs",
        "maxLagMs",
        "lagCount",
        "dbErrors",
        "ackSuccess",
        "ackFailed",
        "dlqCount",
    ]
    (worker,) = metrics["workers"]
    assert set(worker) == {
        "hostname",
        "workerId",
        "avgEventLoopLagMs",
        "maxEventLoopLagMs",
        "freeSlots",
        "dbConnections",
        "jobQueueSize",
        "backoffSize",
        "messagesProcessed",
        "port",
        "lastSeen",
    }
    (queue,) = metrics["queues"]
    assert (queue["queueName"], queue["popCount"]) == ("shop", 4)
    assert 0 <= queue["avgLagMs"] <= queue["maxLagMs"]
    assert metrics["timeSeries"][0]["timestamp"].endswith(":00Z")


async def test_metrics_can_be_those_of_one_worker(start_server: StartServer) -> None:
    first = await start_server(worker_id=0, num_workers=2)
    second = await start_server(worker_id=1, num_workers=2)
    await first.push("shop", 1, 2, 3)
    await second.push("shop", 4)
    await flush(first)
    await flush(second)
    for worker_id, messages in ((0, 3), (1, 1)):
        metrics = await get(first, "worker-metrics", workerId=worker_id)
        assert metrics["summary"]["totalPushMessages"] == messages
        assert [worker["workerId"] for worker in metrics["workers"]] == [worker_id]
        system = await get(second, "system-metrics", workerId=worker_id)
        assert [replica["workerId"] for replica in system["replicas"]] == [worker_id]
    host = metrics["workers"][0]["hostname"]
    assert (await get(first, "worker-metrics", hostname=host))["summary"]["totalPushMessages"] == 4
    assert (await get(first, "worker-metrics", hostname="nobody"))["workers"] == []


@pytest.mark.parametrize("sharing", [True, False])
async def test_system_metrics_say_whether_hosts_share_state(start_server: StartServer, sharing: bool) -> None:
    api = await start_server(queen_sync_enabled=sharing)
    (replica,) = (await get(api, "system-metrics"))["replicas"]
    assert replica["timeSeries"][0]["metrics"]["shared_state"] == {"enabled": sharing}


async def test_system_metrics_have_the_shape_that_dashboards_read(api: Api) -> None:
    metrics = await get(api, "system-metrics")
    assert list(metrics) == ["timeRange", "replicas", "replicaCount", "bucketMinutes", "pointCount"]
    assert (metrics["replicaCount"], metrics["pointCount"]) == (1, 1)
    (replica,) = metrics["replicas"]
    assert list(replica) == ["hostname", "port", "workerId", "timeSeries"]
    assert api.worker is not None and replica["port"] == api.worker.port
    (point,) = replica["timeSeries"]
    assert list(point) == ["timestamp", "sampleCount", "metrics"]
    measured = point["metrics"]
    assert list(measured) == ["cpu", "memory", "database", "threadpool", "registries", "shared_state"]
    for group in (measured["cpu"], measured["memory"], measured["database"], *measured["threadpool"].values()):
        assert all(set(value) == SAMPLED for value in group.values())
    assert set(measured["cpu"]) == {"user_us", "system_us"}
    assert set(measured["database"]) == {"pool_size", "pool_idle", "pool_active"}
    assert measured["memory"]["rss_bytes"]["last"] > 10_000_000


async def test_queue_operations_and_lag_are_shown_by_queue(api: Api) -> None:
    await work(api, "shop")
    await api.push("other", 1)
    operations = await get(api, "queue-ops")
    assert list(operations) == ["timeRange", "bucketMinutes", "series", "queues"]
    assert operations["queues"] == ["other", "shop"]
    (point,) = (await get(api, "queue-ops", queue="shop"))["series"]
    assert list(point) == [
        "bucket",
        "queueName",
        "pushRequests",
        "pushMessages",
        "popMessages",
        "popEmpty",
        "ackRequests",
        "ackSuccess",
        "ackFailed",
        "transactions",
        "partitionsCreated",
        "partitionsDeleted",
        "partitionCount",
        "avgLagMs",
        "maxLagMs",
        "pushPerSecond",
        "popPerSecond",
        "ackPerSecond",
        "emptyPerSecond",
        "parkedCount",
    ]
    numbers = {key: point[key] for key in ("pushRequests", "pushMessages", "popMessages", "popEmpty", "ackSuccess")}
    assert numbers == {"pushRequests": 2, "pushMessages": 6, "popMessages": 4, "popEmpty": 1, "ackSuccess": 4}
    assert (point["partitionsCreated"], point["partitionCount"]) == (1, None)
    await flush(api)
    (point,) = (await get(api, "queue-ops", queue="shop"))["series"]
    assert point["partitionCount"] == 1
    (lag,) = await get(api, "queue-lag")
    assert list(lag) == ["queueName", "popCount", "avgLagMs", "maxLagMs", "bucketTime"]
    assert (lag["queueName"], lag["popCount"]) == ("shop", 4)
    assert 0 <= lag["avgLagMs"] <= lag["maxLagMs"] < 60_000


async def test_transactions_and_deleted_partitions_are_counted(api: Api) -> None:
    await api.push("shop", 1)
    (message,) = await api.pop("shop")
    operations = [
        {
            "type": "ack",
            "transactionId": message["transactionId"],
            "partitionId": message["partitionId"],
            "leaseId": message["leaseId"],
        },
        {"type": "push", "items": [{"queue": "next", "payload": 1}]},
    ]
    answer = await api.call("POST", "/api/v1/transaction", {"operations": operations})
    assert answer.body["success"], answer
    await api.call("DELETE", "/api/v1/resources/queues/next")
    points = {point["queueName"]: point for point in (await get(api, "queue-ops"))["series"]}
    assert (points["shop"]["transactions"], points["shop"]["ackSuccess"]) == (1, 1)
    assert (points["next"]["transactions"], points["next"]["pushMessages"]) == (1, 1)
    assert (points["next"]["partitionsCreated"], points["next"]["partitionsDeleted"]) == (1, 1)


async def test_waiting_pops_are_shown_by_queue_and_worker(start_server: StartServer) -> None:
    api = await start_server(metrics_sample_interval_ms=20)
    waiting = [asyncio.create_task(api.pop("shop", wait=True, timeout=20_000)) for _ in range(3)]

    async def parked() -> bool:
        series = (await get(api, "queue-parked-replicas"))["series"]
        return bool(series) and series[0]["parkedCount"] > 0

    await until(parked)
    answer = await get(api, "queue-parked-replicas")
    assert list(answer) == ["timeRange", "bucketMinutes", "series", "replicas"]
    (point,) = answer["series"]
    assert list(point) == ["bucket", "queueName", "hostname", "workerId", "parkedCount"]
    assert (point["queueName"], point["workerId"]) == ("shop", 0)
    assert answer["replicas"] == [{"hostname": point["hostname"], "workerId": 0}]
    assert (await get(api, "queue-parked-replicas", queue="other"))["series"] == []
    for partition in "abc":
        await api.push("shop", 1, partition=partition)
    await asyncio.gather(*waiting)


async def test_what_retention_removed_is_shown_by_kind(api: Api, connection: Connection) -> None:
    now = datetime.now(UTC)
    rows = [("shop", "retention", 5), ("shop", "completed_retention", 3), ("bank", "ttl_expiration", 2)]
    await connection.executemany(
        "INSERT INTO queen.retention_history (queue_name, kind, messages, at) VALUES ($1, $2, $3, $4)",
        [(*row, now - timedelta(hours=1)) for row in (*rows, ("bank", "max_wait_time_eviction", 1))],
    )
    answer = await get(api, "retention")
    assert list(answer) == ["timeRange", "bucketMinutes", "series", "totals"]
    totals = {
        "retentionMsgs": 5,
        "completedRetentionMsgs": 3,
        "evictionMsgs": 3,
        "totalMsgs": 11,
        "eventCount": 4,
    }
    (point,) = answer["series"]
    assert answer["totals"] == totals == {key: point[key] for key in totals}
    assert (await get(api, "retention", queue="bank"))["totals"]["totalMsgs"] == 3


async def test_postgres_tells_of_itself(api: Api) -> None:
    await api.push("shop", 1)
    stats = await get(api, "postgres-stats")
    assert list(stats) == [
        "timestamp",
        "database",
        "databaseCache",
        "tableCache",
        "indexCache",
        "cacheSummary",
        "deadTuples",
        "hotUpdates",
        "activeQueries",
        "autovacuumStatus",
        "bufferConfig",
        "bufferUsage",
        "tableSizes",
    ]
    sizes = {row["table"]: row for row in stats["tableSizes"]}
    assert sizes["segments"]["totalSizeBytes"] > 0
    assert set(sizes["segments"]) == {
        "table",
        "totalSize",
        "totalSizeBytes",
        "tableSize",
        "tableSizeBytes",
        "indexSize",
        "indexSizeBytes",
    }
    assert set(stats["databaseCache"]) == {"database", "diskReads", "cacheHits", "cacheHitRatio"}
    assert {row["table"] for row in stats["tableCache"]} >= {"queues", "partitions", "segments", "cursors"}
    assert stats["bufferConfig"]["sharedBuffers"] > 0


@pytest.mark.parametrize(
    ("span", "minutes"),
    [("1h", 1), ("6h", 5), ("24h", 15), ("168h", 60), ("169h", 360)],
)
async def test_the_longer_the_time_the_larger_its_buckets(api: Api, span: str, minutes: int) -> None:
    until_ = datetime(2026, 1, 10, tzinfo=UTC)
    since = until_ - timedelta(hours=int(span.removesuffix("h")))
    answer = await get(api, "queue-ops", **{"from": since.isoformat(), "to": until_.isoformat()})
    assert answer["bucketMinutes"] == minutes
    assert answer["timeRange"] == {
        "from": since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "to": "2026-01-10T00:00:00.000Z",
    }


async def test_workers_flush_by_themselves_and_when_they_stop(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(metrics_aggregate_interval_s=1)
    await api.push("shop", 1, 2, 3)

    async def flushed() -> bool:
        return bool(await connection.fetchval("SELECT sum(push_messages) = 3 FROM queen.metric_minutes"))

    await until(flushed)
    await api.push("shop", 4)
    assert api.worker is not None
    await api.worker.stop()
    assert await connection.fetchval("SELECT sum(push_messages) FROM queen.metric_queue_minutes") == 4
    assert await connection.fetchval("SELECT push_messages FROM queen.metric_lives") == 4


async def test_a_flush_that_postgres_did_not_take_is_sent_again_and_counted_once(
    api: Api, connection: Connection
) -> None:
    await api.push("shop", 1, 2, 3)
    await connection.execute("ALTER TABLE queen.metric_queue_minutes RENAME TO hidden")
    await flush(api)
    assert await connection.fetchval("SELECT count(*) FROM queen.metric_minutes") == 0
    await api.push("shop", 4)
    await connection.execute("ALTER TABLE queen.hidden RENAME TO metric_queue_minutes")
    assert (await get(api, "worker-metrics"))["summary"]["totalPushMessages"] == 4
    await flush(api)
    assert (await get(api, "worker-metrics"))["summary"]["totalPushMessages"] == 4
    rows = await connection.fetch("SELECT flush, push_messages FROM queen.metric_queue_minutes ORDER BY flush")
    assert [tuple(row) for row in rows] == [(1, 3), (2, 1)]


async def test_history_goes_when_it_is_old_and_what_was_counted_in_all_stays(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(metrics_retention_days=7, retention_batch_size=2)
    for number in range(3):
        await api.push("shop", number)
        await flush(api)
    for table in ("metric_minutes", "metric_queue_minutes"):
        await connection.execute(f"UPDATE queen.{table} SET at = at - interval '8 days' WHERE flush <= 2")
    for number in range(5):
        await connection.execute(
            "INSERT INTO queen.metric_lives"
            " (life, host, port, worker_id, pid, flush, started_at, seen_at, push_messages)"
            " VALUES (gen_random_uuid(), 'gone', 1, 0, 1, 1, now(), now() - interval '8 days', $1)",
            number,
        )
    await clean(api)
    assert await connection.fetchval("SELECT min(flush) FROM queen.metric_minutes") == 3
    assert await connection.fetchval("SELECT min(flush) FROM queen.metric_queue_minutes") == 3
    lives = await connection.fetch("SELECT host, push_messages FROM queen.metric_lives ORDER BY host")
    assert (lives[0]["host"], lives[0]["push_messages"], len(lives)) == ("", 10, 2)


async def test_errors_of_the_database_are_counted(postgres: EmbeddedPostgres, start_server: StartServer) -> None:
    api = await start_server(db_statement_timeout=200, db_lock_timeout=50)
    await api.push("shop", 1)
    assert api.worker is not None
    async with api.worker.broker.database.transaction() as transaction:
        await transaction.fetch("lock_partitions", [1])
        answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": "shop", "payload": 2}]})
        assert answer.status == 503
    assert (await get(api, "worker-metrics"))["summary"]["totalDbErrors"] >= 1

"""Old messages go when their queue's options say so, and nothing goes that should stay."""

from __future__ import annotations

import asyncio

import pytest

from queen.broker.maintenance.jobs import JobRunner
from tests.conftest import StartServer
from tests.support.ageing import Connection, age, broker_of, clean, until, until_parked
from tests.support.api import Api


async def test_retention_removes_old_messages_consumed_or_not(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    await api.push("logs", 1, 2, 3)
    await api.ack(await api.pop("logs"))
    await age(connection, 11)
    await api.push("logs", 4)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs", batch=10)] == [4]
    assert await stored(connection) == [(3, 1)]
    assert await history(connection) == [("logs", "retention", 3)]


async def test_retention_keeps_what_is_young_enough(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=60)
    await api.push("logs", 1)
    await age(connection, 50)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs")] == [1]
    assert await history(connection) == []


async def test_retention_needs_to_be_enabled(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionSeconds=10, completedRetentionSeconds=10)
    await api.push("logs", 1)
    await age(connection, 1000)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs")] == [1]


async def test_retention_goes_on_by_itself(start_server: StartServer) -> None:
    api = await start_server(retention_interval=100)
    await api.configure("logs", retentionEnabled=True, retentionSeconds=1)
    await api.push("logs", 1)
    await until(lambda: delivers_nothing(api, "logs"))


async def test_a_long_backlog_goes_in_many_small_steps(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(retention_batch_size=3)
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    for number in range(20):
        await api.push("logs", number)
    await age(connection, 11)
    await api.push("logs", "young")
    await clean(api)
    assert await stored(connection) == [(20, 1)]
    assert await history(connection) == [("logs", "retention", 20)]


async def test_many_partitions_are_cleaned_in_one_run(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    for number in range(30):
        await api.push("logs", number, partition=f"p{number}")
    await age(connection, 11)
    await api.push("logs", "young", partition="p7")
    await clean(api)
    assert await stored(connection) == [(1, 1)]
    assert [message["data"] for message in await api.pop("logs", "p7")] == ["young"]


async def test_completed_retention_waits_for_the_slowest_group(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, completedRetentionSeconds=10)
    for number in range(4):
        await api.push("logs", number)
    await api.ack(await api.pop("logs", batch=4, consumerGroup="fast"), group="fast")
    await api.ack(await api.pop("logs", batch=2, consumerGroup="slow"), group="slow")
    await age(connection, 11)
    await clean(api)
    assert await stored(connection) == [(2, 1), (3, 1)]
    assert await history(connection) == [("logs", "completed_retention", 2)]
    rest = await api.pop("logs", batch=10, consumerGroup="slow")
    assert [message["data"] for message in rest] == [2, 3]
    await api.ack(rest, group="slow")
    await clean(api)
    assert await stored(connection) == []


async def test_completed_retention_keeps_everything_while_a_group_has_consumed_nothing(
    api: Api, connection: Connection
) -> None:
    await api.configure("logs", retentionEnabled=True, completedRetentionSeconds=10)
    await api.push("logs", 1, 2)
    await api.ack(await api.pop("logs", batch=2, consumerGroup="fast"), group="fast")
    await api.pop("logs", batch=2, consumerGroup="busy")
    await age(connection, 11)
    await clean(api)
    assert await stored(connection) == [(0, 2)]


async def test_completed_retention_keeps_what_no_group_has_touched(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, completedRetentionSeconds=10)
    await api.push("logs", 1)
    await age(connection, 11)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs")] == [1]


async def test_completed_retention_keeps_a_segment_that_is_half_consumed(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, completedRetentionSeconds=10)
    await api.push("logs", 1, 2, 3)
    await api.ack(await api.pop("logs", batch=2))
    await age(connection, 11)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs", batch=10)] == [3]


async def test_completed_retention_keeps_what_was_consumed_lately(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, completedRetentionSeconds=10)
    await api.push("logs", 1)
    await api.ack(await api.pop("logs"))
    await clean(api)
    assert await stored(connection) == [(0, 1)]


async def test_a_group_that_comes_after_retention_starts_at_what_is_left(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    await api.push("logs", 1, 2)
    await age(connection, 11)
    await api.push("logs", 3)
    await clean(api)
    assert [message["data"] for message in await api.pop("logs", batch=10, consumerGroup="late")] == [3]


async def test_a_message_under_lease_can_be_acked_after_retention_has_passed_it(
    api: Api, connection: Connection
) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10, retryLimit=0)
    await api.push("logs", 1, 2, ids=["one", "two"])
    first, second = await api.pop("logs", batch=2)
    await age(connection, 11)
    await clean(api)
    (result,) = await api.ack([first])
    assert result["success"]
    (result,) = await api.ack([second], "failed", error="broken")
    assert result["dlq"]
    assert await connection.fetchval("SELECT transaction_id FROM queen.dead_letters") == "two"
    await clean(api)
    assert await stored(connection) == []


async def test_the_traces_of_a_message_go_with_it(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    await api.push("logs", 1, ids=["old"])
    await age(connection, 11)
    await api.push("logs", 2, ids=["young"])
    for offset, transaction_id in enumerate(("old", "young")):
        await connection.execute(
            "INSERT INTO queen.traces (queue_id, partition_id, message_offset, transaction_id, group_name, event_type,"
            " data, worker_id) SELECT queue_id, id, $1, $2, '', 'info', '', '' FROM queen.partitions"
            " WHERE next_offset > 0",
            offset,
            transaction_id,
        )
    await clean(api)
    rows = await connection.fetch("SELECT transaction_id FROM queen.traces")
    assert [row["transaction_id"] for row in rows] == ["young"]


async def test_pushing_goes_on_while_old_messages_are_removed(api: Api, connection: Connection) -> None:
    """Each round pushes the ids of messages that are being removed, so looking for duplicates races with it."""
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    for _ in range(10):
        for number in range(5):
            await api.push("logs", number, ids=[f"t-{number}"])
        await age(connection, 11)
        pushes = [api.push("logs", number, ids=[f"t-{number}"]) for number in range(5)]
        results = await asyncio.gather(clean(api), *pushes)
        assert {result[0]["status"] for result in results[1:]} <= {"queued", "duplicate"}
        await age(connection, 11)
        await clean(api)
    assert await stored(connection) == []


async def test_a_message_that_waits_too_long_is_evicted(api: Api, connection: Connection) -> None:
    await api.configure("jobs", maxWaitTimeSeconds=10)
    await api.push("jobs", 1, 2)
    await age(connection, 11)
    await api.push("jobs", 3)
    await clean(api)
    assert [message["data"] for message in await api.pop("jobs", batch=10)] == [3]
    assert await history(connection) == [("jobs", "max_wait_time_eviction", 2)]


async def test_eviction_goes_on_by_itself(start_server: StartServer) -> None:
    api = await start_server(eviction_interval=100)
    await api.configure("jobs", maxWaitTimeSeconds=1)
    await api.push("jobs", 1)
    await until(lambda: delivers_nothing(api, "jobs"))


async def test_what_every_group_has_consumed_does_not_wait_and_stays(api: Api, connection: Connection) -> None:
    await api.configure("jobs", maxWaitTimeSeconds=10)
    await api.push("jobs", 1)
    await api.ack(await api.pop("jobs"))
    await age(connection, 11)
    await clean(api)
    assert await stored(connection) == [(0, 1)]


async def test_eviction_reaches_what_only_one_of_two_groups_has_consumed(api: Api, connection: Connection) -> None:
    await api.configure("jobs", maxWaitTimeSeconds=10)
    for number in range(3):
        await api.push("jobs", number)
    await api.ack(await api.pop("jobs", batch=3, consumerGroup="fast"), group="fast")
    await api.ack(await api.pop("jobs", consumerGroup="slow"), group="slow")
    await age(connection, 11)
    await api.push("jobs", "young")
    await clean(api)
    for group in ("fast", "slow"):
        assert [message["data"] for message in await api.pop("jobs", batch=9, consumerGroup=group)] == ["young"]


async def test_eviction_passes_several_batches(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(eviction_batch_size=2)
    await api.configure("jobs", maxWaitTimeSeconds=10)
    await api.push("jobs", "consumed")
    await api.ack(await api.pop("jobs"))
    for number in range(9):
        await api.push("jobs", number)
    await age(connection, 11)
    await api.push("jobs", "young")
    await clean(api)
    assert [message["data"] for message in await api.pop("jobs", batch=20)] == ["young"]
    assert await stored(connection) == [(10, 1)]


async def test_evicted_messages_make_room_in_a_full_queue(api: Api, connection: Connection) -> None:
    await api.configure("jobs", maxWaitTimeSeconds=10, maxSize=1)
    await api.push("jobs", 1)
    assert (await api.push("jobs", 2))[0]["status"] == "failed"
    await age(connection, 11)
    await clean(api)
    assert (await api.push("jobs", 3))[0]["status"] == "queued"


async def test_segments_of_expired_messages_are_removed(api: Api, connection: Connection) -> None:
    await api.configure("news", ttl=10)
    await api.push("news", 1, partition="popped")
    await api.push("news", 2, partition="left")
    await age(connection, 11)
    assert await api.pop("news", "popped") == []
    await clean(api)
    assert await stored(connection) == []
    assert await history(connection) == [("news", "ttl_expiration", 2)]


async def test_a_deleted_queue_leaves_nothing_behind(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(retention_batch_size=3)
    await broker_of(api).jobs.elected.wait()
    for number in range(10):
        await api.push("gone", number, partition=f"p{number % 3}")
    await api.ack(await api.pop("gone"), "dlq")
    await api.push("kept", 1)
    answer = await api.call("DELETE", "/api/v1/resources/queues/gone")
    assert answer.status == 200
    await until(lambda: empty(connection, "dropped_partitions"))
    assert await stored(connection) == [(0, 1)]
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors") == 0
    assert await connection.fetchval("SELECT count(*) FROM queen.dead_letters") == 0


async def test_an_unused_empty_partition_is_removed_with_its_cursors(api: Api, connection: Connection) -> None:
    await api.configure("logs", retentionEnabled=True, retentionSeconds=10)
    await api.push("logs", 1, partition="old")
    await api.push("logs", 1, partition="dead")
    for name in ("old", "dead"):
        await api.ack(await api.pop("logs", name), "completed" if name == "old" else "dlq")
    await api.push("logs", 1, partition="young")
    await age(connection, 31 * 86_400, "old", "dead", "Default")
    await clean(api)
    assert await partitions(connection) == ["dead", "young"]
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors") == 1
    assert await empty(connection, "dropped_partitions")


async def test_a_removed_partition_comes_back_with_the_next_push(
    start_server: StartServer, connection: Connection
) -> None:
    """Two workers remember the partition; a pop waits for it by name; then it is removed and pushed to again."""
    here, there = await start_server(0, num_workers=2), await start_server(1, num_workers=2)
    await here.configure("logs", retentionEnabled=True, retentionSeconds=10)
    await here.push("logs", 1, partition="p")
    await there.ack(await there.pop("logs", "p"))
    await age(connection, 31 * 86_400)
    waiting = asyncio.create_task(there.pop("logs", "p", wait=True, timeout=20_000))
    await until_parked(there)
    await clean(here)
    assert await partitions(connection) == []
    await here.push("logs", 2, partition="p", ids=["t"])
    (message,) = await waiting
    assert message["data"] == 2
    await there.ack([message])
    assert (await there.push("logs", 3, partition="p", ids=["t"]))[0]["status"] == "duplicate"


async def test_a_partition_that_another_host_removed_is_made_again(
    start_server: StartServer, connection: Connection
) -> None:
    """Servers that cannot tell each other: each finds out when it next uses the partition."""
    here, there = await start_server(), await start_server()
    for api in (here, there):
        await api.push("logs", 1, partition="p")
        await api.ack(await api.pop("logs", "p", batch=2))
    await connection.execute("DELETE FROM queen.segments")
    await age(connection, 31 * 86_400)
    await clean(here)
    assert await partitions(connection) == []
    assert await there.pop("logs", "p") == []
    assert (await there.push("logs", 2, partition="p"))[0]["status"] == "queued"
    assert [message["data"] for message in await here.pop("logs", "p")] == [2]


async def test_a_push_at_the_same_moment_keeps_its_partition(api: Api, connection: Connection) -> None:
    """The janitor waits for the row that a push has locked, and then sees that it has moved."""
    await api.push("logs", 1)
    await connection.execute("DELETE FROM queen.segments")
    await age(connection, 31 * 86_400)
    async with connection.transaction():
        await connection.execute("UPDATE queen.partitions SET next_offset = next_offset + 1, last_at = now()")
        cleaning = asyncio.create_task(clean(api))
        await until(lambda: somebody_waits_for_a_lock(connection))
    await cleaning
    assert await partitions(connection) == ["Default"]


async def test_what_a_clear_left_behind_when_it_was_interrupted_is_removed(api: Api, connection: Connection) -> None:
    await api.push("logs", 1, 2)
    await connection.execute("UPDATE queen.partitions SET floor_offset = next_offset")
    await clean(api)
    assert await stored(connection) == []


async def test_an_ack_whose_queue_another_host_has_deleted_finds_no_lease(start_server: StartServer) -> None:
    here, there = await start_server(), await start_server()
    await here.push("jobs", 1, 2)
    first, second = await here.pop("jobs", batch=2)
    await here.push("others", 3)
    (other,) = await here.pop("others")
    await there.call("DELETE", "/api/v1/resources/queues/jobs")
    results = await here.ack([first, second, other], ["completed", "failed", "completed"])
    assert [result["success"] for result in results] == [False, False, True]
    assert results[1]["error"] == "Invalid or expired lease"


async def test_a_transaction_can_push_to_a_partition_that_another_host_removed(
    start_server: StartServer, connection: Connection
) -> None:
    here, there = await start_server(), await start_server()
    await here.push("logs", 1)
    await connection.execute("DELETE FROM queen.segments")
    await age(connection, 31 * 86_400)
    await clean(there)
    operations = {"operations": [{"type": "push", "items": [{"queue": "logs", "payload": 2}]}]}
    accepted = await here.call("POST", "/api/v1/transaction", operations)
    assert accepted.body["success"]
    assert [message["data"] for message in await here.pop("logs")] == [2]


async def test_old_history_is_removed(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(retention_batch_size=2)
    await connection.execute(
        "INSERT INTO queen.retention_history (queue_name, kind, messages, at)"
        " SELECT 'q', 'retention', days, now() - make_interval(days => days) FROM generate_series(86, 95) days"
    )
    await clean(api)
    assert await connection.fetchval("SELECT max(messages) FROM queen.retention_history") == 89


async def test_one_of_two_janitors_is_elected_and_the_other_takes_over(start_server: StartServer) -> None:
    first = await start_server()
    await broker_of(first).jobs.elected.wait()
    second = await start_server()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await broker_of(second).jobs.elected.wait()
    await broker_of(first).jobs.stop()
    async with asyncio.timeout(100):
        await broker_of(second).jobs.elected.wait()


async def test_losing_the_connection_ends_the_term_at_once(start_server: StartServer, connection: Connection) -> None:
    janitor = broker_of(await start_server()).jobs
    await janitor.elected.wait()
    # All of them: other jobs have locks, too.
    assert await connection.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    )
    await until(lambda: resigned(janitor))
    async with asyncio.timeout(100):
        await janitor.elected.wait()


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("look_aged", "'{1,2}', 1.0"),
        ("look_consumed", "'{1,2}', 1.0"),
        ("look_waiting", "'{1,2}', 1.0"),
        ("raise_floors_aged", "'{1,2}', 1.0, 10"),
        ("raise_floors_consumed", "'{1,2}', 1.0, 10"),
        ("raise_floors_waiting", "'{1,2}', 1.0, 10"),
        ("sweep", "'{1,2}', '{0,0}', 10"),
        ("remove_dropped_segments", "'{1,2}', '{0,0}', 10"),
        ("idle_partitions", "0, 100, 30"),
        ("unswept_partitions", "0, 100"),
    ],
)
async def test_segments_are_found_by_their_primary_key(
    api: Api, connection: Connection, statement: str, values: str
) -> None:
    """With plans made as the connection of the jobs makes them."""
    await connection.execute("SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off")
    await connection.execute(
        "INSERT INTO queen.segments SELECT p, o, 1, now(), '', ''"
        " FROM generate_series(1, 20) p, generate_series(1, 200) o; ANALYZE queen.segments"
    )
    text = broker_of(api).database.statements[statement].rstrip(";")
    await connection.execute(f"PREPARE one AS {text}")
    plan = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN EXECUTE one({values})"))
    assert "segments_pkey" in plan
    assert "Seq Scan on segments" not in plan
    assert "Disabled: true" not in plan


async def stored(connection: Connection) -> list[tuple[int, int]]:
    """(base offset, count) of every segment."""
    rows = await connection.fetch("SELECT base_offset, count FROM queen.segments ORDER BY partition_id, base_offset")
    return [(row["base_offset"], row["count"]) for row in rows]


async def history(connection: Connection) -> list[tuple[str, str, int]]:
    """What was removed of each queue and why; a run that was slow, or met another, wrote it down in pieces."""
    rows = await connection.fetch(
        "SELECT queue_name, kind, sum(messages)::int FROM queen.retention_history"
        " GROUP BY queue_name, kind ORDER BY min(id)"
    )
    return [tuple(row) for row in rows]


async def partitions(connection: Connection) -> list[str]:
    return [row["name"] for row in await connection.fetch("SELECT name FROM queen.partitions ORDER BY name")]


async def empty(connection: Connection, table: str) -> bool:
    return bool(await connection.fetchval(f"SELECT count(*) = 0 FROM queen.{table}"))


async def somebody_waits_for_a_lock(connection: Connection) -> bool:
    return bool(await connection.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"))


async def delivers_nothing(api: Api, queue: str) -> bool:
    """To a group that comes just now."""
    return not await api.pop(queue, consumerGroup=f"group-{asyncio.get_running_loop().time()}")


async def resigned(janitor: JobRunner) -> bool:
    return not janitor.elected.is_set()

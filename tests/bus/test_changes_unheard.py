"""Hosts that never hear of each other: what one changes takes effect at the other within moments all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from tests.bus.conftest import Host, StartHost
from tests.support.ageing import until
from tests.support.api import payloads
from tests.support.database import Connection

Pair = tuple[Host, Host]


@pytest.fixture
async def hosts(start_host: StartHost) -> Pair:
    quick = {"queen_sync_reconcile_ms": 50, "pop_safety_poll_ms": 300}
    return await start_host("here", **quick), await start_host("there", **quick)


async def test_new_options_of_a_queue_take_effect(hosts: Pair) -> None:
    here, there = hosts
    await there.push("q", 1)
    assert payloads(await there.pop("q", autoAck=True)) == [1]
    await here.configure("q", delayedProcessing=3600)

    async def is_delayed() -> bool:
        await there.push("q", 2)
        return await there.pop("q", autoAck=True) == []

    await until(is_delayed)


async def test_a_parked_pop_gets_what_a_shorter_delay_lets_through(hosts: Pair) -> None:
    here, there = hosts
    await here.configure("q", delayedProcessing=3600)
    await here.push("q", 1)
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000))
    await asyncio.sleep(0.2)
    await here.configure("q", delayedProcessing=0)
    async with asyncio.timeout(100):
        assert payloads(await waiting) == [1]


async def test_options_that_a_wildcard_pop_has_read_reach_the_waiting_too(hosts: Pair) -> None:
    """Pops by namespace read all queues; lanes made for the options before must not outlive that."""
    here, there = hosts
    await here.configure("q", namespace="n", delayedProcessing=3600)
    await here.push("q", 1)
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000))
    await asyncio.sleep(0.2)
    await here.configure("q", namespace="n", delayedProcessing=0)
    await there.call("GET", "/api/v1/pop", namespace="n", consumerGroup="other")
    async with asyncio.timeout(100):
        assert payloads(await waiting) == [1]


@pytest.mark.parametrize("partition", [None, "p"])
async def test_a_queue_that_was_deleted_and_created_again_is_popped(hosts: Pair, partition: str | None) -> None:
    here, there = hosts
    await here.push("q", 1, partition="p")
    assert payloads(await there.pop("q", partition, autoAck=True)) == [1]
    waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=20_000, autoAck=True))
    await asyncio.sleep(0.1)
    await here.call("DELETE", "/api/v1/resources/queues/q")
    await here.push("q", 2, partition="p")
    async with asyncio.timeout(100):
        assert payloads(await waiting) == [2]
    await here.push("q", 3, partition="p")
    async with asyncio.timeout(100):
        assert payloads(await there.pop("q", partition, autoAck=True)) == [3]


async def test_a_deleted_queue_is_pushed_to_as_a_new_one(hosts: Pair) -> None:
    here, there = hosts
    await here.configure("q", delayedProcessing=3600)
    await there.push("q", 1)
    await here.call("DELETE", "/api/v1/resources/queues/q")
    await there.push("q", 2)
    async with asyncio.timeout(100):
        assert payloads(await there.pop("q", wait=True, timeout=60_000)) == [2]


async def test_a_group_that_was_deleted_starts_over(hosts: Pair) -> None:
    here, there = hosts
    await here.push("q", 1, partition="a")
    new = {"consumerGroup": "g", "subscriptionMode": "new"}
    assert await there.pop("q", **new) == []
    await here.push("q", 2, partition="b")
    await there.ack(await there.pop("q", wait=True, timeout=60_000, **new), group="g")
    await here.call("DELETE", "/api/v1/consumer-groups/g")
    got: list[Any] = []
    async with asyncio.timeout(100):
        while len(got) < 2:
            got += payloads(await there.pop("q", consumerGroup="g", autoAck=True, wait=True, timeout=500))
    assert sorted(got) == [1, 2]


async def test_a_subscription_made_elsewhere_counts_for_partitions_not_met_yet(hosts: Pair) -> None:
    here, there = hosts
    await here.push("q", 1, partition="a")
    assert payloads(await there.pop("q", consumerGroup="g", autoAck=True)) == [1]
    await here.push("q", "before", partition="b")
    assert await here.pop("q", consumerGroup="g", subscriptionMode="new", autoAck=True) == []
    await there.running.broker.changes.read()
    await here.push("q", "after", partition="b")
    async with asyncio.timeout(100):
        messages = await there.pop("q", consumerGroup="g", wait=True, timeout=60_000, autoAck=True, batch=10)
    assert payloads(messages) == ["after"]


async def test_a_seek_back_wakes_a_parked_pop(hosts: Pair) -> None:
    here, there = hosts
    await here.push("q", 1)
    assert payloads(await there.pop("q", consumerGroup="g", autoAck=True)) == [1]
    waiting = asyncio.create_task(there.pop("q", consumerGroup="g", wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    answer = await here.call(
        "POST", "/api/v1/consumer-groups/g/queues/q/seek", {"timestamp": "2020-01-01T00:00:00.000Z"}
    )
    assert answer.status == 200, answer
    async with asyncio.timeout(100):
        assert payloads(await waiting) == [1]


async def test_a_seek_ends_leases_that_another_host_believes_in(hosts: Pair) -> None:
    here, there = hosts
    await here.push("q", 1, 2)
    assert payloads(await there.pop("q", consumerGroup="g")) == [1]
    answer = await here.call("POST", "/api/v1/consumer-groups/g/queues/q/seek", {"timestamp": "2020-01-01T00:00:00Z"})
    assert answer.status == 200, answer
    async with asyncio.timeout(100):
        assert payloads(await there.pop("q", consumerGroup="g", wait=True, timeout=60_000)) == [1]


async def test_a_deleted_message_is_not_delivered_from_memory(hosts: Pair) -> None:
    here, there = hosts
    pushed = await there.push("q", "keep", "delete", ids=["keep", "delete"])
    assert pushed[1]["status"] == "queued"
    partition = (await here.call("GET", "/api/v1/messages", queue="q")).body["messages"][0]["partitionId"]
    answer = await here.call("DELETE", f"/api/v1/messages/{partition}/delete")
    assert answer.status == 200, answer
    cache = there.running.broker.cache

    async def has_forgotten() -> bool:
        return cache.nbytes == 0

    await until(has_forgotten)
    assert payloads(await there.pop("q", batch=10)) == ["keep"]


async def test_a_partition_that_was_removed_and_created_again_wakes_waiting_pops(
    hosts: Pair, connection: Connection
) -> None:
    here, there = hosts
    await here.push("q", 1, partition="p")
    assert payloads(await there.pop("q", "p", autoAck=True)) == [1]
    waiting = asyncio.create_task(there.pop("q", "p", wait=True, timeout=20_000, autoAck=True))
    await asyncio.sleep(0.1)
    await connection.execute(
        "UPDATE queen.partitions SET floor_offset = next_offset, created_at = now() - interval '99 days',"
        " last_at = now() - interval '99 days'"
    )
    await connection.execute(
        "UPDATE queen.cursors SET last_consumed_at = now() - interval '99 days',"
        " created_at = now() - interval '99 days', lease_acquired_at = now() - interval '99 days'"
    )
    await connection.execute("DELETE FROM queen.segments")
    await here.running.broker.jobs.run_once()
    assert await connection.fetchval("SELECT count(*) FROM queen.partitions") == 0
    await here.push("q", 2, partition="p")
    async with asyncio.timeout(100):
        assert payloads(await waiting) == [2]


async def test_a_change_that_commits_late_is_not_passed_over(hosts: Pair, dsn: str) -> None:
    """Its note has a smaller number than one that was read long before."""
    here, there = hosts
    for queue in ("early", "late"):
        await there.push(queue, 1)
        await there.pop(queue, autoAck=True)
    catalog = there.running.broker.catalog
    slow = await asyncpg.connect(dsn)
    try:
        async with slow.transaction():
            await slow.execute("UPDATE queen.queues SET lease_time = 77 WHERE name = 'late'")
            await here.configure("early", leaseTime=66)
            await until(lambda: has_lease_time(there, "early", 66))
            await asyncio.sleep(0.2)
        await until(lambda: has_lease_time(there, "late", 77))
    finally:
        await slow.close()
    assert catalog.cached_queue("early") is not None


async def test_what_a_host_changed_itself_does_not_disturb_it_a_second_time(hosts: Pair) -> None:
    here, _ = hosts
    await here.configure("q", leaseTime=5)
    await here.push("q", 1)
    assert payloads(await here.pop("q", consumerGroup="g", subscriptionMode="new", autoAck=True)) == []
    broker = here.running.broker
    queue = await broker.catalog.queue("q")
    assert queue is not None
    partition = broker.catalog.cached_partition_in(queue, "Default")
    assert partition is not None
    known = partition.known_to
    misses = broker.catalog.misses
    await asyncio.sleep(0.3)
    assert (partition.known_to, broker.catalog.misses) == (known, misses)
    assert broker.catalog.cached_partition_in(queue, "Default") is partition


async def test_notes_of_changes_are_removed_after_a_while(hosts: Pair, connection: Connection) -> None:
    here, _ = hosts
    await here.configure("old")
    await connection.execute("UPDATE queen.changes SET at = now() - interval '1 hour'")
    await here.configure("young")
    await here.running.broker.jobs.run_once()
    assert [row["name"] for row in await connection.fetch("SELECT name FROM queen.changes")] == ["young"]


async def has_lease_time(host: Host, queue: str, seconds: int) -> bool:
    found = await host.running.broker.catalog.queue(queue)
    return found is not None and found.lease_time == seconds

"""Two workers on one database behave as one: what one does, the other knows at once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from queen.broker.pop.requests import PopRequest, is_empty, unchanged
from queen.errors import DatabaseUnavailable
from queen.log.catalog import QUEUE_MODE, Partition, Queue
from queen.wire.ids import partition_number
from tests.conftest import StartServer
from tests.support.ageing import age, broker_of, until
from tests.support.api import Api, payloads
from tests.support.database import Connection, make_queue, stored_messages
from tests.support.pausing import pause_after

Pair = tuple[Api, Api]


@pytest.fixture
async def pair(start_server: StartServer) -> Pair:
    return (
        await start_server(worker_id=0, num_workers=2, pop_safety_poll_ms=60_000),
        await start_server(worker_id=1, num_workers=2, pop_safety_poll_ms=60_000),
    )


async def test_what_is_pushed_to_one_is_popped_from_the_other_at_once(pair: Pair) -> None:
    here, there = pair
    for number in range(50):
        await here.push("q", number, partition=str(number % 7))
        assert payloads(await there.pop("q", autoAck=True)) == [number]


async def test_a_lease_of_one_keeps_the_other_away_until_it_is_acked(pair: Pair) -> None:
    here, there = pair
    await here.push("q", 1, 2)
    messages = await here.pop("q")
    assert await there.pop("q") == []
    assert all(result["success"] for result in await there.ack(messages))
    assert payloads(await here.pop("q")) == [2]


async def test_an_ack_and_a_renewal_reach_a_lease_of_the_other_worker(pair: Pair) -> None:
    here, there = pair
    for partition in "abc":
        await here.push("q", 1, 2, partition=partition)
    messages = await here.pop("q", batch=6, partitions=3)
    answer = await there.call("POST", f"/api/v1/lease/{messages[0]['leaseId']}/extend", {"seconds": 1000})
    assert answer.status == 200
    results = await there.ack([*messages[3:], *messages[:3]])
    assert all(result["success"] for result in results)
    assert await here.pop("q") == await there.pop("q") == []


@pytest.mark.parametrize("status", ["completed", "dlq"])
async def test_an_ack_of_a_message_that_was_cleared_does_not_consume_the_one_that_has_its_id_now(
    pair: Pair, status: str
) -> None:
    here, there = pair
    await here.push("q", "old", ids=["a"])
    batch = await here.pop("q")
    assert (await here.call("DELETE", "/api/v1/queues/q/clear")).status == 200
    await here.push("q", "new", ids=["a"])
    (result,) = await there.ack(batch, status)
    assert result["success"] is False and result["error"].startswith("Message not found")
    path = "/api/v1/consumer-groups/__QUEUE_MODE__/queues/q/partitions/Default/release"
    assert (await here.call("POST", path)).status == 200
    assert [message["data"] for message in await there.pop("q")] == ["new"]


async def test_a_cycle_over_a_message_that_was_cleared_does_not_consume_the_one_that_has_its_id_now(pair: Pair) -> None:
    here, there = pair
    query = {"name": "q", "source_queue": "q", "config_hash": "h"}
    query_id = (await here.call("POST", "/streams/v1/queries", query)).body["query_id"]
    await here.push("q", "old", ids=["a"])
    (message,) = await here.pop("q", consumerGroup="streams.q")
    assert (await here.call("DELETE", "/api/v1/queues/q/clear")).status == 200
    await here.push("q", "new", ids=["a"])
    ack = {"transactionId": "a", "leaseId": message["leaseId"], "status": "completed", "count": 1}
    cycle = {"query_id": query_id, "partition_id": message["partitionId"], "consumer_group": "streams.q", "ack": ack}
    answer = await there.call("POST", "/streams/v1/cycle", cycle)
    assert answer.body["success"] is False and answer.body["error"].startswith("Message not found")
    path = "/api/v1/consumer-groups/streams.q/queues/q/partitions/Default/release"
    assert (await here.call("POST", path)).status == 200
    assert [message["data"] for message in await there.pop("q", consumerGroup="streams.q")] == ["new"]


async def test_a_lease_that_ends_while_the_other_reads_what_there_is_keeps_nothing_from_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.push("q", 1)
    messages = await here.pop("q")
    read, go_on = pause_after(monkeypatch, broker_of(there).database, "fetch", "ready_partitions")
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000))
    await read.wait()
    await here.ack(messages)
    await until_notified(pair)
    go_on.set()
    await until_scanned(there, "q")
    await here.push("q", 2)
    async with asyncio.timeout(20):
        assert payloads(await waiting) == [2]


async def until_notified(pair: Pair) -> None:
    """Notifications come in order: what is known of one is known of those before it."""
    here, there = pair
    await here.push("other", 1)
    assert payloads(await there.pop("other", "Default", autoAck=True)) == [1]


async def until_scanned(api: Api, queue: str) -> None:
    lane = broker_of(api).popper._lanes.find(queue, QUEUE_MODE)
    assert lane is not None
    await until(lambda: lane.scanned_at is not None)


async def test_a_group_starts_where_the_other_has_it_start_while_that_is_looked_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.push("q", "old")
    read, go_on = pause_after(monkeypatch, broker_of(there).database, "fetch", "subscription")
    popping = asyncio.create_task(there.pop("q", consumerGroup="g", autoAck=True))
    await read.wait()
    assert await here.pop("q", consumerGroup="g", subscriptionMode="new") == []
    await until_notified(pair)
    go_on.set()
    assert await popping == []


async def test_a_group_that_is_deleted_while_the_other_looks_it_up_is_one_group_to_both(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.push("q", 1)
    assert payloads(await here.pop("q", consumerGroup="g", autoAck=True)) == [1]
    read, go_on = pause_after(monkeypatch, broker_of(there).database, "fetch", "groups_by_names")
    popping = asyncio.create_task(there.pop("q", consumerGroup="g", autoAck=True))
    await read.wait()
    assert (await here.call("DELETE", "/api/v1/consumer-groups/g")).status == 200
    await until_notified(pair)
    go_on.set()
    assert payloads(await popping) == [1]
    assert await here.pop("q", consumerGroup="g", autoAck=True) == []


async def test_a_pop_of_several_queues_follows_one_that_is_changed_while_the_next_is_looked_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.push("a", 0)
    await there.pop("a", autoAck=True)
    popper = broker_of(there).popper
    read, go_on = pause_after(monkeypatch, broker_of(there).database, "fetch", "queues_by_names")
    answer = popper.pop(PopRequest(("a", "b"), wait=True, timeout=60), unchanged)
    await read.wait()
    await here.configure("a", leaseTime=7)
    await until_notified(pair)
    go_on.set()
    await until(lambda: popper.parked_by_queue().get("b"))
    await here.push("a", 1)
    async with asyncio.timeout(30):
        assert not is_empty(await answer)


async def test_a_pop_whose_partition_could_not_be_looked_up_when_its_queue_was_changed_is_woken_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.push("q", 0)
    waiting = asyncio.create_task(there.pop("q", "p", wait=True, timeout=60_000))
    await until(lambda: broker_of(there).popper.parked)
    catalog = broker_of(there).catalog
    look_up, looking, go_on = catalog.partition, asyncio.Event(), asyncio.Event()

    async def fail_once(queue: Queue, name: str) -> Partition | None:
        if name == "p" and not looking.is_set():
            looking.set()
            await go_on.wait()
            raise DatabaseUnavailable("gone")
        return await look_up(queue, name)

    monkeypatch.setattr(catalog, "partition", fail_once)
    await here.push("q", 0)
    await looking.wait()
    await here.configure("q", leaseTime=7)
    await until_notified(pair)
    go_on.set()
    await until(lambda: broker_of(there).popper.parked)
    await here.push("q", 1, partition="p")
    async with asyncio.timeout(30):
        assert payloads(await waiting) == [1]


async def test_ids_that_were_read_for_a_shorter_window_are_not_taken_for_those_of_a_longer_one(
    pair: Pair, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    await here.configure("q", dedupWindowSeconds=10)
    with monkeypatch.context() as silent:
        silent.setattr(broker_of(here).notifications.bus, "send", lambda datagram: None)
        (first,) = await here.push("q", 1, ids=["t"])
    await age(connection, 11)
    read, go_on = pause_after(monkeypatch, broker_of(there).pusher._link, "fetch", "partition_histories")
    pushing = asyncio.create_task(there.push("q", 2, ids=["u"]))
    await read.wait()
    await here.configure("q", dedupWindowSeconds=100)
    await until_notified(pair)
    go_on.set()
    await pushing
    (duplicate,) = await there.push("q", 3, ids=["t"])
    assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", first["message_id"])


async def test_a_notification_during_a_scan_is_not_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    await here.push("q", 0)
    assert payloads(await here.pop("q", autoAck=True)) == [0]
    monkeypatch.setattr(broker_of(here).notifications.bus, "send", lambda datagram: None)
    read, go_on = pause_after(monkeypatch, broker_of(there).database, "fetch", "ready_partitions")
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000))
    await read.wait()
    await here.push("q", 1)
    await broker_of(there).notify("q", None)
    go_on.set()
    async with asyncio.timeout(30):
        assert payloads(await waiting) == [1]


@pytest.mark.parametrize("partition", [None, "p"])
async def test_a_pop_parked_at_one_is_woken_by_a_push_to_the_other(pair: Pair, partition: str | None) -> None:
    here, there = pair
    await here.push("q", 0, partition="p")
    await there.pop("q", autoAck=True)
    for number in range(10):
        waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=20_000, autoAck=True))
        await asyncio.sleep(0.02)
        async with asyncio.timeout(100):
            await here.push("q", number, partition="p")
            assert payloads(await waiting) == [number]


async def test_a_pop_parked_at_one_is_woken_when_the_other_frees_the_partition(pair: Pair) -> None:
    here, there = pair
    await here.push("q", 1, 2)
    messages = await here.pop("q")
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.ack(messages)
        assert payloads(await waiting) == [2]


async def test_a_failed_batch_wakes_the_other_after_its_delay(pair: Pair, connection: Connection) -> None:
    here, there = pair
    await make_queue(connection, "q", retry_delay=200)
    await here.push("q", 1, 2)
    messages = await here.pop("q", batch=2)
    waiting = asyncio.create_task(there.pop("q", batch=2, wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.ack(messages, ["completed", "failed"])
        assert payloads(await waiting) == [2]


async def test_pops_of_many_partitions_at_both_workers_do_not_conflict(pair: Pair) -> None:
    """Both lease the same partitions in different orders: neither fails, and each message is delivered once."""
    partitions = [str(number) for number in range(30)]
    seen: list[tuple[str, int]] = []
    chance = random.Random(3)

    async def feed() -> None:
        for number in range(40):
            order = chance.sample(partitions, len(partitions))
            items = [{"queue": "q", "partition": partition, "payload": number} for partition in order]
            answer = await chance.choice(pair).call("POST", "/api/v1/push", {"items": items})
            assert answer.status == 201

    async def drain(api: Api) -> None:
        while len(seen) < 40 * 30:
            answer = await api.call(
                "GET", "/api/v1/pop/queue/q", batch=40, partitions=20, wait=True, timeout=200, autoAck=True
            )
            assert answer.status in (200, 204), answer
            if answer.body:
                seen.extend((message["partition"], message["data"]) for message in answer.body["messages"])

    async with asyncio.timeout(100):
        await asyncio.gather(feed(), *(drain(api) for api in pair * 4))
    assert sorted(seen) == sorted((partition, number) for partition in partitions for number in range(40))


async def test_producers_and_consumers_on_both_deliver_everything_once_and_in_order(
    pair: Pair, connection: Connection
) -> None:
    """Consumers ack, fail, or walk away; per partition the first deliveries come in order and nothing is lost."""
    partitions = [str(number) for number in range(6)]
    total = 6 * 60
    chance = random.Random(11)
    delivered: dict[str, list[int]] = defaultdict(list)
    acked: dict[str, list[int]] = defaultdict(list)
    live: set[str] = set()
    await make_queue(connection, "q", lease_time=1, retry_limit=1000, retry_delay=0)

    async def produce(partition: str) -> None:
        for start in range(0, 60, 4):
            await chance.choice(pair).push("q", *range(start, start + 4), partition=partition)

    async def consume() -> None:
        while sum(map(len, acked.values())) < total:
            messages = await chance.choice(pair).pop("q", batch=5, wait=True, timeout=500)
            if not messages:
                continue
            partition = messages[0]["partition"]
            assert partition not in live, "two live leases on one partition"
            live.add(partition)
            delivered[partition] += [m["data"] for m in messages if m["data"] not in delivered[partition]]
            fate = chance.random()
            if fate < 0.1:
                live.discard(partition)
                continue
            cut = len(messages) if fate < 0.6 else chance.randrange(len(messages))
            statuses = ["completed"] * cut + ["failed"] * (len(messages) - cut)
            live.discard(partition)
            results = await chance.choice(pair).ack(messages, statuses)
            for message, status, result in zip(messages, statuses, results, strict=True):
                if status == "completed" and result["success"]:
                    acked[partition].append(message["data"])

    async with asyncio.timeout(100):
        await asyncio.gather(*(produce(partition) for partition in partitions), *(consume() for _ in range(8)))
    for partition in partitions:
        assert delivered[partition] == list(range(60))
        # The answers of acks given by two workers may overtake one another on their way here.
        assert sorted(acked[partition]) == list(range(60))
        assert len(await stored_messages(connection, "q", partition)) == 60
    assert await pair[0].pop("q") == await pair[1].pop("q") == []


async def test_many_queues_made_at_once_are_known_to_pops_parked_at_the_other(pair: Pair) -> None:
    here, there = pair
    names = [f"{number:03d}" + "é" * 250 for number in range(200)]
    parked = [asyncio.create_task(there.pop(name, wait=True, timeout=30_000)) for name in names]
    await asyncio.sleep(1)
    items = [{"queue": name, "payload": number} for number, name in enumerate(names)]
    answer = await here.call("POST", "/api/v1/push", {"items": items})
    assert answer.status == 201
    async with asyncio.timeout(100):
        delivered = await asyncio.gather(*parked)
    assert [payloads(messages) for messages in delivered] == [[number] for number in range(200)]


@pytest.fixture
async def late_deadlocks(connection: Connection) -> None:
    """Sessions that are opened from now on wait for each other for minutes before PostgreSQL ends one of them."""
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '10min'")


async def test_workers_that_lease_the_same_partitions_in_opposite_orders_do_not_block_each_other(
    late_deadlocks: None, pair: Pair, connection: Connection
) -> None:
    """Each is stopped half way, by a lock on the cursor in the middle, and then let go."""
    here, there = pair
    partitions = [str(number) for number in range(11)]
    for messages, api in ((1, here), (1, there), (2, None)):
        for partition in partitions:
            await here.push("q", *[0] * messages, partition=partition)
        if api is not None:
            assert len(await api.pop("q", batch=11, partitions=11, autoAck=True)) == 11
    # What was just served goes to the end of the line, so `there` has them last first, and `here` in order.
    for partition in reversed(partitions[:-1]):
        await there.pop("q", partition, autoAck=True)
    transaction = connection.transaction()
    await transaction.start()
    ids = [row["partition_id"] for row in await connection.fetch("SELECT partition_id FROM queen.cursors ORDER BY 1")]
    await connection.execute("SELECT FROM queen.cursors WHERE partition_id = $1 FOR UPDATE", ids[5])
    pops = [asyncio.create_task(api.pop("q", batch=22, partitions=11, autoAck=True)) for api in pair]
    for _ in range(500):
        if await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") >= 2:
            break
        await asyncio.sleep(0.01)
    await transaction.rollback()
    async with asyncio.timeout(100):
        delivered = await asyncio.gather(*pops)
    assert sum(len(messages) for messages in delivered) == 12


async def test_an_ack_that_is_applied_is_answered_though_another_waits_for_a_lock(
    pair: Pair, connection: Connection
) -> None:
    """Leases of the other worker, acked together: one failure waits for the transaction that locks its cursor."""
    here, there = pair
    for partition in "abc":
        await here.push("q", 0, partition=partition)
    popped = {partition: await there.pop("q", partition) for partition in "abc"}
    async with connection.transaction():
        blocked = partition_number(popped["b"][0]["partitionId"])
        await connection.execute("SELECT FROM queen.cursors WHERE partition_id = $1 FOR UPDATE", blocked)
        first = asyncio.create_task(here.ack(popped["a"]))
        failure = asyncio.create_task(here.ack(popped["b"], ["failed"]))
        later = asyncio.create_task(here.ack(popped["c"]))
        async with asyncio.timeout(100):
            assert [result["success"] for result in await first + await later] == [True, True]
        assert not failure.done()
    assert (await failure)[0]["success"]


async def test_cursors_are_locked_in_order_though_some_of_them_are_met_only_now(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker knows the cursors of some partitions; the other has made those of partitions before them."""
    here, there = pair
    partitions = [str(number) for number in range(10)]
    for partition in partitions:
        await here.push("q", 0, partition=partition)
    for api, some in ((there, partitions[:5]), (here, partitions[5:])):
        for partition in some:
            assert await api.pop("q", partition, autoAck=True)
    assert here.worker is not None
    claimer = here.worker.broker.popper._claimer
    locked: list[list[int]] = []
    lease = claimer._lease

    async def watched(claims: Any, *others: Any) -> Any:
        locked.append([claim.partition_id for claim in claims])
        return await lease(claims, *others)

    monkeypatch.setattr(claimer, "_lease", watched)
    for partition in partitions:
        await there.push("q", 1, partition=partition)
    assert len(await here.pop("q", batch=10, partitions=10, autoAck=True, wait=True, timeout=60_000)) == 10
    assert locked and all(ids == sorted(ids) for ids in locked)
    assert max(map(len, locked)) == 10, "those that were known and those that were not are leased together"

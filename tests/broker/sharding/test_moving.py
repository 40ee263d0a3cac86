"""Queues and topics move from shard to shard while they are used; nothing is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from queen.broker.ack.leases import HeldLease
from queen.broker.sharding.fleet import Fleet, connect_fleet
from queen.broker.sharding.layout import change_layout
from queen.broker.sharding.move import Mover
from queen.errors import Conflict, NotFound
from queen.wire.ids import partition_number
from queen.wire.shards import Name
from tests.broker.sharding.names import queue_on, topic_on
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.pausing import pause_after
from tests.support.topic_api import TopicApi, item, named, values


async def move(dsns: tuple[str, ...], name: Name, to: int) -> bool:
    async with connect_fleet(dsns) as fleet:
        return await Mover(fleet).move(name, to)


async def rows(dsn: str, query: str, *arguments: Any) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetch(query, *arguments)
    finally:
        await connection.close()


async def more_than(count: Callable[[], int], by: int) -> None:
    """Wait until a count has grown by so much."""
    goal = count() + by
    await until(lambda: count() >= goal)


async def test_a_queue_and_a_topic_are_moved_by_a_request(api: Api, topics: TopicApi) -> None:
    queue, topic, namespace = queue_on(0), topic_on(0), "ns"
    await api.push(queue, 1)
    await topics.enqueue(item(1, topic, namespace))
    waiting = asyncio.create_task(api.pop(queue, consumerGroup="g", wait=True, timeout=60_000, subscriptionMode="new"))
    await api.call("POST", f"/api/v1/resources/queues/{queue}/pause")
    for name in ({"queue": queue}, {"namespace": namespace, "topic": topic}):
        for moved in (True, False):
            answer = await api.call("POST", "/api/v1/shards/move", {**name, "to": 1})
            assert (answer.status, answer.body["moved"], answer.body["running"]) == (200, moved, False)
        assert (await api.call("POST", "/api/v1/shards/move", {**name, "to": 2})).status == 404
    assert (await api.call("GET", "/api/v1/shards/moves")).body == {"moves": []}
    assert (await api.call("POST", "/api/v1/shards/move", {"queue": "nobody", "to": 1})).status == 404
    # The pause has moved with the queue, and the pop that waits for its end.
    await api.push(queue, 2)
    assert await api.pop(queue) == []
    await api.call("POST", f"/api/v1/resources/queues/{queue}/resume")
    assert [message["data"] for message in await waiting] == [2]
    assert values(await topics.dequeue(topic=topic, namespace=namespace)) == [1]


async def test_a_moved_queue_is_what_it_was(api: Api, dsns: tuple[str, str]) -> None:
    queue = queue_on(0)
    await api.configure(queue, leaseTime=77, retryLimit=0, deadLetterQueue=True, dlqAfterMaxRetries=True)
    await api.push(queue, *range(10), ids=[f"id-{number}" for number in range(10)])
    await api.push(queue, "p", partition="other")
    (dead,) = await api.pop(queue, "Default", consumerGroup="g")
    await api.ack([dead], "failed", group="g", error="bad")
    held = await api.pop(queue, "Default", consumerGroup="g", batch=3)
    trace = {key: held[0][key] for key in ("transactionId", "partitionId")}
    await api.call("POST", "/api/v1/traces", {**trace, "data": {"a": 1}, "traceNames": ["n"]})
    before = (await api.call("GET", f"/api/v1/resources/queues/{queue}")).body

    assert await move(dsns, Name.queue(queue), 1)

    assert (await api.call("GET", f"/api/v1/resources/queues/{queue}")).body == before
    config = (await api.call("GET", f"/api/v1/status/queues/{queue}")).body["queue"]["config"]
    assert (config["leaseTime"], config["retryLimit"]) == (77, 0)
    assert all(result["success"] for result in await api.ack(held, group="g"))
    rest = await api.pop(queue, "Default", consumerGroup="g", batch=20, wait=True)
    assert [message["data"] for message in rest] == [4, 5, 6, 7, 8, 9]
    again = await api.push(queue, "again", ids=["id-5"])
    assert again[0]["status"] == "duplicate"
    letters = (await api.call("GET", "/api/v1/dlq", queue=queue)).body
    assert [letter["data"] for letter in letters["messages"]] == [0]
    traces = (await api.call("GET", "/api/v1/traces/by-name/n")).body["traces"]
    assert [one["data"] for one in traces] == [{"a": 1}]
    assert [message["data"] for message in await api.pop(queue, "other")] == ["p"]
    assert not await rows(dsns[0], "SELECT FROM queen.segments")
    assert not await rows(dsns[0], "SELECT FROM queen.moves")
    assert not await rows(dsns[1], "SELECT FROM queen.move_rows")
    assert await move(dsns, Name.queue(queue), 1) is False


async def test_a_queue_goes_there_and_back_and_its_leases_hold(api: Api, dsns: tuple[str, str]) -> None:
    queue = queue_on(0)
    await api.push(queue, *range(6))
    held = await api.pop(queue, batch=2)
    for to in (1, 0, 1, 0):
        assert await move(dsns, Name.queue(queue), to)
        await api.push(queue, to)
    extended = await api.call("POST", f"/api/v1/lease/{held[0]['leaseId']}/extend", {"seconds": 60})
    assert extended.status == 200
    assert all(result["success"] for result in await api.ack(held))
    assert [message["data"] for message in await api.pop(queue, batch=20, wait=True)] == [2, 3, 4, 5, 1, 0, 1, 0]


async def test_a_message_that_was_deleted_during_the_copy_stays_deleted(api: Api, dsns: tuple[str, str]) -> None:
    queue = queue_on(0)
    results = await api.push(queue, *range(3), ids=["a", "b", "c"])

    class Deleting(Mover):
        async def _switch_over(self, *arguments: Any) -> None:
            answer = await api.call("DELETE", f"/api/v1/messages/{results[0]['partition_id']}/b")
            assert answer.body["success"]
            await super()._switch_over(*arguments)

    async with connect_fleet(dsns) as fleet:
        await Deleting(fleet).move(Name.queue(queue), 1)
    assert [message["data"] for message in await api.pop(queue, batch=5, wait=True)] == [0, 2]


async def test_a_waiting_pop_goes_with_its_queue(api: Api, dsns: tuple[str, str]) -> None:
    queue = queue_on(0)
    await api.push(queue, 1)
    await api.pop(queue, autoAck=True)
    waiting = asyncio.create_task(api.pop(queue, wait=True, timeout=30_000))
    await asyncio.sleep(0)
    await move(dsns, Name.queue(queue), 1)
    await api.push(queue, 2)
    assert [message["data"] for message in await waiting] == [2]


@pytest.mark.parametrize("auto_ack", [False, True])
async def test_what_a_pop_leased_just_before_its_queue_moved_is_delivered(
    api: Api, dsns: tuple[str, str], monkeypatch: pytest.MonkeyPatch, auto_ack: bool
) -> None:
    assert api.worker is not None and api.worker._sharded is not None
    queue = queue_on(0)
    await api.push(queue, 1, 2)
    await api.pop(queue, batch=1, autoAck=True)
    reached, go_on = pause_after(monkeypatch, api.worker.brokers[0].popper._claimer, "_lease")
    popping = asyncio.create_task(api.pop(queue, wait=True, timeout=30_000, autoAck=auto_ack))
    await reached.wait()
    await move(dsns, Name.queue(queue), 1)
    await api.worker._sharded.directory.refresh()
    await asyncio.sleep(0.1)
    # As it does a moment later, when it reads of the change.
    api.worker.brokers[0].catalog.forget_queue(queue)
    go_on.set()
    messages = await popping
    assert [(message["data"], message["partition"]) for message in messages] == [(2, "Default")]
    assert auto_ack or [result["success"] for result in await api.ack(messages)] == [True]
    await api.push(queue, 3)
    assert [message["data"] for message in await api.pop(queue, wait=True, timeout=30_000)] == [3]


async def test_where_a_queue_is_is_read_again_when_it_moves_meanwhile(
    api: Api, dsns: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.worker is not None and api.worker._sharded is not None
    directory = api.worker._sharded.directory
    queue = queue_on(1)
    await api.push(queue, 1)
    directory._places.clear()
    reached, go_on = pause_after(monkeypatch, directory, "_follow")
    finding = asyncio.create_task(directory.find(Name.queue(queue)))
    await reached.wait()
    await move(dsns, Name.queue(queue), 0)
    await directory.refresh()
    go_on.set()
    assert await finding == 0


async def test_where_several_topics_are_is_read_again_when_one_moves_meanwhile(
    api: Api, topics: TopicApi, dsns: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.worker is not None and api.worker._sharded is not None
    directory, namespace = api.worker._sharded.directory, "ns"
    first, second = topic_on(1, namespace), topic_on(1, namespace, "second")
    await topics.enqueue(item(1, first, namespace), item(2, second, namespace))
    dequeuer = api.worker._sharded.topics.multi_dequeuer
    assert await dequeuer._places(namespace, [first, second]) == {1: [first, second]}
    del directory._places[Name.topic(namespace, second)]
    reached, go_on = pause_after(monkeypatch, directory, "_follow")
    finding = asyncio.create_task(dequeuer._places(namespace, [first, second]))
    await reached.wait()
    await move(dsns, Name.topic(namespace, first), 0)
    await directory.refresh()
    go_on.set()
    assert await finding == {0: [first], 1: [second]}


async def waiting_dequeue(topics: TopicApi, namespace: str, topic: str) -> list[dict[str, Any]]:
    return await topics.dequeue(topic=topic, namespace=namespace, wait=True, timeout=30_000)


async def waiting_dequeue_many(topics: TopicApi, namespace: str, topic: str) -> list[dict[str, Any]]:
    which = {"namespace": namespace, "topics": json.dumps([topic])}
    items: list[dict[str, Any]] = await topics.good("GET", "/dequeue/many", **which, wait=True, timeout=30_000)
    return items


@pytest.mark.parametrize(("several", "at_most_once"), [(False, False), (False, True), (True, False)])
async def test_what_a_dequeue_leased_just_before_its_topic_moved_is_delivered(
    api: Api,
    topics: TopicApi,
    dsns: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    several: bool,
    at_most_once: bool,
) -> None:
    assert api.worker is not None and api.worker._sharded is not None
    topic, namespace = topic_on(0), "ns"
    await topics.configure(topic, namespace, at_most_once=at_most_once)
    await topics.enqueue(item(1, topic, namespace))
    parts = api.worker.brokers[0].topics
    claims = (parts.multi_dequeuer, "_claim") if several else (parts.dequeuer, "claim")
    reached, go_on = pause_after(monkeypatch, *claims)
    dequeuing = asyncio.create_task((waiting_dequeue_many if several else waiting_dequeue)(topics, namespace, topic))
    await reached.wait()
    await move(dsns, Name.topic(namespace, topic), 1)
    await api.worker._sharded.directory.refresh()
    await asyncio.sleep(0.1)
    go_on.set()
    items = await dequeuing
    assert values(items) == [1]
    assert at_most_once or await topics.ack(*items)


async def test_a_dequeue_of_several_topics_goes_with_them(api: Api, topics: TopicApi, dsns: tuple[str, str]) -> None:
    topic, namespace = topic_on(0), "ns"
    await topics.enqueue(item(1, topic, namespace))
    await topics.dequeue(topic=topic, namespace=namespace)
    waiting = asyncio.create_task(waiting_dequeue_many(topics, namespace, topic))
    await asyncio.sleep(0.1)
    await move(dsns, Name.topic(namespace, topic), 1)
    await topics.enqueue(item(2, topic, namespace))
    assert values(await waiting) == [2]


async def test_leases_are_released_where_their_queue_has_moved_to(api: Api, dsns: tuple[str, str]) -> None:
    assert api.worker is not None and api.worker._sharded is not None
    queue = queue_on(0)
    await api.push(queue, 1)
    (held,) = await api.pop(queue)
    await move(dsns, Name.queue(queue), 1)
    lease = HeldLease(held["leaseId"], (partition_number(held["partitionId"]),))
    assert await api.worker._sharded.releaser.release([lease]) == 1
    assert [message["data"] for message in await api.pop(queue, wait=True, timeout=30_000)] == [1]


async def test_moving_under_load_loses_and_repeats_nothing_and_keeps_the_order(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    """Producers use one worker and consumers another: neither is notified of the moves."""
    api = await start_server(database_urls=dsns, num_workers=2)
    other = await start_server(worker_id=1, database_urls=dsns, num_workers=2)
    queue, partitions = queue_on(0), ("a", "b", "c")
    stop = asyncio.Event()
    pushed: dict[str, list[int]] = {partition: [] for partition in partitions}
    consumed: dict[str, list[int]] = {partition: [] for partition in partitions}
    refused: list[Any] = []

    async def produce(partition: str) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            body = {"items": [{"queue": queue, "partition": partition, "payload": number}]}
            answer = await api.call("POST", "/api/v1/push", body)
            assert answer.status == 201, answer
            pushed[partition].append(number)

    async def consume() -> None:
        while True:
            messages = await other.pop(queue, wait=True, timeout=1000, batch=20)
            if not messages:
                if stop.is_set() and all(len(consumed[one]) == len(pushed[one]) for one in partitions):
                    return
                continue
            results = await other.ack(messages)
            refused.extend(result for result in results if not result["success"])
            for message in messages:
                consumed[message["partition"]].append(message["data"])

    producers = [asyncio.create_task(produce(partition)) for partition in partitions]
    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    for to in (1, 0, 1):
        await more_than(lambda: sum(map(len, consumed.values())), 30)
        await move(dsns, Name.queue(queue), to)
    stop.set()
    await asyncio.gather(*producers)
    await asyncio.gather(*consumers)
    assert refused == []
    assert consumed == pushed
    assert all(numbers == list(range(len(numbers))) for numbers in pushed.values())


class HalfMover(Mover):
    """Stops when something has left one shard and has not come to the other yet."""

    async def _switch_over(self, *arguments: Any) -> None:
        await super()._switch_over(*arguments)
        raise InterruptedError


async def test_an_ack_of_what_has_left_one_shard_and_not_come_to_the_other_yet_is_taken(
    api: Api, dsns: tuple[str, str]
) -> None:
    """The worker that finds it completes the move."""
    queue = queue_on(0)
    await api.push(queue, *range(6))
    popped = [await api.pop(queue, batch=3, consumerGroup=group) for group in ("one", "many")]

    async with connect_fleet(dsns) as fleet:
        with pytest.raises(InterruptedError):
            await HalfMover(fleet).move(Name.queue(queue), 1)
    first, *others = popped[0]
    assert (await api.call("POST", "/api/v1/ack", _ack(first, "one"))).body[0]["success"] is True
    assert all(result["success"] for result in await api.ack(others, group="one"))
    assert all(result["success"] for result in await api.ack(popped[1], group="many"))
    for group in ("one", "many"):
        assert [message["data"] for message in await api.pop(queue, batch=9, consumerGroup=group)] == [3, 4, 5]


def _ack(message: dict[str, Any], group: str) -> dict[str, Any]:
    return {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"consumerGroup": group}


async def test_a_moved_topic_is_what_it_was(topics: TopicApi, dsns: tuple[str, str]) -> None:
    topic = topic_on(0)
    await topics.good(
        "POST", "/configure", {"namespace": "ns", "topic": topic, "options": {"max_retries": 0, "lease_seconds": 99}}
    )
    ids = await topics.enqueue(
        item("dead", topic, priority=0),
        item("leased", topic, priority=1),
        item("ready", topic, priority=2, idempotency_key="k"),
        item("later", topic, delay=3600),
    )
    (dead,) = await topics.dequeue(1, topic=topic)
    await topics.good("POST", "/nack", [named(dead, error="bad")])
    (leased,) = await topics.dequeue(1, topic=topic)

    assert await move(dsns, Name.topic("ns", topic), 1)

    counts = await topics.good("GET", "/counts", namespace="ns")
    assert [(one["topic"], one["ready"], one["delayed"], one["leased"], one["dead"]) for one in counts] == [
        (topic, 1, 1, 1, 1)
    ]
    assert counts[0]["options"]["lease_seconds"] == 99
    assert (await topics.good("POST", "/ack", [named(leased, lease_owner=leased["lease_owner"])]))[0]["success"]
    assert await topics.enqueue(item("again", topic, idempotency_key="k")) == [ids[2]]
    assert values(await topics.dequeue(topic=topic)) == ["ready"]
    (letter,) = await topics.good("GET", "/dlq", namespace="ns", topic=topic)
    assert letter["id"] == ids[0]
    assert not await rows(dsns[0], "SELECT FROM queen.topic_items")


async def test_a_topic_moves_with_what_is_in_its_ready_queue_and_was_handed_out_of_it(
    start_server: StartServer, dsns: tuple[str, str]
) -> None:
    topics = TopicApi(await start_server(database_urls=dsns, topic_ready_queues="on"))
    topic = topic_on(0)
    await topics.enqueue(*(item(number, topic) for number in range(10)))
    assert topics.api.worker is not None
    inside = topics.api.worker.brokers[0].topics
    found = await inside.catalog.one(("ns", topic))
    assert found is not None and inside.prefetch is not None and await inside.prefetch.open(found)
    await inside.prefetch.fill(inside.prefetch.by_topic[found.id])
    leased = await topics.dequeue(3, topic=topic)
    assert (values(leased), inside.prefetch.by_topic[found.id].depth) == ([0, 1, 2], 7)

    assert await move(dsns, Name.topic("ns", topic), 1)

    rest = await topics.dequeue(10, topic=topic, wait=True, timeout=30000)
    assert (values(rest), {one["retries"] for one in rest}) == (list(range(3, 10)), {0})
    refs = [named(one, lease_owner=one["lease_owner"]) for one in leased + rest]
    assert all(one["success"] for one in await topics.good("POST", "/ack", refs))


async def test_moving_a_topic_under_load_loses_and_repeats_nothing(topics: TopicApi, dsns: tuple[str, str]) -> None:
    topic = topic_on(0)
    stop = asyncio.Event()
    sent: list[int] = []
    done: list[int] = []

    async def produce() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            await topics.enqueue(item(number, topic))
            sent.append(number)

    async def consume() -> None:
        while True:
            leased = await topics.dequeue(10, topic=topic, wait=True, timeout=1000)
            if not leased:
                if stop.is_set() and len(done) == len(sent):
                    return
                continue
            outcomes = await topics.good("POST", "/ack", [named(one) for one in leased])
            assert all(outcome["success"] for outcome in outcomes), outcomes
            done.extend(values(leased))

    producer, consumers = asyncio.create_task(produce()), [asyncio.create_task(consume()) for _ in range(2)]
    for to in (1, 0):
        await more_than(lambda: len(done), 20)
        await move(dsns, Name.topic("ns", topic), to)
    stop.set()
    await producer
    await asyncio.gather(*consumers)
    assert sorted(done) == sorted(sent)


async def test_only_what_exists_can_be_moved_and_only_one_thing_at_a_time(api: Api, dsns: tuple[str, str]) -> None:
    queue = queue_on(0)
    await api.push(queue, 1)
    with pytest.raises(NotFound, match="there is no queue nobody"):
        await move(dsns, Name.queue("nobody"), 1)
    with pytest.raises(NotFound, match="there is no shard 7"):
        await move(dsns, Name.queue(queue), 7)
    async with connect_fleet(dsns) as fleet:
        await Mover(fleet)._lock(fleet[0], 0)
        with pytest.raises(Conflict, match="only one move at a time"):
            await move(dsns, Name.queue(queue), 1)


async def test_a_shard_that_is_opened_moves_nothing_and_takes_its_share_of_new_names(
    api: Api, dsns: tuple[str, str]
) -> None:
    async with connect_fleet(dsns) as fleet:
        await change_layout(fleet, [0])
        names = [f"old-{number}" for number in range(6)]
        for name in names:
            await api.push(name, name)
        assert len(await rows(dsns[0], "SELECT FROM queen.queues")) == 6
        await change_layout(fleet, [0, 1])
    for name in names:
        assert [message["data"] for message in await api.pop(name)] == [name]
    assert len(await rows(dsns[0], "SELECT FROM queen.queues")) == 6
    new = queue_on(1, "new-")
    await api.push(new, 1)
    assert [row["name"] for row in await rows(dsns[1], "SELECT name FROM queen.queues")] == [new]


class Mortal:
    """A connection that dies, with the one beside it, before the statement at which their lives end."""

    def __init__(self, connection: Any, life: list[int], both: list[Any]) -> None:
        self._connection = connection
        self._life = life
        self._both = both
        both.append(connection)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connection, name)
        if name not in ("execute", "fetch", "fetchval", "fetchrow", "executemany", "copy_records_to_table"):
            return found

        async def run(*arguments: Any, **options: Any) -> Any:
            self._life[0] -= 1
            if self._life[0] < 0:
                for connection in self._both:
                    connection.terminate()
            return await found(*arguments, **options)

        return run


@pytest.mark.parametrize("kind", ["queue", "topic"])
async def test_a_mover_that_dies_at_any_statement_leaves_it_moved_or_not_moved(
    kind: str, api: Api, topics: TopicApi, dsns: tuple[str, str]
) -> None:
    name = Name.queue(queue_on(0)) if kind == "queue" else Name.topic("ns", topic_on(0))

    async def add(number: int) -> None:
        if kind == "queue":
            await api.push(name.key, number)
        else:
            await topics.enqueue(item(number, name.parts[1]))

    async def whole() -> list[Any]:
        if kind == "queue":
            return [message["data"] for message in await api.pop(name.key, batch=200, wait=True)]
        return values(await topics.dequeue(200, topic=name.parts[1], wait=True))

    statements, added = 0, 0
    await add(added)
    while True:
        async with connect_fleet(dsns) as fleet:
            holder, _ = await fleet.holder(name)
            fleet_to = 1 - holder
            life, both = [statements], list[Any]()
            lives: dict[int, Any] = {one: Mortal(each, life, both) for one, each in fleet.connections.items()}
            mortal = Fleet(lives, 2)
            try:
                await Mover(mortal).move(name, fleet_to)
            except Conflict:
                # PostgreSQL has yet to notice that the one before is dead.
                continue
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                died = True
            else:
                died = False
        added += 1
        await add(added)
        if not died:
            break
        statements += 4
    assert statements > 20
    assert await whole() == list(range(added + 1))
    assert [len(await rows(one, f"SELECT FROM queen.{kind}s")) for one in dsns] in ([0, 1], [1, 0])

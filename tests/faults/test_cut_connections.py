"""Connections to PostgreSQL break, stall and crawl: what was answered holds, and nothing happens twice."""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.faults.consumers import Consumer, Record, consuming
from tests.faults.load import (
    Client,
    Producer,
    answered,
    check_delivered,
    check_stored,
    pushing,
    stored_when_replayed,
)
from tests.support.ageing import broker_of, until
from tests.support.api import Api
from tests.support.consumer import acknowledgments
from tests.support.consumer import consuming as consuming_over_websocket
from tests.support.database import Connection, stored_ids, stored_messages
from tests.support.proxy import Proxy

BIG = "y" * 3000


@pytest.fixture
async def api(start_server: StartServer, proxy: Proxy) -> Api:
    """A server that reaches PostgreSQL through the proxy."""
    return await start_server(database_urls=(proxy.dsn,), db_pool_size=3)


def appends(sent: bytes) -> bool:
    """Whether bytes sent to PostgreSQL bring segments: no other statement of these tests is that long."""
    return len(sent) > len(BIG)


def random_text(chance: random.Random) -> str:
    """Text that does not become short when compressed."""
    return chance.randbytes(2 * len(BIG)).hex()


async def test_a_push_whose_commit_is_unknown_is_recognised_and_stored_once(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    chance = random.Random(1)
    await api.push("q", "first")
    for number in range(5):
        proxy.lose_answers(1, of=appends)
        results = await api.push("q", random_text(chance), ids=[f"t{number}"])
        assert proxy.lost_answers == number + 1
        assert [result["status"] for result in results] == ["queued"]
        stored = await stored_messages(connection, "q")
        assert [message.id for message in stored][-1] == results[0]["message_id"]
        assert len(stored) == number + 2


async def test_a_push_to_several_partitions_whose_commit_is_unknown_is_recognised(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    chance = random.Random(2)
    partitions = ["a", "b", "c"]
    items = [{"queue": "q", "partition": name, "payload": random_text(chance)} for name in partitions]
    for _ in range(3):
        proxy.lose_answers(2, of=appends)
        answer = await api.call("POST", "/api/v1/push", {"items": items})
        assert [result["status"] for result in answer.body] == ["queued"] * 3
    assert proxy.lost_answers >= 3
    for index, name in enumerate(partitions):
        stored = await stored_messages(connection, "q", name)
        assert len(stored) == 3
        assert stored[-1].id == answer.body[index]["message_id"]


async def test_a_push_to_a_queue_with_a_size_limit_whose_commit_is_unknown_is_recognised(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    await api.configure("q", maxSize=3)
    await api.push("q", 0, ids=["t0"])
    for number in (1, 2):
        proxy.lose_commit(f"t{number}".encode())
        results = await api.push("q", number, ids=[f"t{number}"])
        assert proxy.lost_answers == number
        assert [result["status"] for result in results] == ["queued"]
    assert await stored_ids(connection, "q") == ["t0", "t1", "t2"]


async def test_an_ack_whose_commit_is_unknown_succeeds_when_it_is_repeated(api: Api, proxy: Proxy) -> None:
    for partition in ("a", "b"):
        await api.push("q", 1, 2, 3, 4, partition=partition)
    messages = await api.pop("q", "a")
    await lose_ack(api, proxy, messages)
    assert [result["success"] for result in await api.ack(messages)] == [True]
    messages = await api.pop("q", "a", batch=3)
    await lose_ack(api, proxy, messages[:2])
    assert [result["success"] for result in await api.ack(messages[:2])] == [True, True]
    assert [result["success"] for result in await api.ack(messages[2:])] == [True]
    assert await api.pop("q", "a") == []
    assert [message["data"] for message in await api.pop("q", "b", batch=4)] == [1, 2, 3, 4]


async def test_acks_of_several_partitions_whose_commit_is_unknown_succeed_when_they_are_repeated(
    api: Api, proxy: Proxy
) -> None:
    for partition in ("a", "b"):
        await api.push("q", 1, 2, 3, partition=partition)
    messages = await api.pop("q", batch=6, partitions=2)
    assert len(messages) == 6
    await lose_ack(api, proxy, messages)
    assert [result["success"] for result in await api.ack(messages)] == [True] * 6
    assert await api.pop("q", batch=6, partitions=2) == []


async def lose_ack(api: Api, proxy: Proxy, messages: list[dict[str, Any]]) -> None:
    """Ack messages; the server does not get to know whether that was committed."""
    keys = ("transactionId", "partitionId", "leaseId")
    before = proxy.lost_answers
    lease = uuid.UUID(messages[0]["leaseId"]).bytes
    proxy.lose_answers(1, of=lambda sent: lease in sent)
    body = {"acknowledgments": [{key: message[key] for key in keys} for message in messages]}
    answer = await api.call("POST", "/api/v1/ack/batch", body)
    assert proxy.lost_answers == before + 1
    assert answer.status == 503
    assert answer.headers["Retry-After"]


async def test_a_pop_whose_answer_was_lost_is_delivered_when_its_lease_ends(api: Api, proxy: Proxy) -> None:
    await api.configure("q", leaseTime=1)
    await api.push("q", 1, 2)
    assert [message["data"] for message in await api.pop("q", autoAck=True)] == [1]
    # Of what is sent now, only the claim has the id of a lease, which begins with the minute of its making.
    minute = time.time_ns() // 1_000_000 >> 16
    begins = [(minute + later).to_bytes(4) for later in (0, 1)]
    proxy.lose_answers(1, of=lambda sent: any(begin in sent for begin in begins))
    answer = await api.call("GET", "/api/v1/pop/queue/q")
    assert answer.status == 503
    assert answer.headers["Retry-After"]
    async with asyncio.timeout(100):
        messages = await api.pop("q", wait=True, timeout=60_000)
    assert [message["data"] for message in messages] == [2]
    assert [result["success"] for result in await api.ack(messages)] == [True]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_transaction_of_unknown_outcome_happened_as_a_whole_or_not_at_all(
    api: Api, proxy: Proxy, connection: Connection, committed: bool
) -> None:
    for name in ("in", "out", "other"):
        await api.push(name, 0, ids=["t0"])
    (message,) = await api.pop("in")
    ack = {"type": "ack"} | {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    items = [{"queue": name, "transactionId": "t1", "payload": 1} for name in ("out", "other")]
    # The answer to the commit is lost, or an answer inside the transaction, which is then rolled back.
    if committed:
        proxy.lose_commit(b"t1")
    else:
        proxy.lose_answers(1, of=lambda sent: b"FOR UPDATE OF c" in sent)
    body = {"operations": [ack, {"type": "push", "items": items}]}
    answer = await api.call("POST", "/api/v1/transaction", body)
    assert proxy.lost_answers == 1
    assert answer.status == 503
    again = await api.call("POST", "/api/v1/transaction", body)
    assert again.body["success"] is not committed
    for name in ("out", "other"):
        assert await stored_ids(connection, name) == ["t0", "t1"]
    assert await api.pop("in") == []
    rows = await connection.fetch("SELECT committed, lease_id FROM queen.cursors")
    assert [tuple(row) for row in rows] == [(1, None)]
    # What the server believes of the partitions is still true.
    for name in ("out", "other"):
        assert (await api.push(name, 1, ids=["t1"]))[0]["status"] == "duplicate"
        assert (await api.push(name, 2, ids=["t2"]))[0]["status"] == "queued"
        assert await stored_ids(connection, name) == ["t0", "t1", "t2"]


async def test_parked_pops_outlive_every_cut(api: Api, proxy: Proxy) -> None:
    await api.push("q", 0)
    await api.pop("q", autoAck=True)
    parked = asyncio.create_task(api.pop("q", wait=True, timeout=60_000))
    await until(lambda: broker_of(api).popper.parked == 1)
    # Younger ones may be answered 503.
    await asyncio.sleep(0.6)
    for _ in range(3):
        async with proxy.away():
            assert (await api.call("GET", "/health")).status == 503
        assert (await api.call("GET", "/health")).status == 200
    await api.push("q", 1)
    async with asyncio.timeout(100):
        assert [message["data"] for message in await parked] == [1]


Fault = Callable[[Proxy, random.Random], Awaitable[None]]


async def cut_all(proxy: Proxy, chance: random.Random) -> None:
    proxy.cut()


async def cut_answers(proxy: Proxy, chance: random.Random) -> None:
    proxy.lose_answers(chance.randint(1, 4))


async def stall(proxy: Proxy, chance: random.Random) -> None:
    async with proxy.stalled():
        await asyncio.sleep(3)


async def stall_then_cut(proxy: Proxy, chance: random.Random) -> None:
    async with proxy.stalled():
        await asyncio.sleep(chance.random() / 2)
        proxy.cut()


async def be_away(proxy: Proxy, chance: random.Random) -> None:
    # Longer than the server tries by itself.
    async with proxy.away():
        await asyncio.sleep(2.5)


async def crawl(proxy: Proxy, chance: random.Random) -> None:
    proxy.delay = chance.random() / 50
    await asyncio.sleep(0.3)
    proxy.delay = 0.0


_SWIFT: list[Fault] = [cut_all, cut_answers, cut_answers, stall_then_cut, crawl]


async def work_while_faults_happen(
    api: Api, proxy: Proxy, connection: Connection, faults: list[Fault], seed: int, jobs: int = 150
) -> None:
    """Pushes, pops and acks go on meanwhile, and some pushes that nobody repeats."""
    chance = random.Random(seed)
    await api.configure("jobs", leaseTime=2)
    counts = {f"p{number}": jobs for number in range(8)}
    for partition in counts:
        await api.push("jobs", *range(jobs), partition=partition, ids=[f"{partition}/{n}" for n in range(jobs)])
    producers = [Producer(api.url, f"client{number}", "orders") for number in range(4)]
    gambler = Gambler(api.url)
    record = Record()
    consumers = [Consumer(api.url, "jobs", "group", record, batch=5) for _ in range(4)]
    async with consuming(consumers), pushing([*producers, gambler]):
        for fault in faults:
            await answered(producers, requests=chance.randint(1, 8))
            await fault(proxy, chance)
        await answered(producers, requests=5)
        await record.until_given(counts)
    await check_stored(connection, producers)
    await check_delivered(api.url, producers)
    await gambler.check(connection, api)


class Gambler(Producer):
    """Sends each request once, to three partitions, and leaves it at that."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "gambler", "bets")
        self.partitions = ("x", "y", "z")
        self.sent: list[tuple[set[str], bool]] = []

    async def push_once(self) -> None:
        items = self._items()
        answer = await self.attempt("POST", "/api/v1/push", {"items": items})
        self.sent.append(({item["transactionId"] for item in items}, answer is not None))
        await asyncio.sleep(0.01)

    async def check(self, connection: Connection, api: Api) -> None:
        """Each request is everywhere or nowhere, and everywhere if it was answered."""

        async def is_drained() -> bool:
            return bool((await api.call("GET", "/api/v1/status/buffers")).body["pending"] == 0)

        # What was sent last is in the spool behind all that the other producers were answered.
        await until(is_drained)
        stored = [await stored_ids(connection, self.queue, partition) for partition in self.partitions]
        assert stored[0] == stored[1] == stored[2]
        assert len(set(stored[0])) == len(stored[0])
        everything = set(stored[0])
        for ids, was_answered in self.sent:
            assert ids <= everything or (not was_answered and not ids & everything)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
async def test_work_goes_on_through_a_long_campaign_of_faults(
    api: Api, proxy: Proxy, connection: Connection, seed: int
) -> None:
    chance = random.Random(seed)
    faults = chance.choices([*_SWIFT * 5, stall, be_away], k=200)
    await work_while_faults_happen(api, proxy, connection, faults, seed, jobs=1500)


async def test_a_client_that_repeats_a_push_of_unknown_outcome_gets_the_ids_of_the_first(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    chance = random.Random(3)
    await api.push("q", "first")
    items = [{"queue": "q", "transactionId": f"t{number}", "payload": random_text(chance)} for number in range(3)]
    # More than the server tries by itself: it has to give up without knowing.
    proxy.lose_answers(1000, of=lambda sent: True)
    client = Client(api.url)
    async with asyncio.timeout(100):
        first = await client.attempt("POST", "/api/v1/push", {"items": items})
    assert first is not None
    assert {result["status"] for result in first.body} == {"buffered"}
    proxy.lose_answers(0)
    answer, _ = await client.persist("POST", "/api/v1/push", {"items": items})
    await client.close()
    stored = await stored_when_replayed(connection, "q", "Default", 4)
    assert [message.transaction_id for message in stored][1:] == ["t0", "t1", "t2"]
    for results in (first.body, answer.body):
        if results[0]["status"] != "buffered" or results is first.body:
            assert [result["message_id"] for result in results] == [message.id for message in stored[1:]]


async def test_a_subscription_outlives_an_outage_and_tells_of_it_once(api: Api, proxy: Proxy) -> None:
    await api.push("q", "here", partition="a")
    await api.push("q", "here", partition="b")
    async with consuming_over_websocket(api) as consumer:
        await consumer.subscribe("q")
        messages = await consumer.batch()
        async with proxy.away():
            refused = await consumer.ask("ack", acknowledgments=acknowledgments(messages))
            assert (refused["type"], refused["status"], refused["request"]) == ("error", 503, "ack")
            await consumer.send("credit", id="s", credit=1)
            told = await consumer.next("error")
            assert (told["id"], told["status"], told["request"]) == ("s", 503, "subscribe")
            await consumer.nothing(1.5)
        again = await consumer.batch()
        assert {message["partition"] for message in messages + again} == {"a", "b"}
        assert all(result["success"] for result in await consumer.ack(messages + again))


@pytest.mark.parametrize("known", [True, False])
async def test_a_subscription_is_notified_of_what_was_replayed_even_if_the_commit_is_unknown(
    api: Api, proxy: Proxy, known: bool
) -> None:
    await api.push("q", "before", partition="a")
    async with consuming_over_websocket(api) as consumer:
        await consumer.subscribe("q", consumerGroup="group", credit=3, subscriptionMode="new")
        async with proxy.away():
            results = [*await api.push("q", 1, partition="a"), *await api.push("q", 2, partition="new")]
            assert {result["status"] for result in results} == {"buffered"}
            if not known:
                proxy.lose_answers(1, of=lambda sent: b"COMMIT" in sent)
        given: list[int] = []
        while len(given) < 2:
            given += [message["data"] for message in await consumer.batch()]
    assert sorted(given) == [1, 2]
    assert proxy.lost_answers == (not known)


async def test_a_subscription_is_notified_of_a_push_whose_commit_was_unknown(api: Api, proxy: Proxy) -> None:
    await api.push("q", "before")
    async with consuming_over_websocket(api) as consumer:
        await consumer.subscribe("q", consumerGroup="group", subscriptionMode="new")
        proxy.lose_answers(1, of=appends)
        payload = random_text(random.Random(4))
        await api.push("q", payload)
        assert proxy.lost_answers == 1
        assert [message["data"] for message in await consumer.batch()] == [payload]


async def test_an_outage_is_logged_once_and_its_reason_is_named_once(
    api: Api, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    await api.push("q", 1)
    assert api.worker is not None
    availability = api.worker.broker.database.availability
    async with proxy.away():
        await until(lambda: availability.down)
        caplog.clear()
        answers = [await api.call("GET", path) for path in ("/api/v1/pop/queue/q", "/api/v1/resources/queues")]
        assert {answer.status for answer in answers} == {503}
        for answer in answers:
            assert re.fullmatch(r"PostgreSQL is unavailable; reconnecting \([^()]+\)", answer.body["error"])
        assert "failed" not in caplog.text

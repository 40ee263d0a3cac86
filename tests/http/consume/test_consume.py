"""Consuming over a WebSocket: delivery, credit, acks, and what happens to leases when a connection ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.api import Api, payloads
from tests.support.consumer import PATH, acknowledgments, consuming
from tests.support.database import Connection


@pytest.fixture
async def hasty(start_server: StartServer) -> Api:
    """A server with a message in a queue whose leases are short, which looks after them several times a second."""
    api = await start_server(websocket_ping_ms=100)
    await api.configure("q", leaseTime=1)
    await api.push("q", 1)
    return api


async def test_messages_come_as_they_are_pushed_in_order(api: Api) -> None:
    async with consuming(api) as consumer:
        await consumer.subscribe("q", batch=10, credit=100)
        seen: list[int] = []
        for number in range(0, 30, 3):
            await api.push("q", number, number + 1, number + 2)
            messages = await consumer.batch()
            seen += payloads(messages)
            assert all(result["success"] for result in await consumer.ack(messages))
        assert seen == list(range(30))


async def test_a_batch_is_the_answer_of_a_pop_with_two_fields_more(api: Api) -> None:
    payload = {"text": 'Grüße \u2028 \\ "', "number": 1.50, "deep": [[[{}]]]}
    await api.configure("q", leaseTime=77)
    await api.push("q", payload, ids=["t1"])
    async with consuming(api) as consumer:
        await consumer.subscribe("q", consumerGroup="socket")
        frame = await consumer.next("batch")
    popped = (await api.call("GET", "/api/v1/pop/queue/q", consumerGroup="http")).body
    assert frame.pop("type") == "batch"
    assert frame.pop("id") == "s"
    assert frame.pop("leaseSeconds") == 77
    assert frame.keys() == popped.keys()
    assert frame["messages"][0].keys() == popped["messages"][0].keys()
    for key in ("id", "transactionId", "data", "createdAt", "partitionId", "partition"):
        assert frame["messages"][0][key] == popped["messages"][0][key]


async def test_a_subscription_tells_what_it_stands_for(api: Api) -> None:
    async with consuming(api) as consumer:
        subscribed = await consumer.subscribe("q", id="orders", partition="p", batch=7, credit=3, consumerGroup="g")
    assert subscribed == {
        "type": "subscribed",
        "id": "orders",
        "queue": "q",
        "partition": "p",
        "consumerGroup": "g",
        "batch": 7,
        "partitions": 1,
        "credit": 3,
        "autoAck": False,
    }


async def test_a_group_with_conflation_gets_the_newest_message_of_each_partition(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("q", *(f"{partition}{n}" for n in range(3)), partition=partition)
    async with consuming(api) as consumer:
        subscribed = await consumer.subscribe("q", consumerGroup="g", batch=10, partitions=10, conflation=True)
        assert subscribed["conflation"] is True
        messages = await consumer.batch()
        assert sorted(payloads(messages)) == ["a2", "b2"]
        await consumer.ack(messages, consumerGroup="g")
        await consumer.send("credit", id="s", credit=1)
        await api.push("q", "a3", partition="a")
        assert payloads(await consumer.batch()) == ["a3"]


async def test_conflation_over_a_websocket_is_what_the_group_began_with(api: Api) -> None:
    await api.configure("q")
    async with consuming(api) as consumer:
        for id, wanted in (("first", True), ("second", False)):
            assert (await consumer.subscribe("q", id=id, consumerGroup="g", conflation=wanted))["conflation"] is True
        assert (await consumer.subscribe("q", id="plain", consumerGroup="h", conflation=False))["conflation"] is False
        await consumer.send("subscribe", id="x", queue="q", conflation=True)
        refused = await consumer.next("error")
        assert refused["status"] == 400 and "needs a consumerGroup" in refused["error"]
        await consumer.send("subscribe", id="y", queue="q", consumerGroup="g", conflation=True, autoAck=True)
        assert "exclude each other" in (await consumer.next("error"))["error"]


async def test_no_more_batches_come_than_there_is_credit_for(api: Api) -> None:
    for partition in range(10):
        await api.push("q", partition, partition=str(partition))
    async with consuming(api) as consumer:
        await consumer.subscribe("q", credit=2)
        first = await consumer.batch() + await consumer.batch()
        await consumer.nothing()
        await consumer.ack(first)
        await consumer.nothing()
        await consumer.send("credit", id="s", credit=3)
        second = [message for _ in range(3) for message in await consumer.batch()]
        await consumer.nothing()
        assert len({message["partition"] for message in first + second}) == 5


async def test_an_ack_brings_credit_along(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        for number in (1, 2, 3):
            messages = await consumer.batch()
            assert payloads(messages) == [number]
            await consumer.ack(messages, subscription="s", credit=1)


async def test_a_consumer_without_credit_leaves_the_messages_to_others(api: Api) -> None:
    await api.push("q", 1, partition="a")
    await api.push("q", 2, partition="b")
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        mine = payloads(await consumer.batch())
        assert payloads(await api.pop("q")) == [3 - mine[0]]


async def test_messages_consumed_at_once_need_no_ack(api: Api) -> None:
    async with consuming(api) as consumer:
        await consumer.subscribe("q", autoAck=True, batch=2, credit=10)
        await api.push("q", 1, 2, 3)
        frame = await consumer.next("batch")
        assert "leaseSeconds" not in frame
        assert payloads(frame["messages"]) == [1, 2]
        assert payloads(await consumer.batch()) == [3]
    assert await api.pop("q") == []


async def test_several_subscriptions_share_a_connection(api: Api) -> None:
    async with consuming(api) as consumer:
        for id, queue in (("one", "q1"), ("two", "q2")):
            await consumer.subscribe(queue, id=id, consumerGroup=f"group-{id}")
        await api.push("q2", "b")
        two = await consumer.batch("two")
        await api.push("q1", "a")
        one = await consumer.batch("one")
        # The group is the one that the messages were delivered to.
        assert all(result["leaseReleased"] for result in await consumer.ack(one) + await consumer.ack(two))
    assert await api.pop("q1", consumerGroup="group-one") == await api.pop("q2", consumerGroup="group-two") == []
    assert len(await api.pop("q1", consumerGroup="group-two")) == 1


async def test_one_batch_may_hold_several_partitions(api: Api) -> None:
    for partition in "abc":
        await api.push("q", partition + "1", partition + "2", partition=partition)
    async with consuming(api) as consumer:
        await consumer.subscribe("q", batch=6, partitions=3, credit=2)
        messages = await consumer.batch()
        assert sorted(payloads(messages)) == ["a1", "a2", "b1", "b2", "c1", "c2"]
        last_of_each = [message for message in messages if message["data"].endswith("2")]
        assert all(result["leaseReleased"] for result in await consumer.ack(last_of_each))
        await api.push("q", "next", partition="a")
        assert payloads(await consumer.batch()) == ["next"]


async def test_a_partition_and_a_queue_that_do_not_exist_yet_are_waited_for(api: Api) -> None:
    async with consuming(api) as consumer:
        await consumer.subscribe("q", partition="p")
        await api.push("q", "elsewhere", partition="other")
        await api.push("q", "here", partition="p")
        assert payloads(await consumer.batch()) == ["here"]


async def test_a_new_group_begins_where_its_subscription_was_answered(api: Api) -> None:
    await api.push("q", "before")
    async with consuming(api) as consumer:
        await consumer.subscribe("q", consumerGroup="g", subscriptionMode="new")
        await api.push("q", "after")
        assert payloads(await consumer.batch()) == ["after"]


async def test_a_new_group_can_begin_at_a_time(api: Api) -> None:
    await api.push("q", "old")
    await asyncio.sleep(0.05)
    moment = time.time()
    await asyncio.sleep(0.05)
    await api.push("q", "young")
    async with consuming(api) as consumer:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1e6):06d}Z"
        await consumer.subscribe("q", consumerGroup="g", subscriptionFrom=start)
        assert payloads(await consumer.batch()) == ["young"]


async def test_a_refused_message_comes_again_and_then_becomes_a_dead_letter(api: Api) -> None:
    await api.configure("q", retryLimit=1)
    await api.push("q", "bad", "good")
    async with consuming(api) as consumer:
        await consumer.subscribe("q", credit=10)
        for dlq in (False, True):
            messages = await consumer.batch()
            assert payloads(messages) == ["bad"]
            (result,) = await consumer.ack(messages, "nack", error="boom")
            assert (result["success"], result["dlq"]) == (True, dlq)
        assert payloads(await consumer.batch()) == ["good"]
    dead = (await api.call("GET", "/api/v1/dlq", queue="q")).body["messages"]
    assert [(one["data"], one["errorMessage"]) for one in dead] == [("bad", "boom")]


async def test_each_message_of_an_ack_can_have_a_status_of_its_own(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    async with consuming(api) as consumer:
        await consumer.subscribe("q", batch=3, credit=2)
        messages = await consumer.batch()
        items = acknowledgments(messages)
        for item, status in zip(items, ("completed", "retry", "completed"), strict=True):
            item["status"] = status
        answer = await consumer.ask("ack", acknowledgments=items)
        assert [result["success"] for result in answer["results"]] == [True, True, False]
        assert payloads(await consumer.batch()) == [2, 3]


async def test_one_message_can_be_acked_without_a_list(api: Api) -> None:
    await api.push("q", 1)
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        (message,) = await consumer.batch()
        (item,) = acknowledgments([message])
        answer = await consumer.ask("ack", **item, status="dlq", error="of no use")
        assert [(result["success"], result["dlq"]) for result in answer["results"]] == [(True, True)]


async def test_an_ack_gives_the_results_that_an_http_ack_gives(api: Api) -> None:
    await api.push("q", 1, ids=["t"])
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        messages = await consumer.batch()
        over_socket = await consumer.ack(messages)
        repeated = await api.ack(messages)
        assert [result | {"noop": True, "leaseReleased": False} for result in over_socket] == repeated
        stale = await consumer.ack([messages[0] | {"leaseId": "00000000-0000-7000-8000-000000000000"}])
        assert (stale[0]["success"], stale[0]["error"]) == (False, "Invalid or expired lease")


async def test_a_renewed_lease_lasts_longer(hasty: Api) -> None:
    async with consuming(hasty) as consumer:
        await consumer.subscribe("q")
        (message,) = await consumer.batch()
        answer = await consumer.ask("renew", leaseId=message["leaseId"], seconds=30)
        assert answer["type"] == "renewed"
        assert answer["leaseId"] == message["leaseId"]
        await consumer.nothing(1.3)
        assert (await consumer.ack([message]))[0]["success"]
        refused = await consumer.ask("renew", leaseId=message["leaseId"])
        assert (refused["type"], refused["status"], refused["error"]) == ("error", 404, "Lease not found")


async def test_an_expired_lease_is_reported_and_the_message_redelivered(hasty: Api) -> None:
    async with consuming(hasty) as consumer:
        await consumer.subscribe("q", credit=2)
        first = await consumer.batch()
        frames = {frame["type"]: frame for frame in [await consumer.next(), await consumer.next()]}
        assert frames["lost"] == {"type": "lost", "id": "s", "leaseId": first[0]["leaseId"]}
        assert payloads(frames["batch"]["messages"]) == [1]
        assert not (await consumer.ack(first))[0]["success"]
        assert (await consumer.ack(frames["batch"]["messages"]))[0]["success"]


async def test_a_consumer_whose_sweep_fails_does_not_affect_the_others(
    hasty: Api, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    assert hasty.worker is not None
    async with consuming(hasty) as broken, consuming(hasty) as consumer:
        await broken.ask("ping")
        (session,) = list(hasty.worker.consumers._sessions.values())[:1]
        session.keep_time = fail  # type: ignore[method-assign]
        await consumer.subscribe("q")
        (message,) = await consumer.batch()
        assert (await consumer.next("lost"))["leaseId"] == message["leaseId"]
    assert "sweep of a WebSocket consumer failed" in caplog.text


async def test_no_expiry_is_reported_for_a_lease_acked_without_its_id(hasty: Api) -> None:
    async with consuming(hasty) as consumer:
        await consumer.subscribe("q")
        (message,) = await consumer.batch()
        answer = await consumer.ask("ack", **{key: message[key] for key in ("transactionId", "partitionId")})
        assert answer["results"][0]["leaseReleased"]
        await consumer.nothing(1.3)


async def test_after_unsubscribing_nothing_comes_and_what_came_can_be_acked(api: Api) -> None:
    await api.push("q", 1, partition="a")
    async with consuming(api) as consumer:
        await consumer.subscribe("q", credit=10)
        messages = await consumer.batch()
        await consumer.send("unsubscribe", id="s")
        assert await consumer.next() == {"type": "unsubscribed", "id": "s"}
        await api.push("q", 2, partition="b")
        await consumer.nothing()
        assert payloads(await api.pop("q")) == [2]
        assert (await consumer.ack(messages))[0]["success"]
        # The id is free again.
        await consumer.subscribe("q")


async def test_unsubscribing_can_release_what_was_not_acked(api: Api) -> None:
    await api.push("q", 1)
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        await consumer.batch()
        await consumer.send("unsubscribe", id="s", release=True)
        await consumer.next("unsubscribed")
        assert payloads(await api.pop("q")) == [1]


async def test_a_client_can_ask_whether_the_server_is_there(api: Api) -> None:
    async with consuming(api) as consumer:
        assert await consumer.ask("ping") == {"type": "pong", "id": 1}
        await consumer.socket.ping()
        await consumer.subscribe("q")


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_closed_connection_gives_its_messages_to_others_at_once_and_costs_no_retry(
    start_server: StartServer, connection: Connection, workers: int
) -> None:
    servers = [
        await start_server(worker_id=id, num_workers=workers, pop_safety_poll_ms=60_000) for id in range(workers)
    ]
    here, there = servers[0], servers[-1]
    for partition in "ab":
        await here.push("q", 1, 2, 3, partition=partition)
    waiting: asyncio.Task[Any]
    async with consuming(here) as consumer:
        await consumer.subscribe("q", batch=6, partitions=2)
        messages = await consumer.batch()
        assert len(messages) == 6
        await consumer.ack(messages[:1])
        waiting = asyncio.create_task(there.pop("q", batch=6, partitions=2, wait=True, timeout=20_000))
        await asyncio.sleep(0.1)
    again = await waiting
    # Redelivery starts right after the last ack.
    partition = messages[0]["partition"]
    again += await there.pop("q", batch=6)
    assert payloads([message for message in again if message["partition"] == partition]) == [2, 3]
    assert payloads([message for message in again if message["partition"] != partition]) == [1, 2, 3]
    assert await connection.fetchval("SELECT max(attempts) FROM queen.cursors") == 0


async def test_an_ack_sent_just_before_the_close_counts(api: Api) -> None:
    for round in range(20):
        await api.push("q", round)
        async with consuming(api) as consumer:
            await consumer.subscribe("q")
            messages = await consumer.batch()
            assert payloads(messages) == [round]
            await consumer.send("ack", acknowledgments=acknowledgments(messages))
    assert await api.pop("q") == []


async def test_messages_that_were_being_fetched_for_a_connection_that_closes_are_not_lost(api: Api) -> None:
    expected = list(range(60))
    seen: list[int] = []
    for number in expected:
        async with consuming(api) as consumer:
            await consumer.subscribe("q", credit=4)
            await asyncio.gather(api.push("q", number), consumer.socket.close())
    # What the last connections had leased is released soon after they have closed.
    while len(seen) < len(expected) and (messages := await api.pop("q", batch=100, wait=True, timeout=20_000)):
        seen += payloads(messages)
        await api.ack(messages)
    assert seen == expected
    assert await api.pop("q") == []


_CLIENT = """
import asyncio, sys, aiohttp
async def main():
    async with aiohttp.ClientSession() as session, session.ws_connect(sys.argv[1]) as socket:
        await socket.send_json({"type": "subscribe", "id": "s", "queue": "q", "batch": 10})
        while (await socket.receive_json())["type"] != "batch":
            pass
        print("got it", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_killed_consumer_gives_its_messages_to_others_at_once(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, api.url + PATH, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"got it\n"
    assert await api.pop("q") == []
    waiting = asyncio.create_task(api.pop("q", batch=10, wait=True, timeout=20_000))
    os.kill(client.pid, signal.SIGKILL)
    assert payloads(await waiting) == [1, 2, 3]
    await client.wait()


async def test_consumers_of_two_workers_share_a_queue_and_miss_nothing(start_server: StartServer) -> None:
    servers = [await start_server(worker_id=id, num_workers=2) for id in range(2)]
    partitions, each = 20, 10
    seen: dict[str, list[int]] = {str(partition): [] for partition in range(partitions)}
    left = asyncio.Semaphore(0)

    async def consume(api: Api) -> None:
        async with consuming(api) as consumer:
            await consumer.subscribe("q", batch=3, credit=5)
            while True:
                frame = await consumer.next()
                if frame["type"] != "batch":
                    continue
                for message in frame["messages"]:
                    seen[message["partition"]].append(message["data"])
                    left.release()
                await consumer.send(
                    "ack", acknowledgments=acknowledgments(frame["messages"]), subscription="s", credit=1
                )

    tasks = [asyncio.create_task(consume(api)) for api in servers * 2]
    for number in range(each):
        await asyncio.gather(
            *(servers[partition % 2].push("q", number, partition=str(partition)) for partition in range(partitions))
        )
    async with asyncio.timeout(100):
        for _ in range(partitions * each):
            await left.acquire()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(numbers == list(range(each)) for numbers in seen.values())


async def test_a_server_that_stops_lets_consumers_ack_and_closes_with_1001(start_server: StartServer) -> None:
    api = await start_server(websocket_drain_ms=10_000)
    assert api.worker is not None
    await api.push("q", 1, 2)
    async with consuming(api) as busy, consuming(api) as idle:
        await idle.subscribe("other")
        await busy.subscribe("q", credit=5)
        messages = await busy.batch()
        stopping = asyncio.create_task(api.worker.stop())
        assert (await busy.next("closing"))["seconds"] == 10
        assert (await idle.next("closing"))["reason"] == "the server is shutting down"
        assert await idle.closed() == 1001
        assert not stopping.done()
        assert (await busy.ack(messages))[0]["success"]
        assert await busy.closed() == 1001
        async with asyncio.timeout(100):
            await stopping


async def test_a_server_that_stops_releases_what_is_not_acked_in_time(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(websocket_drain_ms=100)
    assert api.worker is not None
    await api.push("q", 1)
    async with consuming(api) as consumer:
        await consumer.subscribe("q")
        await consumer.batch()
        async with asyncio.timeout(100):
            stopping = asyncio.create_task(api.worker.stop())
            assert await consumer.closed() == 1001
            await stopping
    assert await connection.fetchval("SELECT count(*) FROM queen.cursors WHERE lease_id IS NOT NULL") == 0
    other = await start_server()
    assert payloads(await other.pop("q")) == [1]

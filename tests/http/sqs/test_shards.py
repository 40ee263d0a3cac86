"""SQS on several shards, and after a crash."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from queen.embedded import EmbeddedPostgres
from tests.conftest import StartServer
from tests.http.sqs.conftest import Client, attribute, bodies, delete, receive, sqs_client
from tests.support.ageing import until
from tests.support.databases import fresh_database
from tests.support.host import host


async def test_queues_of_both_kinds_live_on_any_shard(
    start_server: StartServer, postgres: EmbeddedPostgres, dsn: str
) -> None:
    async with fresh_database(postgres, used=False) as second:
        api = await start_server(database_urls=(dsn, second), queen_sqs=True)
        await asyncio.to_thread(_use_queues, sqs_client(api.url))
        assert api.worker is not None
        counted = []
        for broker in api.worker.brokers:
            topics = await broker.topics.admin.counts("sqs", None)
            queues = await broker.database.fetch("queue_ids", "", "sqs", "")
            counted.append((len(topics), len(queues)))
        (a, b), (c, d) = counted
        assert (a + c, b + d) == (8, 6)
        assert a and c and b and d, "all queues are on one shard"


def _use_queues(sqs: Client) -> None:
    for n in range(4):
        dead = sqs.create_queue(QueueName=f"dead-{n}")["QueueUrl"]
        policy = json.dumps({"deadLetterTargetArn": attribute(sqs, dead, "QueueArn"), "maxReceiveCount": 1})
        url = sqs.create_queue(QueueName=f"standard-{n}", Attributes={"RedrivePolicy": policy})["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="x")
        (message,) = receive(sqs, url)
        assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "1"
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
        assert receive(sqs, url, wait=0) == []
        (message,) = receive(sqs, dead)
        sqs.delete_message(QueueUrl=dead, ReceiptHandle=message["ReceiptHandle"])
    fifo = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    for n in range(6):
        url = sqs.create_queue(QueueName=f"groups-{n}.fifo", Attributes=fifo)["QueueUrl"]
        for body in "abc":
            sqs.send_message(QueueUrl=url, MessageBody=body, MessageGroupId="g")
        messages = receive(sqs, url, VisibilityTimeout=60)
        assert bodies(messages) == ["a", "b", "c"]
        delete(sqs, url, [messages[1]])
        for message in (messages[0], messages[2]):
            sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
        messages = receive(sqs, url)
        assert bodies(messages) == ["a", "c"]
        delete(sqs, url, messages)
        assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"


async def test_kill_9_between_send_and_receive_loses_nothing(dsn: str, tmp_path: Path) -> None:
    with host(dsn, tmp_path / "host", QUEEN_SQS="true") as one:
        one.workers = 1
        one.start()
        await one.ready()
        urls = await asyncio.to_thread(_send, sqs_client(one.url))
        one.kill()
        one.start()
        await one.ready()
        await asyncio.to_thread(_receive, sqs_client(one.url), urls)


def _send(sqs: Client) -> list[str]:
    standard = sqs.create_queue(QueueName="kept")["QueueUrl"]
    attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "VisibilityTimeout": "600"}
    fifo = sqs.create_queue(QueueName="kept.fifo", Attributes=attributes)["QueueUrl"]
    for n in range(20):
        sqs.send_message(QueueUrl=standard, MessageBody=str(n))
        sqs.send_message(QueueUrl=fifo, MessageBody=str(n), MessageGroupId=str(n % 2))
    # Deleted out of order, so the group is at its beginning.
    (_, second) = receive(sqs, fifo, limit=2)
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=second["ReceiptHandle"])
    return [standard, fifo]


def _receive(sqs: Client, urls: list[str]) -> None:
    standard, fifo = urls
    seen: set[str] = set()
    while len(seen) < 20:
        messages = receive(sqs, standard)
        assert messages
        seen |= set(bodies(messages))
    # The group that was not received before, and none of the other: it is in flight.
    messages = receive(sqs, fifo)
    assert len({int(body) % 2 for body in bodies(messages)}) == 1
    assert [int(body) for body in bodies(messages)] == sorted(int(body) for body in bodies(messages))
    assert len(messages) == 10
    # A send that is repeated after the crash is a duplicate.
    sqs.send_message(QueueUrl=fifo, MessageBody="3", MessageGroupId="1")
    assert attribute(sqs, fifo, "ApproximateNumberOfMessages") == "8"


async def test_a_standard_queue_is_served_out_of_its_prefetch_buffer(start_server: StartServer) -> None:
    api = await start_server(queen_sqs=True, topic_ready_queues="on")
    sqs = sqs_client(api.url)
    url = await asyncio.to_thread(_send_with_attributes, sqs)
    assert api.worker is not None
    topics = api.worker.broker.topics
    topic = await topics.catalog.one(("sqs", "hot"))
    assert topic is not None
    buffers = topics.prefetch
    assert buffers is not None

    async def opened() -> bool:
        return topic.id in buffers.by_topic or await buffers.open(topic)

    await until(opened)
    await buffers.fill(buffers.by_topic[topic.id])
    assert buffers.by_topic[topic.id].depth == 10
    await asyncio.to_thread(_receive_with_attributes, sqs, url)


_GIVEN = {"n": {"DataType": "Number", "StringValue": "1"}}


def _send_with_attributes(sqs: Client) -> str:
    url: str = sqs.create_queue(QueueName="hot")["QueueUrl"]
    entries = [{"Id": str(n), "MessageBody": f"ä{n}", "MessageAttributes": _GIVEN} for n in range(10)]
    sqs.send_message_batch(QueueUrl=url, Entries=entries)
    return url


def _receive_with_attributes(sqs: Client, url: str) -> None:
    messages = receive(sqs, url)
    assert bodies(messages) == [f"ä{n}" for n in range(10)]
    assert all(message["MessageAttributes"] == _GIVEN for message in messages)
    first = {"QueueUrl": url, "ReceiptHandle": messages[0]["ReceiptHandle"]}
    sqs.change_message_visibility(VisibilityTimeout=0, **first)
    delete(sqs, url, messages[1:])
    (again,) = receive(sqs, url)
    assert (again["Body"], again["Attributes"]["ApproximateReceiveCount"]) == ("ä0", "2")

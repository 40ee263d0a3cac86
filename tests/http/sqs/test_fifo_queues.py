"""FIFO queues: groups in order, deduplication, and messages that are deleted in another order than they came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from tests.http.sqs.conftest import Client, attribute, bodies, delete, receive
from tests.http.sqs.test_standard_queues import code_of

MakeQueue = Callable[..., str]


def send(sqs: Client, url: str, body: str, group: str = "g", **options: Any) -> Any:
    return sqs.send_message(QueueUrl=url, MessageBody=body, MessageGroupId=group, **options)


@pytest.fixture
def url(make_queue: MakeQueue) -> str:
    return make_queue(fifo=True, ContentBasedDeduplication="true", VisibilityTimeout="600")


def hide(sqs: Client, url: str, message: Any, seconds: int) -> None:
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds)


def test_a_group_is_in_order_and_blocked_while_messages_are_in_flight(sqs: Client, url: str) -> None:
    numbers = [int(send(sqs, url, str(n))["SequenceNumber"]) for n in range(4)]
    assert numbers == sorted(set(numbers))
    first = receive(sqs, url, limit=2)
    assert bodies(first) == ["0", "1"]
    assert first[0]["Attributes"]["MessageGroupId"] == "g"
    assert int(first[0]["Attributes"]["SequenceNumber"]) == numbers[0]
    assert receive(sqs, url, wait=0) == []
    send(sqs, url, "another group", "h")
    assert bodies(receive(sqs, url)) == ["another group"]
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "3"
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "2"
    delete(sqs, url, first)
    assert bodies(receive(sqs, url)) == ["2", "3"]


def test_a_message_that_is_deleted_before_an_earlier_one_takes_nothing_with_it(sqs: Client, url: str) -> None:
    for n in range(3):
        send(sqs, url, str(n))
    first = receive(sqs, url)
    delete(sqs, url, [first[1]])
    hide(sqs, url, first[0], 0)
    assert receive(sqs, url, wait=0) == [], "the third is in flight"
    hide(sqs, url, first[2], 0)
    again = receive(sqs, url)
    assert [(one["Body"], one["Attributes"]["ApproximateReceiveCount"]) for one in again] == [("0", "2"), ("2", "2")]
    assert code_of(lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"])) == (
        "InvalidParameterValue"
    )
    delete(sqs, url, [again[1]])
    delete(sqs, url, [again[0]])
    # What is deleted may be deleted again.
    delete(sqs, url, again)
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"
    send(sqs, url, "next")
    assert bodies(receive(sqs, url)) == ["next"]


def test_leases_that_are_deleted_whole_leave_nothing_behind(sqs: Client, sqs_dsn: str, make_queue: MakeQueue) -> None:
    url = make_queue(fifo=True, ContentBasedDeduplication="true", VisibilityTimeout="600")
    entries = [{"Id": str(n), "MessageBody": str(n), "MessageGroupId": f"g{n % 3}"} for n in range(9)]
    sqs.send_message_batch(QueueUrl=url, Entries=entries)
    received: list[Any] = []
    while len(received) < 9:
        received += receive(sqs, url)
    # Two groups whole and in another order than they came, of the third the last message alone, then the others.
    of_group = {f"g{n}": [one for one in received if int(one["Body"]) % 3 == n] for n in range(3)}
    assert [bodies(of_group[f"g{n}"]) for n in range(3)] == [[str(n + k) for k in (0, 3, 6)] for n in range(3)]
    delete(sqs, url, [*of_group["g1"], *reversed(of_group["g0"]), of_group["g2"][2]])
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "2"
    delete(sqs, url, [*of_group["g2"][:2], of_group["g0"][1]])
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"
    for n in range(3):
        send(sqs, url, f"next {n}", f"g{n}")
    later: list[Any] = []
    while len(later) < 3:
        later += receive(sqs, url)
    assert sorted(bodies(later)) == ["next 0", "next 1", "next 2"]
    delete(sqs, url, later)
    assert asyncio.run(_known_deliveries(sqs_dsn, url)) == 0


async def _known_deliveries(dsn: str, url: str) -> int:
    connection = await asyncpg.connect(dsn)
    count: int = await connection.fetchval(
        "SELECT count(*) FROM queen.sqs_deliveries d JOIN queen.sqs_queues q ON q.id = d.queue_id WHERE q.name = $1",
        url.rpartition("/")[2],
    )
    await connection.close()
    return count


def test_a_receive_that_is_tried_again_gets_the_same_messages(sqs: Client, url: str) -> None:
    for n in range(3):
        send(sqs, url, str(n))
    first = receive(sqs, url, limit=2, ReceiveRequestAttemptId="try")
    again = receive(sqs, url, limit=2, ReceiveRequestAttemptId="try")
    assert again == first and bodies(first) == ["0", "1"]
    assert receive(sqs, url, wait=0, ReceiveRequestAttemptId="another") == []
    delete(sqs, url, first)
    # What has changed since is not repeated.
    assert bodies(receive(sqs, url, ReceiveRequestAttemptId="try")) == ["2"]
    assert code_of(lambda: receive(sqs, url, ReceiveRequestAttemptId="a b")) == "InvalidParameterValue"


def test_visibility_is_shortened_and_prolonged(sqs: Client, url: str) -> None:
    send(sqs, url, "x")
    (message,) = receive(sqs, url, VisibilityTimeout=1)
    (message,) = receive(sqs, url)
    hide(sqs, url, message, 1200)
    hide(sqs, url, message, 1)
    (message,) = receive(sqs, url, VisibilityTimeout=0)
    (message,) = receive(sqs, url)
    assert message["Attributes"]["ApproximateReceiveCount"] == "4"
    with pytest.raises(sqs.exceptions.ReceiptHandleIsInvalid):
        hide(sqs, url, message | {"ReceiptHandle": "nonsense"}, 1)


def test_one_deduplication_id_is_one_message_of_the_queue_for_five_minutes(
    sqs: Client, sqs_dsn: str, make_queue: MakeQueue
) -> None:
    url = make_queue(fifo=True)
    first = send(sqs, url, "a", MessageDeduplicationId="id")
    again = send(sqs, url, "b", MessageDeduplicationId="id")
    other = send(sqs, url, "c", "another-group", MessageDeduplicationId="id")
    assert first["MessageId"] == again["MessageId"] == other["MessageId"]
    assert first["SequenceNumber"] == other["SequenceNumber"]
    batch = [{"Id": n, "MessageBody": n, "MessageGroupId": "g", "MessageDeduplicationId": "twin"} for n in "12"]
    answer = sqs.send_message_batch(QueueUrl=url, Entries=batch)
    assert len({one["MessageId"] for one in answer["Successful"]}) == 1
    assert bodies(receive(sqs, url)) == ["a", "1"]
    asyncio.run(_age_deduplication_ids(sqs_dsn))
    send(sqs, url, "d", "later", MessageDeduplicationId="id")
    assert bodies(receive(sqs, url)) == ["d"]


async def _age_deduplication_ids(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE queen.sqs_deduplication SET created_at = created_at - interval '301 seconds'")
    await connection.close()


def test_deduplication_may_be_of_the_group_or_of_the_content(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(
        fifo=True,
        ContentBasedDeduplication="true",
        DeduplicationScope="messageGroup",
        FifoThroughputLimit="perMessageGroupId",
    )
    assert send(sqs, url, "x", "a")["MessageId"] == send(sqs, url, "x", "a")["MessageId"]
    send(sqs, url, "x", "b")
    assert bodies(receive(sqs, url)) == ["x", "x"]


def test_dead_letters_of_a_group_go_to_a_fifo_queue_in_order(sqs: Client, make_queue: MakeQueue) -> None:
    dead = make_queue(fifo=True)
    policy = json.dumps({"deadLetterTargetArn": attribute(sqs, dead, "QueueArn"), "maxReceiveCount": 1})
    url = make_queue(fifo=True, ContentBasedDeduplication="true", RedrivePolicy=policy)
    sent = [send(sqs, url, body)["MessageId"] for body in ("poison", "more poison")]
    assert len(receive(sqs, url, VisibilityTimeout=0)) == 2
    send(sqs, url, "good")
    assert bodies(receive(sqs, url)) == ["good"]
    moved = receive(sqs, dead)
    assert [one["MessageId"] for one in moved] == sent
    assert moved[0]["Attributes"]["MessageGroupId"] == "g"
    assert moved[0]["Attributes"]["DeadLetterQueueSourceArn"] == attribute(sqs, url, "QueueArn")
    standard = {"RedrivePolicy": policy}
    assert code_of(lambda: sqs.create_queue(QueueName="mixed", Attributes=standard)) == "InvalidParameterValue"


def test_messages_that_are_visible_at_once_go_to_the_dead_letter_queue_too(sqs: Client, make_queue: MakeQueue) -> None:
    dead = make_queue(fifo=True)
    policy = json.dumps({"deadLetterTargetArn": attribute(sqs, dead, "QueueArn"), "maxReceiveCount": 1})
    url = make_queue(fifo=True, VisibilityTimeout="0", ContentBasedDeduplication="true", RedrivePolicy=policy)
    for number in range(4):
        sqs.send_message(QueueUrl=url, MessageBody=f"m{number}", MessageGroupId=f"g{number % 2}")
    assert sorted(bodies(receive(sqs, url))) == ["m0", "m1", "m2", "m3"]
    assert receive(sqs, url, wait=0) == []
    assert sorted(bodies(receive(sqs, dead))) == ["m0", "m1", "m2", "m3"]
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"


def test_many_groups_are_received_each_in_order(sqs: Client, url: str) -> None:
    for start in range(0, 100, 10):
        entries = [
            {"Id": str(n), "MessageBody": f"{n % 20}:{n // 20}", "MessageGroupId": f"group-{n % 20}"}
            for n in range(start, start + 10)
        ]
        assert len(sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == 10
    seen: dict[str, list[str]] = {}
    while sum(map(len, seen.values())) < 100:
        messages = receive(sqs, url)
        for message in messages:
            group, _, number = message["Body"].partition(":")
            seen.setdefault(group, []).append(number)
        delete(sqs, url, messages)
    assert seen == {str(group): ["0", "1", "2", "3", "4"] for group in range(20)}


def test_a_purged_queue_serves_its_groups_at_once(sqs: Client, url: str) -> None:
    send(sqs, url, "old")
    receive(sqs, url)
    sqs.purge_queue(QueueUrl=url)
    send(sqs, url, "new")
    assert bodies(receive(sqs, url)) == ["new"]


def test_what_fifo_queues_do_not_take_is_refused(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(fifo=True)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: sqs.send_message(QueueUrl=url, MessageBody="x", MessageDeduplicationId="1"), "MissingParameter"),
        (lambda: send(sqs, url, "x"), "InvalidParameterValue"),
        (lambda: send(sqs, url, "x", MessageDeduplicationId="1", DelaySeconds=1), "InvalidParameterValue"),
        (lambda: send(sqs, url, "x", "a b", MessageDeduplicationId="1"), "InvalidParameterValue"),
        (lambda: sqs.create_queue(QueueName="x.fifo"), "InvalidParameterValue"),
        (
            lambda: sqs.set_queue_attributes(QueueUrl=url, Attributes={"FifoThroughputLimit": "perMessageGroupId"}),
            "InvalidAttributeValue",
        ),
    ]
    assert [code_of(call) for call, _ in refused] == [code for _, code in refused]


def test_a_delayed_queue_keeps_its_messages_for_a_while(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(fifo=True, ContentBasedDeduplication="true", DelaySeconds="1")
    send(sqs, url, "x")
    assert receive(sqs, url, wait=0) == []
    assert bodies(receive(sqs, url)) == ["x"]

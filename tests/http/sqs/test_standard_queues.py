"""Standard queues, as boto3 uses them. It verifies the checksums of what it sends and receives by itself."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.acceptance.served import Served
from tests.http.sqs.conftest import Client, attribute, bodies, delete, receive, sqs_client
from tests.support.ageing import block_until

MakeQueue = Callable[..., str]


def code_of(call: Callable[[], Any]) -> str:
    """The error code of a call that is refused."""
    with pytest.raises(ClientError) as caught:
        call()
    code: str = caught.value.response["Error"]["Code"]
    return code


def test_a_message_comes_back_with_its_attributes_and_is_gone_once_deleted(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue()
    attributes = {
        "text": {"DataType": "String", "StringValue": "ä\r\n<&>"},
        "number": {"DataType": "Number.int", "StringValue": "12"},
        "bytes": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
    }
    sent = sqs.send_message(
        QueueUrl=url,
        MessageBody='{"order": "ü\t\n"}',
        MessageAttributes=attributes,
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988"}},
    )
    (message,) = receive(sqs, url)
    assert message["Body"] == '{"order": "ü\t\n"}'
    assert message["MessageId"] == sent["MessageId"]
    assert message["MessageAttributes"] == attributes
    system = message["Attributes"]
    assert system["ApproximateReceiveCount"] == "1"
    assert system["AWSTraceHeader"] == "Root=1-5759e988"
    assert 0 <= int(system["ApproximateFirstReceiveTimestamp"]) - int(system["SentTimestamp"]) < 60_000
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"


def test_attributes_are_chosen_by_name_and_prefix(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue()
    names = ("order.id", "order.kind", "tenant")
    given = {name: {"DataType": "String", "StringValue": name} for name in names}
    sqs.send_message(QueueUrl=url, MessageBody="x", MessageAttributes=given)
    for chosen, expected in ((["order.*"], {"order.id", "order.kind"}), (["tenant"], {"tenant"}), ([], set())):
        answer = sqs.receive_message(QueueUrl=url, MessageAttributeNames=chosen, VisibilityTimeout=0, WaitTimeSeconds=5)
        assert set(answer["Messages"][0].get("MessageAttributes", {})) == expected


def test_a_waiting_receive_is_woken_by_a_send(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(ReceiveMessageWaitTimeSeconds="20")
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend(sqs.receive_message(QueueUrl=url)["Messages"]))
    waiting.start()
    sqs.send_message(QueueUrl=url, MessageBody="wake up")
    waiting.join(15)
    assert bodies(got) == ["wake up"]


def test_a_received_message_is_hidden_until_its_visibility_timeout_is_over(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(VisibilityTimeout="600")
    sqs.send_message(QueueUrl=url, MessageBody="x")
    (first,) = receive(sqs, url)
    assert receive(sqs, url, wait=0) == []
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "1"
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=0)
    (second,) = receive(sqs, url)
    assert second["Attributes"]["ApproximateReceiveCount"] == "2"
    assert second["Attributes"]["SentTimestamp"] == first["Attributes"]["SentTimestamp"]
    change = {"QueueUrl": url, "ReceiptHandle": first["ReceiptHandle"], "VisibilityTimeout": 5}
    assert code_of(lambda: sqs.change_message_visibility(**change)).endswith("MessageNotInflight")
    # The handle of an earlier receive deletes nothing, and says nothing.
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "1"
    # A short timeout in the place of a long one.
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=1)
    (third,) = receive(sqs, url)
    assert third["Attributes"]["ApproximateReceiveCount"] == "3"


def test_delays_of_queues_and_messages(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(DelaySeconds="900")
    sqs.send_message(QueueUrl=url, MessageBody="later")
    sqs.send_message(QueueUrl=url, MessageBody="now", DelaySeconds=0)
    assert bodies(receive(sqs, url)) == ["now"]
    assert attribute(sqs, url, "ApproximateNumberOfMessagesDelayed") == "1"
    sqs.send_message(QueueUrl=url, MessageBody="soon", DelaySeconds=1)
    assert bodies(receive(sqs, url)) == ["soon"]


def test_batches_answer_for_each_entry(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue()
    entries = [{"Id": f"n-{n}", "MessageBody": str(n)} for n in range(9)]
    entries.append({"Id": "bad", "MessageBody": "\x01"})
    answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == [f"n-{n}" for n in range(9)]
    ((failed),) = answer["Failed"]
    assert (failed["Id"], failed["Code"], failed["SenderFault"]) == ("bad", "InvalidMessageContents", True)
    received: list[Any] = []
    while len(received) < 9:
        received += receive(sqs, url)
    assert sorted(bodies(received)) == [str(n) for n in range(9)]
    changes = [
        {"Id": str(n), "ReceiptHandle": one["ReceiptHandle"], "VisibilityTimeout": 60} for n, one in enumerate(received)
    ]
    changes.append({"Id": "nonsense", "ReceiptHandle": "nonsense", "VisibilityTimeout": 60})
    answer = sqs.change_message_visibility_batch(QueueUrl=url, Entries=changes)
    assert (len(answer["Successful"]), answer["Failed"][0]["Code"]) == (9, "ReceiptHandleIsInvalid")
    delete(sqs, url, received)
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"


def test_what_is_received_too_often_goes_to_the_dead_letter_queue_and_can_be_moved_back(
    sqs: Client, make_queue: MakeQueue
) -> None:
    dead = make_queue()
    arn = attribute(sqs, dead, "QueueArn")
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "2"})
    url = make_queue(RedrivePolicy=policy)
    assert json.loads(attribute(sqs, url, "RedrivePolicy")) == {"deadLetterTargetArn": arn, "maxReceiveCount": 2}
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [url]
    given = {"kind": {"DataType": "String", "StringValue": "poison"}}
    sent = sqs.send_message(QueueUrl=url, MessageBody="poison", MessageAttributes=given)
    for _ in range(2):
        assert bodies(receive(sqs, url, VisibilityTimeout=0)) == ["poison"]
    assert receive(sqs, url, wait=0) == []
    (message,) = receive(sqs, dead, VisibilityTimeout=0)
    assert (message["MessageId"], message["MessageAttributes"]) == (sent["MessageId"], given)
    assert message["Attributes"]["DeadLetterQueueSourceArn"] == attribute(sqs, url, "QueueArn")
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"
    sqs.start_message_move_task(SourceArn=arn)

    def task() -> Any:
        (one,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        return one

    block_until(lambda: task()["Status"] == "COMPLETED", "the task has moved the message")
    assert task()["ApproximateNumberOfMessagesMoved"] == 1
    (back,) = receive(sqs, url)
    assert (back["MessageId"], back["Body"]) == (sent["MessageId"], "poison")
    assert code_of(lambda: sqs.start_message_move_task(SourceArn=attribute(sqs, url, "QueueArn"))) == (
        "InvalidParameterValue"
    )
    assert code_of(lambda: sqs.cancel_message_move_task(TaskHandle="x")) == "ResourceNotFoundException"


def test_a_task_that_moves_messages_is_cancelled(sqs: Client, make_queue: MakeQueue) -> None:
    dead, other = make_queue(), make_queue()
    arn, destination = attribute(sqs, dead, "QueueArn"), attribute(sqs, other, "QueueArn")
    make_queue(RedrivePolicy=json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1}))
    for n in range(3):
        sqs.send_message(QueueUrl=dead, MessageBody=str(n))
    assert code_of(lambda: sqs.start_message_move_task(SourceArn=arn, DestinationArn=arn)) == "InvalidParameterValue"
    rate = {"MaxNumberOfMessagesPerSecond": 1}
    handle = sqs.start_message_move_task(SourceArn=arn, DestinationArn=destination, **rate)["TaskHandle"]
    assert code_of(lambda: sqs.start_message_move_task(SourceArn=arn)) == "InvalidParameterValue"
    sqs.cancel_message_move_task(TaskHandle=handle)
    assert code_of(lambda: sqs.cancel_message_move_task(TaskHandle=handle)) == "ResourceNotFoundException"

    def task() -> Any:
        (one,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        return one

    block_until(lambda: task()["Status"] == "CANCELLED", "the task has ended")
    left = int(attribute(sqs, dead, "ApproximateNumberOfMessages"))
    assert left == 3 - task()["ApproximateNumberOfMessagesMoved"] > 0
    assert task()["DestinationArn"] == destination and "TaskHandle" not in task()


def test_purging_takes_everything_once_a_minute(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue()
    for body in ("visible", "hidden"):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    receive(sqs, url, limit=1)
    sqs.purge_queue(QueueUrl=url)
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"
    assert code_of(lambda: sqs.purge_queue(QueueUrl=url)).endswith("PurgeQueueInProgress")


def test_queues_are_created_once_listed_tagged_and_deleted(sqs: Client) -> None:
    names = [f"list-{n}" for n in range(3)]
    urls = [sqs.create_queue(QueueName=name, Attributes={"DelaySeconds": "1"})["QueueUrl"] for name in names]
    assert sqs.create_queue(QueueName="list-0", Attributes={"DelaySeconds": "1"})["QueueUrl"] == urls[0]
    assert sqs.create_queue(QueueName="list-0")["QueueUrl"] == urls[0]
    assert code_of(lambda: sqs.create_queue(QueueName="list-0", Attributes={"DelaySeconds": "2"})) == (
        "QueueAlreadyExists"
    )
    pages = sqs.get_paginator("list_queues").paginate(QueueNamePrefix="list-", PaginationConfig={"PageSize": 2})
    assert [page["QueueUrls"] for page in pages] == [urls[:2], urls[2:]]
    assert sqs.get_queue_url(QueueName="list-1")["QueueUrl"] == urls[1]
    sqs.tag_queue(QueueUrl=urls[0], Tags={"team": "mail", "cost": "7"})
    sqs.untag_queue(QueueUrl=urls[0], TagKeys=["cost"])
    assert sqs.list_queue_tags(QueueUrl=urls[0])["Tags"] == {"team": "mail"}
    sqs.set_queue_attributes(QueueUrl=urls[0], Attributes={"VisibilityTimeout": "7", "DelaySeconds": "0"})
    shown = sqs.get_queue_attributes(QueueUrl=urls[0], AttributeNames=["All"])["Attributes"]
    assert (shown["VisibilityTimeout"], shown["DelaySeconds"]) == ("7", "0")
    assert shown["QueueArn"] == "arn:aws:sqs:eu-central-1:000000000000:list-0"
    for url in urls:
        sqs.delete_queue(QueueUrl=url)
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix="list-")
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.get_queue_url(QueueName="list-0")


def test_a_queue_that_is_created_again_is_empty(sqs: Client) -> None:
    url = sqs.create_queue(QueueName="again")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="old")
    sqs.delete_queue(QueueUrl=url)
    sqs.create_queue(QueueName="again")
    assert receive(sqs, url, wait=0) == []
    sqs.delete_queue(QueueUrl=url)


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"VisibilityTimeout": "43201"}, "InvalidAttributeValue"),
        ({"VisibilityTimeout": "x"}, "InvalidAttributeValue"),
        ({"Colour": "red"}, "InvalidAttributeName"),
        ({"ContentBasedDeduplication": "true"}, "InvalidAttributeName"),
        ({"FifoQueue": "true"}, "InvalidParameterValue"),
        ({"Policy": "{}"}, "AWS.SimpleQueueService.UnsupportedOperation"),
        ({"KmsMasterKeyId": "alias/aws/sqs"}, "AWS.SimpleQueueService.UnsupportedOperation"),
        ({"RedrivePolicy": "nonsense"}, "InvalidParameterValue"),
        ({"RedriveAllowPolicy": '{"redrivePermission": "byQueue"}'}, "InvalidParameterValue"),
        ({"RedriveAllowPolicy": '{"redrivePermission": "byQueue", "sourceQueueArns": ["x"]}'}, "InvalidParameterValue"),
        (
            {"RedriveAllowPolicy": '{"redrivePermission": "denyAll", "sourceQueueArns": ["arn:aws:sqs:x:0:a"]}'},
            "InvalidParameterValue",
        ),
        (
            {"RedrivePolicy": '{"deadLetterTargetArn": "arn:aws:sqs:x:0:nowhere", "maxReceiveCount": 1}'},
            "InvalidParameterValue",
        ),
    ],
)
def test_attributes_that_cannot_be_are_refused(sqs: Client, attributes: dict[str, str], code: str) -> None:
    assert code_of(lambda: sqs.create_queue(QueueName="refused", Attributes=attributes)) == code


def test_requests_that_cannot_be_are_refused_by_the_names_of_sqs(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(MaximumMessageSize="2048")
    send, prefix = sqs.send_message, "AWS.SimpleQueueService."
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: send(QueueUrl=url + "-not", MessageBody="x"), prefix + "NonExistentQueue"),
        (lambda: send(QueueUrl=url, MessageBody="ä" * 1025), "InvalidParameterValue"),
        (lambda: send(QueueUrl=url, MessageBody="\ufffe"), "InvalidMessageContents"),
        (lambda: send(QueueUrl=url, MessageBody=""), "MissingParameter"),
        (lambda: send(QueueUrl=url, MessageBody="x", DelaySeconds=901), "InvalidParameterValue"),
        (lambda: send(QueueUrl=url, MessageBody="x", MessageDeduplicationId="1"), "InvalidParameterValue"),
        (
            lambda: send(QueueUrl=url, MessageBody="x", MessageAttributes={"aws.x": {"DataType": "String"}}),
            "InvalidParameterValue",
        ),
        *(
            (partial(send, QueueUrl=url, MessageBody="x", MessageAttributes={"a": value}), "InvalidParameterValue")
            for value in (
                {"DataType": "Number", "StringValue": "nan"},
                {"DataType": "Number", "StringValue": "1_000"},
                {"DataType": "Number", "StringValue": "1e127"},
                {"DataType": "Number", "StringValue": "1" * 39},
                {"DataType": "String", "StringValue": "x", "StringListValues": ["y"]},
            )
        ),
        (lambda: sqs.tag_queue(QueueUrl=url, Tags={"aws:x": "y"}), "InvalidParameterValue"),
        (lambda: sqs.receive_message(QueueUrl=url, ReceiveRequestAttemptId="1"), "InvalidParameterValue"),
        (lambda: sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=11), "InvalidParameterValue"),
        (lambda: sqs.receive_message(QueueUrl=url, WaitTimeSeconds=21), "InvalidParameterValue"),
        (lambda: sqs.receive_message(QueueUrl=url, AttributeNames=["Colour"]), "InvalidAttributeName"),
        (lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle="nonsense"), "ReceiptHandleIsInvalid"),
        (lambda: sqs.send_message_batch(QueueUrl=url, Entries=[]), prefix + "EmptyBatchRequest"),
        (
            lambda: sqs.send_message_batch(
                QueueUrl=url, Entries=[{"Id": str(n), "MessageBody": "x"} for n in range(11)]
            ),
            prefix + "TooManyEntriesInBatchRequest",
        ),
        (
            lambda: sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "x"}] * 2),
            prefix + "BatchEntryIdsNotDistinct",
        ),
        (
            lambda: sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "x" * 1_048_577}]),
            prefix + "BatchRequestTooLong",
        ),
        (
            lambda: sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": "?", "MessageBody": "x"}]),
            prefix + "InvalidBatchEntryId",
        ),
        (lambda: sqs.create_queue(QueueName="a b"), "InvalidParameterValue"),
        (
            lambda: sqs.add_permission(QueueUrl=url, Label="x", AWSAccountIds=["1"], Actions=["*"]),
            prefix + "UnsupportedOperation",
        ),
        (lambda: sqs.remove_permission(QueueUrl=url, Label="x"), prefix + "UnsupportedOperation"),
    ]
    assert [code_of(call) for call, _ in refused] == [code for _, code in refused]
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"


def test_the_largest_message_fits(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue()
    sqs.send_message(QueueUrl=url, MessageBody="x" * 1_048_576)
    (message,) = receive(sqs, url)
    assert len(message["Body"]) == 1_048_576
    assert code_of(lambda: sqs.send_message(QueueUrl=url, MessageBody="x" * 1_048_577)) == "InvalidParameterValue"


def test_messages_are_items_of_a_topic(sqs: Client, sqs_server: Served, make_queue: MakeQueue) -> None:
    url = make_queue()
    name = url.rpartition("/")[2]
    item = {"namespace": "sqs", "topic": name, "data": {"from": "a client of topics"}}
    request = urllib.request.Request(f"{sqs_server.url}/api/v1/topics/enqueue", json.dumps([item]).encode())
    urllib.request.urlopen(request).close()
    (message,) = receive(sqs, url)
    assert json.loads(message["Body"]) == item["data"]
    sqs.send_message(QueueUrl=url, MessageBody="from boto3")
    with urllib.request.urlopen(f"{sqs_server.url}/api/v1/topics/dequeue?namespace=sqs&topic={name}") as answer:
        assert json.load(answer)[0]["payload"] == "ZnJvbSBib3RvMw=="
    with urllib.request.urlopen(f"{sqs_server.url}/metrics/prometheus") as answer:
        assert b"# TYPE queen_sqs_requests_total counter" in answer.read()


def test_a_queue_that_several_clients_create_at_once_loses_nothing(sqs: Client, sqs_server: Served) -> None:
    clients = [sqs_client(sqs_server.url) for _ in range(4)]

    def create_and_send(client: Client) -> None:
        url = client.create_queue(QueueName="race")["QueueUrl"]
        client.send_message(QueueUrl=url, MessageBody="x")

    threads = [threading.Thread(target=create_and_send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    url = sqs.get_queue_url(QueueName="race")["QueueUrl"]
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "4"
    sqs.delete_queue(QueueUrl=url)

"""Whatever a client sends as a parameter, it is answered as SQS answers: never with a fault of the server."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from queen.http.sqs.endpoint import ACTIONS
from tests.acceptance.served import Served

_NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "\0",
    "ä" * 300,
    "nonsense:arn",
    "WyJ4IiwxLDJd",
    [],
    [None],
    ["\0"],
    [{}],
    [{"Id": "a", "MessageBody": "x", "ReceiptHandle": "WyJ4IiwiMSIsIlwwIiwiIl0="}],
    {},
    {"\0": "\0"},
    {"x": None},
    {"x": {"DataType": [], "StringValue": 1}},
    {"RedrivePolicy": "[]"},
    {"RedrivePolicy": '{"deadLetterTargetArn": 1, "maxReceiveCount": {}}'},
    {"RedriveAllowPolicy": '{"redrivePermission": ["byQueue"]}'},
)
_PARAMETERS = {
    "CancelMessageMoveTask": ("TaskHandle",),
    "ChangeMessageVisibility": ("ReceiptHandle", "VisibilityTimeout"),
    "ChangeMessageVisibilityBatch": ("Entries",),
    "CreateQueue": ("QueueName", "Attributes", "tags"),
    "DeleteMessage": ("QueueUrl", "ReceiptHandle"),
    "DeleteMessageBatch": ("Entries",),
    "GetQueueAttributes": ("QueueUrl", "AttributeNames"),
    "GetQueueUrl": ("QueueName",),
    "ListDeadLetterSourceQueues": ("NextToken", "MaxResults"),
    "ListMessageMoveTasks": ("SourceArn", "MaxResults"),
    "ListQueueTags": ("QueueUrl",),
    "ListQueues": ("QueueNamePrefix", "NextToken", "MaxResults"),
    "ReceiveMessage": (
        "MaxNumberOfMessages",
        "VisibilityTimeout",
        "AttributeNames",
        "MessageSystemAttributeNames",
        "MessageAttributeNames",
        "ReceiveRequestAttemptId",
    ),
    "SendMessage": (
        "MessageBody",
        "DelaySeconds",
        "MessageAttributes",
        "MessageSystemAttributes",
        "MessageGroupId",
        "MessageDeduplicationId",
    ),
    "SendMessageBatch": ("Entries",),
    "SetQueueAttributes": ("Attributes",),
    "StartMessageMoveTask": ("SourceArn", "DestinationArn", "MaxNumberOfMessagesPerSecond"),
    "TagQueue": ("Tags",),
    "UntagQueue": ("TagKeys",),
}
_WITHOUT_PARAMETERS = {"AddPermission", "DeleteQueue", "PurgeQueue", "RemovePermission"}


@pytest.mark.parametrize("fifo", [False, True])
def test_no_parameter_makes_the_server_fail(sqs_server: Served, make_queue: Callable[..., str], fifo: bool) -> None:
    url = make_queue(fifo=fifo)
    connection = http.client.HTTPConnection(urlsplit(sqs_server.url).netloc, timeout=30)
    failed = []
    for action, params in _requests(url):
        body = json.dumps(params)
        connection.request("POST", "/sqs/", body, {"X-Amz-Target": f"AmazonSQS.{action}"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 500 or (answer.status != 200 and b"com.amazonaws.sqs#" not in text):
            failed.append((action, params, answer.status, text))
    connection.close()
    assert failed == []


def _requests(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each action with each of its parameters as it should not be, and the others as they should."""
    assert _PARAMETERS.keys() == ACTIONS.keys() - _WITHOUT_PARAMETERS
    good = {
        "QueueUrl": url,
        "QueueName": "bad-input",
        "MessageBody": "x",
        "MessageGroupId": "g",
        "MessageDeduplicationId": "d",
        "VisibilityTimeout": 0,
    }
    for action, names in _PARAMETERS.items():
        for name, value in itertools.product(names, _NASTY):
            yield action, {**good, name: value}


def test_bodies_that_are_no_requests_are_refused(sqs_server: Served) -> None:
    connection = http.client.HTTPConnection(urlsplit(sqs_server.url).netloc, timeout=30)
    target = {"X-Amz-Target": "AmazonSQS.SendMessage"}
    bodies: list[tuple[bytes, dict[str, str]]] = [
        (b"{", target),
        (b"[]", target),
        (b'{"MessageBody": "\xff"}', target),
        (b'{"MessageBody": "\\ud800"}', target),
        (b"[" * 100_000, target),
        (b"{}", {"X-Amz-Target": "DynamoDB_20120810.GetItem"}),
        (b"{}", {"X-Amz-Target": "AmazonSQS.SendMesage"}),
        (urlencode({f"a.{n}": "1" for n in range(3000)}).encode(), {}),
    ]
    for body, headers in bodies:
        connection.request("POST", "/sqs", body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 400, body[:40]
    connection.close()

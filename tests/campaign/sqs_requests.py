"""Requests of SQS for the fuzzer to mutate: every action, in both protocols, on a plain queue and on a FIFO queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec

_JSON = "application/x-amz-json-1.0"
_FORM = "application/x-www-form-urlencoded"
_encode = msgspec.json.encode


async def sqs_requests(session: aiohttp.ClientSession, url: str) -> list[bytes]:
    """As they go over the wire; the queues that they name are made."""

    async def call(action: str, **params: Any) -> Any:
        headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": _JSON}
        async with session.post(f"{url}/sqs", data=_encode(params), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return msgspec.json.decode(await answer.read() or b"{}")

    dead = (await call("CreateQueue", QueueName="fuzzed-dead"))["QueueUrl"]
    found = await call("GetQueueAttributes", QueueUrl=dead, AttributeNames=["QueueArn"])
    dead_arn = found["Attributes"]["QueueArn"]
    requests = []
    for name, attributes in (("fuzzed", {}), ("fuzzed.fifo", {"FifoQueue": "true"})):
        queue = (await call("CreateQueue", QueueName=name, Attributes=attributes))["QueueUrl"]
        group = {"MessageGroupId": "g", "MessageDeduplicationId": "d"} if attributes else {}
        await call("SendMessage", QueueUrl=queue, MessageBody="first", **group)
        received = await call("ReceiveMessage", QueueUrl=queue, VisibilityTimeout=1000)
        handle = received["Messages"][0]["ReceiptHandle"]
        for action, params in good_calls(queue, handle, group, dead, dead_arn):
            requests.append(_request(_encode(params), _JSON, f"X-Amz-Target: AmazonSQS.{action}\r\n"))
            form = {"Action": action, "Version": "2012-11-05", **dict(_flat(params))}
            requests.append(_request(urlencode(form).encode(), _FORM))
    return requests


def good_calls(
    queue: str, handle: str, group: dict[str, str], dead: str, dead_arn: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every action with parameters that it takes."""
    own = {"QueueUrl": queue}
    text = {"DataType": "String", "StringValue": "é"}
    entries = [{"Id": id, "MessageBody": id, **group} for id in ("a", "b")]
    seen = {"ReceiptHandle": handle, "VisibilityTimeout": 2}
    redrive = _encode({"deadLetterTargetArn": dead_arn, "maxReceiveCount": 3}).decode()
    attributes = {"VisibilityTimeout": "3", "RedrivePolicy": "" if group else redrive}
    yield "AddPermission", own | {"Label": "l", "AWSAccountIds": ["1"], "Actions": ["SendMessage"]}
    yield "CancelMessageMoveTask", {"TaskHandle": "WyJ4IiwxLDJd"}
    yield "ChangeMessageVisibility", own | seen
    yield "ChangeMessageVisibilityBatch", own | {"Entries": [{"Id": "a", **seen}]}
    yield "CreateQueue", {"QueueName": "fuzzed-more", "Attributes": {"DelaySeconds": "1"}, "tags": {"a": "b"}}
    yield "DeleteMessage", own | {"ReceiptHandle": handle}
    yield "DeleteMessageBatch", own | {"Entries": [{"Id": "a", "ReceiptHandle": handle}]}
    yield "DeleteQueue", {"QueueUrl": f"{dead}-not"}
    yield "GetQueueAttributes", own | {"AttributeNames": ["All"]}
    yield "GetQueueUrl", {"QueueName": "fuzzed"}
    yield "ListDeadLetterSourceQueues", {"QueueUrl": dead, "MaxResults": 3}
    yield "ListMessageMoveTasks", {"SourceArn": dead_arn, "MaxResults": 3}
    yield "ListQueueTags", own
    yield "ListQueues", {"QueueNamePrefix": "fuzz", "MaxResults": 3}
    yield "PurgeQueue", own
    names = {"AttributeNames": ["All"], "MessageAttributeNames": ["t"]}
    receive = own | names | {"MaxNumberOfMessages": 3, "VisibilityTimeout": 1, "WaitTimeSeconds": 0}
    yield "ReceiveMessage", receive | ({"ReceiveRequestAttemptId": "r"} if group else {})
    yield "RemovePermission", own | {"Label": "l"}
    yield "SendMessage", own | {"MessageBody": "x", "MessageAttributes": {"t": text}, **group}
    yield "SendMessageBatch", own | {"Entries": entries}
    yield "SetQueueAttributes", own | {"Attributes": attributes}
    yield "StartMessageMoveTask", {"SourceArn": dead_arn, "MaxNumberOfMessagesPerSecond": 5}
    yield "TagQueue", own | {"Tags": {"a": "b"}}
    yield "UntagQueue", own | {"TagKeys": ["a"]}


_LISTS = {
    "AttributeNames": "AttributeName", "MessageAttributeNames": "MessageAttributeName", "TagKeys": "TagKey",
    "AWSAccountIds": "AWSAccountId", "Actions": "ActionName",
}  # fmt: skip
_MAPS = {"Attributes": ("Attribute", "Name"), "Tags": ("Tag", "Key"), "tags": ("Tag", "Key")}


def _flat(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameters as forms number them."""
    for name, value in params.items():
        if name in _LISTS:
            yield from ((f"{_LISTS[name]}.{number}", one) for number, one in enumerate(value, 1))
        elif name in _MAPS:
            prefix, key = _MAPS[name]
            for number, (one, other) in enumerate(value.items(), 1):
                yield from ((f"{prefix}.{number}.{key}", one), (f"{prefix}.{number}.Value", other))
        elif name == "MessageAttributes":
            yield "MessageAttribute.1.Name", "t"
            yield from ((f"MessageAttribute.1.Value.{key}", one) for key, one in value["t"].items())
        elif name == "Entries":
            kind = "SendMessageBatch" if "MessageBody" in value[0] else "DeleteMessageBatch"
            if "VisibilityTimeout" in value[0]:
                kind = "ChangeMessageVisibilityBatch"
            for number, entry in enumerate(value, 1):
                yield from ((f"{kind}RequestEntry.{number}.{key}", one) for key, one in entry.items())
        else:
            yield name, value


def _request(body: bytes, content_type: str, headers: str = "") -> bytes:
    head = f"POST /sqs HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

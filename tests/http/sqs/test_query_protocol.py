"""The protocol of older SDKs: forms with `Action=`, answered in XML."""

from __future__ import annotations

import base64
import http.client
from typing import Any
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

import pytest

from tests.acceptance.served import Served

_XMLNS = "{http://queue.amazonaws.com/doc/2012-11-05/}"


class QueryClient:
    """Calls actions at the address of a queue, or at that of the endpoint."""

    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def call(
        self, action: str, params: dict[str, str], path: str = "/sqs", method: str = "POST"
    ) -> ElementTree.Element:
        """The root of the answer, without namespaces."""
        form = urlencode({"Action": action, "Version": "2012-11-05", **params})
        _, answer = self.exchange(method, path if method == "POST" else f"{path}?{form}", form)
        root = ElementTree.fromstring(answer)
        for element in root.iter():
            element.tag = element.tag.removeprefix(_XMLNS)
        return root

    def exchange(self, method: str, target: str, body: str) -> tuple[tuple[int, str], bytes]:
        connection = http.client.HTTPConnection(self._netloc, timeout=30)
        headers = {"Content-Type": "application/x-www-form-urlencoded"} if method == "POST" else {}
        connection.request(method, target, body if method == "POST" else None, headers)
        answer = connection.getresponse()
        found = (answer.status, answer.headers["Content-Type"]), answer.read()
        connection.close()
        return found


@pytest.fixture
def client(sqs_server: Served) -> QueryClient:
    return QueryClient(sqs_server.url)


def text_of(root: ElementTree.Element, path: str) -> str:
    found = root.findtext(path)
    assert found is not None, ElementTree.tostring(root)
    return found


def test_a_message_goes_round_in_xml(client: QueryClient) -> None:
    params = {"QueueName": "old-sdk", "Attribute.1.Name": "DelaySeconds", "Attribute.1.Value": "0"}
    created = client.call("CreateQueue", params | {"Tag.1.Key": "team", "Tag.1.Value": "x"})
    assert created.tag == "CreateQueueResponse"
    url = text_of(created, "CreateQueueResult/QueueUrl")
    path = urlsplit(url).path
    assert text_of(client.call("ListQueues", {"QueueNamePrefix": "old-"}), "ListQueuesResult/QueueUrl") == url
    sent = client.call(
        "SendMessage",
        {
            "MessageBody": "a <b> & c\r\n",
            "MessageAttribute.1.Name": "text",
            "MessageAttribute.1.Value.DataType": "String",
            "MessageAttribute.1.Value.StringValue": "<ä&\r\n",
            "MessageAttribute.2.Name": "bytes",
            "MessageAttribute.2.Value.DataType": "Binary",
            "MessageAttribute.2.Value.BinaryValue": base64.b64encode(b"\x00\xff").decode(),
        },
        path,
    )
    batch = {f"SendMessageBatchRequestEntry.{n}.Id": f"id-{n}" for n in (1, 2)}
    batch |= {f"SendMessageBatchRequestEntry.{n}.MessageBody": body for n, body in ((1, "two"), (2, "\x02"))}
    answer = client.call("SendMessageBatch", batch | {"QueueUrl": url})
    assert text_of(answer, "SendMessageBatchResult/SendMessageBatchResultEntry/Id") == "id-1"
    assert text_of(answer, "SendMessageBatchResult/BatchResultErrorEntry/SenderFault") == "true"
    received: dict[str, Any] = {}
    while len(received) < 2:
        asked = {"MaxNumberOfMessages": "10", "WaitTimeSeconds": "5"}
        names = {"AttributeName.1": "ApproximateReceiveCount", "MessageAttributeName.1": "All"}
        page = client.call("ReceiveMessage", asked | names, path, "GET")
        received |= {text_of(one, "MessageId"): one for one in page.iterfind("ReceiveMessageResult/Message")}
    first = received[text_of(sent, "SendMessageResult/MessageId")]
    assert text_of(first, "Body") == "a <b> & c\r\n"
    assert text_of(first, "MessageAttribute[Name='text']/Value/StringValue") == "<ä&\r\n"
    assert text_of(first, "MessageAttribute[Name='bytes']/Value/BinaryValue") == "AP8="
    assert text_of(first, "MD5OfMessageAttributes") == text_of(sent, "SendMessageResult/MD5OfMessageAttributes")
    assert text_of(first, "Attribute[Name='ApproximateReceiveCount']/Value") == "1"
    handles = [text_of(one, "ReceiptHandle") for one in received.values()]
    entries = {f"DeleteMessageBatchRequestEntry.{n}.Id": str(n) for n in (1, 2)}
    entries |= {f"DeleteMessageBatchRequestEntry.{n}.ReceiptHandle": handles[n - 1] for n in (1, 2)}
    answer = client.call("DeleteMessageBatch", entries, path)
    assert len(answer.findall("DeleteMessageBatchResult/DeleteMessageBatchResultEntry")) == 2
    counted = client.call("GetQueueAttributes", {"AttributeName.1": "ApproximateNumberOfMessagesNotVisible"}, path)
    assert text_of(counted, "GetQueueAttributesResult/Attribute/Value") == "0"
    tags = client.call("ListQueueTags", {}, path)
    assert text_of(tags, "ListQueueTagsResult/Tag[Key='team']/Value") == "x"
    client.call("UntagQueue", {"TagKey.1": "team"}, path)
    # A result is there also when it is empty, unless an action never has one.
    empty = client.call("ReceiveMessage", {}, path).find("ReceiveMessageResult")
    assert empty is not None and len(empty) == 0
    assert [one.tag for one in client.call("DeleteQueue", {}, path)] == ["ResponseMetadata"]
    refused = client.call("SendMessage", {"MessageBody": "x"}, path)
    assert text_of(refused, "Error/Code") == "AWS.SimpleQueueService.NonExistentQueue"
    assert text_of(refused, "Error/Type") == "Sender"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("Action=SendMesage", "InvalidAction"),
        ("", "MissingAction"),
        ("Action=SendMessage&QueueUrl=x&QueueUrl.1=y", "MalformedInput"),
        ("Action=SendMessage&MessageBody=%ff", "MalformedInput"),
        ("Action=SendMessage", "MissingParameter"),
    ],
)
def test_what_is_no_action_is_refused_in_xml(client: QueryClient, body: str, code: str) -> None:
    head, answer = client.exchange("POST", "/sqs/", body)
    assert head == (400, "text/xml")
    assert f"<Code>{code}</Code>" in answer.decode()


def test_clients_that_know_a_host_and_a_port_alone_are_served_at_the_root(client: QueryClient) -> None:
    assert client.call("ListQueues", {"QueueNamePrefix": "none"}, "/").tag == "ListQueuesResponse"
    assert client.exchange("GET", "/", "")[0][1].startswith("text/html")

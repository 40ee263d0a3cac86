"""What clients of other versions than the one that is installed do; run in an environment of theirs."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

OPTIONS = {"region_name": "eu-central-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}


def old_boto3(endpoint: str) -> None:
    """One of the time when SDKs spoke the query protocol."""
    import boto3

    sqs: Any = boto3.client("sqs", endpoint_url=endpoint, **OPTIONS)
    assert sqs.meta.service_model.metadata["protocol"] == "query"
    dead = sqs.create_queue(QueueName="old-dead", tags={"team": "x"})["QueueUrl"]
    assert sqs.list_queue_tags(QueueUrl=dead)["Tags"] == {"team": "x"}
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 2})
    url = sqs.create_queue(QueueName="old", Attributes={"RedrivePolicy": policy})["QueueUrl"]
    assert sqs.get_queue_url(QueueName="old")["QueueUrl"] == url
    assert sqs.list_queues(QueueNamePrefix="old")["QueueUrls"] == [url, dead]
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [url]
    attributes = {
        "n": {"DataType": "Number", "StringValue": "1"},
        "b": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
    }
    # It compares the checksums of what it sends and receives by itself.
    sqs.send_message(QueueUrl=url, MessageBody="a <b> & c\n", MessageAttributes=attributes)
    for expected in ("1", "2"):
        (message,) = sqs.receive_message(
            QueueUrl=url, WaitTimeSeconds=5, AttributeNames=["All"], MessageAttributeNames=["All"]
        )["Messages"]
        assert (message["Body"], message["MessageAttributes"]) == ("a <b> & c\n", attributes), message
        assert message["Attributes"]["ApproximateReceiveCount"] == expected
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0)
    assert "Messages" not in sqs.receive_message(QueueUrl=url)
    (message,) = sqs.receive_message(QueueUrl=dead, WaitTimeSeconds=5)["Messages"]
    sqs.delete_message(QueueUrl=dead, ReceiptHandle=message["ReceiptHandle"])
    entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(3)] + [{"Id": "bad", "MessageBody": "\x01"}]
    answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert [len(answer["Successful"]), answer["Failed"][0]["Id"]] == [3, "bad"]
    left = 3
    while left:
        messages = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=5)["Messages"]
        handles = [{"Id": one["MessageId"], "ReceiptHandle": one["ReceiptHandle"]} for one in messages]
        left -= len(sqs.delete_message_batch(QueueUrl=url, Entries=handles)["Successful"])
    sqs.delete_queue(QueueUrl=dead)
    sqs.delete_queue(QueueUrl=url)
    try:
        sqs.send_message(QueueUrl=url, MessageBody="x")
    except sqs.exceptions.QueueDoesNotExist as error:
        assert error.response["Error"]["Code"] == "AWS.SimpleQueueService.NonExistentQueue"
    else:
        raise AssertionError("a queue that is deleted took a message")


async def aioboto3(endpoint: str) -> None:
    import aioboto3

    async with aioboto3.Session().resource("sqs", endpoint_url=endpoint, **OPTIONS) as sqs:
        queue = await sqs.create_queue(QueueName="aioboto3.fifo", Attributes={"FifoQueue": "true"})
        sends = [
            queue.send_message(MessageBody=str(n), MessageGroupId=f"g{n % 2}", MessageDeduplicationId=str(n))
            for n in range(10)
        ]
        await asyncio.gather(*sends)
        seen: list[str] = []
        while len(seen) < 10:
            for message in await queue.receive_messages(MaxNumberOfMessages=10, WaitTimeSeconds=5):
                seen.append(await message.body)
                await message.delete()
        assert sorted(seen, key=int) == [str(n) for n in range(10)], seen
        await queue.delete()


if __name__ == "__main__":
    if sys.argv[1] == "boto3":
        old_boto3(sys.argv[2])
    else:
        asyncio.run(aioboto3(sys.argv[2]))

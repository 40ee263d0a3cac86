"""One server that speaks SQS, for all tests that do not stop it, and boto3 in front of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import Served, served
from tests.support.databases import create_database

Client = Any
"""A client of boto3, which carries no types."""

MOST_IN_FLIGHT = 60
_numbers = itertools.count()


def sqs_client(url: str, key: str = "any", secret: str = "any", path: str = "/sqs") -> Client:
    """boto3 at a server; a request that fails is not tried again."""
    return boto3.client(
        "sqs",
        endpoint_url=url + path,
        region_name="eu-central-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=boto3.session.Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture(scope="session")
def sqs_dsn(postgres: EmbeddedPostgres) -> str:
    return postgres.dsn(asyncio.run(create_database(postgres)))


@pytest.fixture(scope="session")
def sqs_server(sqs_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`queen serve` with two workers and without authentication."""
    settings = {"QUEEN_SQS": "true", "QUEEN_SQS_IN_FLIGHT": str(MOST_IN_FLIGHT)}
    with served(tmp_path_factory.mktemp("sqs"), DATABASE_URLS=sqs_dsn, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def sqs(sqs_server: Served) -> Client:
    return sqs_client(sqs_server.url)


@pytest.fixture
def make_queue(sqs: Client) -> Iterator[Callable[..., str]]:
    """Makes queues with names of their own; gives their URLs."""
    made: list[str] = []

    def make(fifo: bool = False, **attributes: str) -> str:
        name = f"queue-{next(_numbers)}"
        if fifo:
            name, attributes = f"{name}.fifo", {"FifoQueue": "true", **attributes}
        made.append(sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])
        return made[-1]

    yield make
    for url in made:
        sqs.delete_queue(QueueUrl=url)


def receive(sqs: Client, url: str, limit: int = 10, wait: int = 5, **options: Any) -> list[Any]:
    """Messages with all their attributes."""
    answer = sqs.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=limit,
        WaitTimeSeconds=wait,
        AttributeNames=["All"],
        MessageAttributeNames=["All"],
        **options,
    )
    messages: list[Any] = answer.get("Messages", [])
    return messages


def bodies(messages: list[Any]) -> list[str]:
    return [message["Body"] for message in messages]


def attribute(sqs: Client, url: str, name: str) -> str:
    value: str = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name]
    return value


def delete(sqs: Client, url: str, messages: list[Any]) -> None:
    entries = [{"Id": str(n), "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(messages)]
    answer = sqs.delete_message_batch(QueueUrl=url, Entries=entries)
    assert len(answer["Successful"]) == len(messages), answer

"""How many messages of a queue may be in flight. The server of these tests has a low limit, and counts now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.http.sqs.conftest import MOST_IN_FLIGHT, Client, delete, receive

MakeQueue = Callable[..., str]


def fill(sqs: Client, url: str, messages: int) -> None:
    for start in range(0, messages, 10):
        entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(start, start + 10)]
        if url.endswith(".fifo"):
            entries = [{**entry, "MessageGroupId": entry["Id"]} for entry in entries]
        sqs.send_message_batch(QueueUrl=url, Entries=entries)


def test_a_standard_queue_with_too_many_messages_in_flight_refuses_receives(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(VisibilityTimeout="600")
    sent = 3 * MOST_IN_FLIGHT
    fill(sqs, url, sent)
    received: list[Any] = []
    with pytest.raises(sqs.exceptions.OverLimit):
        while True:
            received += receive(sqs, url, wait=0)
    # One that waits is not refused. The other worker may not have counted yet.
    while messages := receive(sqs, url, wait=1):
        received += messages
    assert MOST_IN_FLIGHT <= len(received) < sent
    for start in range(0, len(received), 10):
        delete(sqs, url, received[start : start + 10])
    assert receive(sqs, url), "once they are deleted others are received"


def test_a_fifo_queue_with_too_many_messages_in_flight_is_as_if_empty(sqs: Client, make_queue: MakeQueue) -> None:
    url = make_queue(fifo=True, VisibilityTimeout="600", ContentBasedDeduplication="true")
    sent = 3 * MOST_IN_FLIGHT
    fill(sqs, url, sent)
    received: list[Any] = []
    while messages := receive(sqs, url, wait=1):
        received += messages
    assert MOST_IN_FLIGHT <= len(received) < sent
    delete(sqs, url, received[:10])

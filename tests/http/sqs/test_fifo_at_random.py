"""Consumers of one FIFO queue that delete in any order, give messages back, and forget some."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.served import Served
from tests.http.sqs.conftest import Client, attribute, receive, sqs_client


class Consumers:
    """Checks what is delivered: never what was deleted, in order, and of a group to one consumer at a time."""

    def __init__(self, url: str, messages: int, seed: int) -> None:
        self._url = url
        self._left = {str(number) for number in range(messages)}
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._seed = seed
        self.problems: list[str] = []

    def run(self, sqs: Client, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        try:
            while self._left and not self.problems:
                self._work(sqs, number, chance)
        except Exception as error:
            self.problems.append(repr(error))

    def _work(self, sqs: Client, number: int, chance: random.Random) -> None:
        by_group: dict[str, list[Any]] = {}
        for message in receive(sqs, self._url, chance.randint(1, 10), wait=1):
            by_group.setdefault(message["Attributes"]["MessageGroupId"], []).append(message)
        for group, messages in by_group.items():
            self._take(number, group, messages)
        for group, messages in by_group.items():
            chance.shuffle(messages)
            keep = chance.randint(0, len(messages))
            for message in messages[:keep]:
                with self._lock:
                    self._left.discard(message["Body"])
                    if keep == len(messages) and message is messages[-1]:
                        self._held.pop(group)
                sqs.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
            self._give_back(sqs, group, messages[keep:])

    def _take(self, number: int, group: str, messages: list[Any]) -> None:
        with self._lock:
            if group in self._held:
                self.problems.append(f"{group} is held by {self._held[group]} and was given to {number}")
            self._held[group] = number
            bodies = [int(message["Body"]) for message in messages]
            if bodies != sorted(bodies):
                self.problems.append(f"{group} came as {bodies}")
            first = min((int(body) for body in self._left if f"g{int(body) % 5}" == group), default=-1)
            if bodies[0] != first:
                self.problems.append(f"{group} began with {bodies[0]}, and not with {first}")
            gone = [body for body in bodies if str(body) not in self._left]
            if gone:
                self.problems.append(f"{gone} were deleted and delivered again")

    def _give_back(self, sqs: Client, group: str, messages: list[Any]) -> None:
        if not messages:
            return
        with self._lock:
            self._held.pop(group)
        entries = [
            {"Id": str(n), "ReceiptHandle": one["ReceiptHandle"], "VisibilityTimeout": 0}
            for n, one in enumerate(messages)
        ]
        answer = sqs.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)
        if "Failed" in answer:
            self.problems.append(str(answer["Failed"]))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_every_message_is_deleted_once_and_none_comes_back(
    sqs: Client, sqs_server: Served, make_queue: Callable[..., str], seed: int
) -> None:
    url, messages = make_queue(fifo=True, VisibilityTimeout="600", ContentBasedDeduplication="true"), 60
    for start in range(0, messages, 10):
        entries = [
            {"Id": str(n), "MessageBody": str(n), "MessageGroupId": f"g{n % 5}"} for n in range(start, start + 10)
        ]
        sqs.send_message_batch(QueueUrl=url, Entries=entries)
    consumers = Consumers(url, messages, seed)
    threads = [threading.Thread(target=consumers.run, args=(sqs_client(sqs_server.url), number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert consumers.problems == []
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"

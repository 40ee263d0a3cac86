"""Administrative calls of the client: each is of a route that there is, and does what it says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from queen import Queen, QueenError
from queen.client.admin import AdminCalls
from tests.support.api import Api

DUMMIES: dict[str, Any] = {
    "bool": True,
    "int": 1,
    "str": "a/b",
    "Mapping[str, Any]": {},
    "Sequence[str]": ["a"],
}


def calls() -> Iterator[tuple[str, str, str]]:
    """Each method with the request that it makes."""
    sent: list[tuple[str, str]] = []
    admin = AdminCalls[None](lambda method, path, body: sent.append((method, path)))
    for name, method in inspect.getmembers(admin, inspect.ismethod):
        if name.startswith("_"):
            continue
        arguments = [
            DUMMIES[str(one.annotation).removesuffix(" | None")]
            for one in inspect.signature(method).parameters.values()
            if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        method(*arguments)
        ((verb, path),) = sent
        yield name, verb, path
        sent.clear()


async def test_every_call_is_of_a_route(api: Api) -> None:
    document = (await api.call("GET", "/openapi.json")).body
    routes = [
        (verb.upper(), re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path)))
        for path, operations in document["paths"].items()
        for verb in operations
    ]
    made = list(calls())
    unknown = [
        (name, verb, path)
        for name, verb, path in made
        if not any(verb == known and pattern.fullmatch(path.partition("?")[0]) for known, pattern in routes)
    ]
    assert not unknown
    assert len(made) > 60


async def test_messages_are_given_up_retried_and_deleted(queen: Queen) -> None:
    await queen.queue("tasks").push([{"data": n, "transactionId": f"t{n}"} for n in range(3)])
    listed = (await queen.admin.list_messages(queue="tasks"))["messages"]
    first, second, third = sorted(listed, key=lambda one: one["transactionId"])

    def named(message: dict[str, Any]) -> list[dict[str, str]]:
        return [{key: message[key] for key in ("partitionId", "transactionId")}]

    await queen.admin.dead_letter_messages(
        "tasks", messages=named(first), consumerGroup="workers", error="no such customer"
    )
    (dead,) = (await queen.queue("tasks").group("workers").dlq().get())["messages"]
    assert (dead["transactionId"], dead["errorMessage"]) == ("t0", "no such customer")

    await queen.admin.retry_messages("tasks", messages=named(second))
    await queen.admin.delete_messages("tasks", messages=named(third))
    left = [message["data"] for message in await queen.queue("tasks").group("readers").batch(10).pop()]
    assert sorted(left) == [0, 1, 1]


async def test_a_seek_is_listed_and_undone(queen: Queen) -> None:
    await queen.queue("tasks").partition("p").push([{"data": n} for n in range(4)])
    readers = queen.queue("tasks").group("readers").batch(2).wait(False)
    await queen.ack(await readers.pop(), True, {"group": "readers"})
    await queen.admin.seek_partition_to_end("readers", "tasks", "p")
    assert await readers.pop() == []
    sought = await queen.admin.seek_consumer_group("readers", "tasks", {"toBeginning": True})
    assert [one["seekId"] for one in (await queen.admin.list_seeks("readers", "tasks"))["seeks"]][:1] == [
        sought["seekId"]
    ]
    await queen.admin.undo_seek("readers", "tasks", sought["seekId"])
    assert await readers.pop() == []


async def test_what_was_counted_over_time_is_read_with_its_parameters(queen: Queen) -> None:
    assert (await queen.admin.get_retention(queue="tasks"))["totals"]["totalMsgs"] == 0
    assert await queen.admin.get_queue_lag(queue="other") == []
    assert (await queen.admin.get_queue_operations(queue="other"))["queues"] == []
    assert (await queen.admin.get_parked_consumers(queue="tasks"))["replicas"] == []
    for read in (queen.admin.get_queue_lag, queen.admin.get_queue_operations, queen.admin.get_parked_consumers):
        with pytest.raises(QueenError, match="from"):
            await read(**{"from": "noon"})

"""What the newest client can do beyond its own tests: copied beside them, and run with that client."""

from __future__ import annotations

import asyncio
import importlib
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

# By its name only: the module of this project has the same.
published: Any = importlib.import_module("queen")
errors: Any = importlib.import_module("queen.errors")
URL = os.environ["QUEEN_SERVER_URL"]
FORMS = {
    "binary": {"binary_push": True},
    "compressed": {"binary_push": True, "push_compression": True},
    "framed": {"framed_pop": True},
    "all": {"binary_push": True, "push_compression": True, "framed_pop": True},
}


@pytest.fixture
def name() -> str:
    return f"test-forms-{uuid.uuid4().hex}"


@pytest_asyncio.fixture(params=FORMS)
async def forms(request: Any) -> AsyncIterator[Any]:
    async with published.Queen(URL, **FORMS[request.param]) as queen:
        yield queen


async def test_messages_travel_in_every_form(forms: Any, name: str) -> None:
    pushed = (
        await forms.queue(name)
        .partition("p")
        .push([{"data": {"n": n, "text": "ü" * 100}, "transactionId": f"t{n}"} for n in range(20)])
    )
    assert [one["status"] for one in pushed] == ["queued"] * 20
    again = await forms.queue(name).partition("p").push([{"data": 1, "transactionId": "t3"}])
    assert again[0]["status"] == "duplicate"
    messages = await forms.queue(name).group("g").batch(50).pop()
    assert [one["data"]["n"] for one in messages] == list(range(20))
    assert [one["transactionId"] for one in messages] == [f"t{n}" for n in range(20)]
    assert (await forms.ack(messages, True, {"group": "g"}))["success"]
    assert not await forms.queue(name).group("g").batch(50).wait(False).pop()


async def test_consumers_and_buffers_use_every_form(forms: Any, name: str) -> None:
    seen: list[int] = []
    await forms.queue(name).buffer({"message_count": 5, "time_millis": 50}).push([{"data": n} for n in range(12)])
    await forms.flush_all_buffers()

    async def handle(message: Any) -> None:
        seen.append(message["data"])

    await forms.queue(name).batch(4).limit(12).each().consume(handle)
    assert sorted(seen) == list(range(12))


async def test_transactions_travel_in_every_form(forms: Any, name: str) -> None:
    await forms.queue(name).push([{"data": 1}])
    messages = await forms.queue(name).pop()
    answer = await forms.transaction().queue(f"{name}-out").push([{"data": "done"}]).ack(messages[0]).commit()
    assert [one["type"] for one in answer["results"]] == ["push", "ack"]
    assert [one["data"] for one in await forms.queue(f"{name}-out").pop()] == ["done"]


async def test_conflation_gives_the_newest(forms: Any, name: str) -> None:
    for n in range(5):
        await forms.queue(name).partition("p").push([{"data": n}])
    messages = await forms.queue(name).group("g").conflation().batch(10).pop()
    assert [one["data"] for one in messages] == [4]
    await forms.ack(messages, True, {"group": "g"})
    assert await forms.queue(name).group("g").conflation().batch(10).wait(False).pop() == []
    assert len(await forms.queue(name).group("other").batch(10).pop()) == 5
    depth = await forms.admin.get_queue_depth(name, "g")
    assert (depth["conflation"], depth["effectivePending"]) == (True, 0)


async def test_conflation_that_was_decided_otherwise_is_reported(client: Any, name: str, capsys: Any) -> None:
    await client.queue(name).push([{"data": n} for n in range(3)])
    await client.ack(await client.queue(name).group("g").batch(1).pop(), True, {"group": "g"})
    assert len(await client.queue(name).group("g").conflation().batch(10).pop()) == 2
    assert "conflation conflict" in capsys.readouterr().err
    with pytest.raises(Exception, match="consumerGroup"):
        await client.queue(name).conflation().pop()
    with pytest.raises(Exception, match="autoAck"):
        await client.queue(name).group("g").conflation().commit_on_delivery().pop()


async def test_ephemeral_queues(client: Any, name: str) -> None:
    queues = client.ephemeral
    with pytest.raises(errors.EphemeralQueueNotFoundError):
        await queues.depth(name)
    await queues.configure(name, max_length=3, ttl_seconds=60, window_buffer={"ms": 5, "count": 2})
    waiting = asyncio.create_task(queues.pop(name, batch=9, wait=True, timeout=20_000, group="g"))
    assert await queues.push(name, [{"n": 1}, {"n": 2}], partition="room") == {"pushed": 2}
    messages = (await waiting)["messages"]
    assert [(one["payload"], one["partition"], one["attempts"]) for one in messages] == [
        ({"n": 1}, "room", 1),
        ({"n": 2}, "room", 1),
    ]
    with pytest.raises(errors.EphemeralError):
        await published.Queen(URL, retry_429={"max_attempts": 1}).ephemeral.push(name, [3, 4])
    answer = await queues.ack(name, [messages[0], {"id": messages[1]["id"], "status": "retry"}], group="g")
    assert [one["outcome"] for one in answer["results"]] == ["acked", "redelivered"]
    (again,) = (await queues.pop(name, group="g"))["messages"]
    assert again["attempts"] == 2
    assert (await queues.reset(name))["dropped"] == 1
    assert (await queues.ack(name, [again], group="g"))["results"][0]["outcome"] == "stale"
    await queues.push(name, "x", buffered=True)
    await queues.flush(name)
    assert (await queues.pop(name, commit_on_delivery=True))["messages"][0]["payload"] == "x"
    assert name in [one["queue"] for one in (await queues.queues())["queues"]]
    assert (await queues.delete(name))["declared"] is True

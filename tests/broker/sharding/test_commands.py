"""`queen shards`, as an operator runs it, and what is left of it when it is killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.wire.shards import Name, home
from tests.broker.sharding.names import queue_on, topic_on
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item, values


async def start_command(dsns: tuple[str, ...], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("queen")), "shards", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "DATABASE_URLS": ",".join(dsns), "COLUMNS": "200"},
    )


async def command(dsns: tuple[str, ...], *arguments: str) -> tuple[int | None, str]:
    process = await start_command(dsns, *arguments)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def queues_of(dsn: str) -> list[str]:
    connection = await asyncpg.connect(dsn)
    try:
        return [row["name"] for row in await connection.fetch("SELECT name FROM queen.queues ORDER BY name")]
    finally:
        await connection.close()


async def test_shards_are_listed_without_passwords(api: Api, dsns: tuple[str, str]) -> None:
    await api.push(queue_on(1), 1)
    named = dsns[0].replace("postgres@", "postgres:geheim@"), dsns[1]
    code, out = await command(named, "list")
    assert code == 0, out
    assert "geheim" not in out
    assert len(re.findall(r"\bopen\b", out)) == 2
    code, out = await command(dsns, "move", "nobody", "--to", "1")
    assert (code, "there is no queue nobody" in out) == (1, True)


async def test_a_shard_is_added_filled_and_drained(start_server: StartServer, dsns: tuple[str, str]) -> None:
    old = [f"old-{number}" for number in range(4)]
    api = await start_server(database_urls=dsns[:1])
    for name in old:
        await api.push(name, name)
    assert api.worker is not None
    await api.worker.stop()

    code, out = await command(dsns[:1], "add", dsns[1])
    assert code == 0 and "is shard 1" in out, out
    code, out = await command(dsns[:1], "add", dsns[1], "--open")
    assert code == 1 and "DATABASE_URLS does not name it yet" in out, out
    api = await start_server(database_urls=dsns)
    topics = TopicApi(api)
    code, out = await command(dsns, "add", dsns[1], "--open")
    assert code == 0, out
    assert await queues_of(dsns[1]) == []
    await api.push(queue_on(1, "new-"), 1)
    await topics.enqueue(item("t", topic_on(1)), item("u", topic_on(0)))
    assert await queues_of(dsns[1]) == [queue_on(1, "new-")]
    code, out = await command(dsns, "move", old[0], "--to", "1")
    assert code == 0 and f"queue {old[0]} is on shard 1" in out, out
    code, out = await command(dsns, "move", f"ns/{topic_on(0)}", "--to", "1")
    assert code == 0, out

    code, out = await command(dsns, "drain", "1")
    assert code == 0 and "shard 1 is empty" in out, out
    assert await queues_of(dsns[1]) == []
    assert await queues_of(dsns[0]) == sorted([*old, queue_on(1, "new-")])
    for name in old:
        assert [message["data"] for message in await api.pop(name, wait=True)] == [name]
    assert values(await topics.dequeue(topic=topic_on(1), wait=True)) == ["t"]
    assert values(await topics.dequeue(topic=topic_on(0), wait=True)) == ["u"]
    later = next(f"later-{number}" for number in range(50) if home(Name.queue(f"later-{number}"), (0, 1)) == 1)
    await api.push(later, 1)
    assert later in await queues_of(dsns[0])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_a_mover_that_is_killed_leaves_a_queue_that_has_moved_or_has_not(
    api: Api, dsns: tuple[str, str], kills: int
) -> None:
    """At moments drawn at random; each time the queue is whole, and the next attempt finishes the work."""
    queue = queue_on(0)
    await api.configure(queue)
    pushed: list[int] = []
    consumed: list[Any] = []
    stop = asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            number = len(pushed)
            answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": queue, "payload": number}]})
            assert answer.status == 201, answer
            pushed.append(number)
            # Often enough to be met by every stage of a move, and the processors are left to those who move.
            await asyncio.sleep(0.01)

    async def consume() -> None:
        # Until the last push has been answered, there may be one more than was pushed.
        while not (producing.done() and len(consumed) == len(pushed)):
            messages = await api.pop(queue, wait=True, timeout=1000, batch=50)
            if messages:
                assert all(result["success"] for result in await api.ack(messages))
                consumed.extend(message["data"] for message in messages)

    producing = asyncio.create_task(produce())
    consuming = asyncio.create_task(consume())
    dice = random.Random(7)
    to = 1
    for _ in range(kills):
        process = await start_command(dsns, "move", queue, "--to", str(to))
        assert process.stdout is not None
        # Python takes most of the time to start; what counts is after the first line.
        await asyncio.wait([asyncio.create_task(process.stdout.read(1))])
        await asyncio.sleep(dice.uniform(0, 0.15))
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        code, out = await command(dsns, "move", queue, "--to", str(to))
        assert code == 0, out
        assert queue in await queues_of(dsns[to])
        assert queue not in await queues_of(dsns[1 - to])
        to = 1 - to
    stop.set()
    await asyncio.gather(producing, consuming)
    assert consumed == pushed

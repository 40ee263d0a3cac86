"""Staged publishing on two shards: each has its part of a batch, and publishes it once."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import asyncpg
import msgspec
import pytest

from queen.broker.sharding.fleet import connect_fleet
from queen.broker.sharding.move import Mover
from queen.errors import Conflict, SettingsError
from queen.spark.sink.publishers import ShardPublisher, StagedPart
from queen.spark.sink.shard_writer import Shard
from queen.wire.push import PushItem
from queen.wire.shards import Name
from tests.broker.sharding.names import queue_on
from tests.support.api import Api
from tests.support.database import stored_ids
from tests.support.topic_api import TopicApi, item, values

RUN = "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11"
QUEUES = [f"q{number}" for number in range(8)]


async def stage(api: Api, batch: int, items: list[Any], **more: Any) -> list[dict[str, Any]]:
    """Stage a piece; returns what a publish says of it."""
    attempt = str(uuid.uuid4())
    body = {"run": RUN, "batch": batch, "attempt": attempt, "items": items} | more
    answer = await api.call("POST", "/api/v1/stages", body)
    assert answer.status == 201, answer
    assert answer.body["staged"] == sum(place["messages"] for place in answer.body["shards"])
    return [{"attempt": attempt} | place for place in answer.body["shards"]]


async def publish(api: Api, batch: int, attempts: list[dict[str, Any]]) -> Any:
    answer = await api.call("POST", "/api/v1/stages/publish", {"run": RUN, "batch": batch, "attempts": attempts})
    assert answer.status == 200, answer
    return answer.body


async def test_a_batch_for_queues_of_both_shards_is_published_once(api: Api, dsns: tuple[str, str]) -> None:
    items = [{"queue": queue, "payload": number} for queue in QUEUES for number in range(3)]
    attempts = await stage(api, 0, items)
    assert {place["shard"] for place in attempts} == {0, 1}
    assert await publish(api, 0, attempts) == {"messages": 24, "duplicates": 0, "repeated": False}
    assert await publish(api, 0, attempts) == {"messages": 24, "duplicates": 0, "repeated": True}
    for queue in QUEUES:
        assert [message["data"] for message in await api.pop(queue, batch=10)] == [0, 1, 2]
    for dsn in dsns:
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("SELECT count(*) FROM queen.stages") == 0
        await connection.close()


async def test_a_shard_that_has_published_does_not_again_when_the_other_follows(
    api: Api, dsns: tuple[str, str]
) -> None:
    items = [{"queue": queue, "payload": queue} for queue in QUEUES]
    attempts = await stage(api, 0, items)
    await publish(api, 0, [one for one in attempts if one["shard"] == 0])
    # As if the driver had died in between: it stages all of it anew.
    await publish(api, 0, await stage(api, 0, items))
    counts = []
    for dsn in dsns:
        connection = await asyncpg.connect(dsn)
        counts += [len(await stored_ids(connection, queue)) for queue in QUEUES]
        await connection.close()
    assert sorted(counts) == [0] * 8 + [1] * 8


async def test_an_abandoned_batch_leaves_nothing_on_any_shard(api: Api) -> None:
    await stage(api, 0, [{"queue": queue, "payload": 1} for queue in QUEUES])
    answer = await api.call("POST", "/api/v1/stages/abandon", {"run": RUN, "batch": 0})
    assert answer.body == {"removed": 8}


async def test_items_go_to_the_shards_of_their_topics(api: Api, topics: TopicApi) -> None:
    names = [f"t{number}" for number in range(6)]
    attempts = await stage(api, 0, [], topicItems=[item(name, topic=name) for name in names])
    assert (await publish(api, 0, attempts))["messages"] == 6
    for name in names:
        assert values(await topics.dequeue(topic=name)) == [name]


async def test_a_writer_follows_a_queue_that_moves(api: Api, dsns: tuple[str, str]) -> None:
    """As a Python process of Spark that is kept from batch to batch."""
    queue = queue_on(0)
    await api.push(queue, "first")
    async with connect_fleet(dsns) as fleet:
        mover = Mover(fleet)
        publisher = await asyncio.to_thread(ShardPublisher, dsns, encryption_keys=(), dedup_window=3600.0)

        def write(batch: int) -> list[StagedPart]:
            staging = publisher.begin(RUN, batch)
            staging.add([PushItem(queue, "Default", msgspec.Raw(b"%d" % batch))])
            return staging.finish()

        await asyncio.to_thread(lambda: publisher.publish(RUN, 0, write(0)))
        await mover.move(Name.queue(queue), 1)
        await asyncio.to_thread(lambda: publisher.publish(RUN, 1, write(1)))
        staged = await asyncio.to_thread(write, 2)
        await mover.move(Name.queue(queue), 0)
        with pytest.raises(Conflict, match=f"queue {queue} was moved to shard 0 after the batch was staged"):
            await asyncio.to_thread(publisher.publish, RUN, 2, staged)
        await asyncio.to_thread(lambda: publisher.publish(RUN, 2, write(2)))
        await asyncio.to_thread(publisher.close)
    assert [message["data"] for message in await api.pop(queue, batch=10, wait=True)] == ["first", 0, 1, 2]


async def test_a_batch_that_is_published_during_a_move_moves_with_its_queue(
    api: Api, dsns: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placing its segments, under the locks of their partitions, does not count as rewriting them."""
    monkeypatch.setattr("queen.log.stage_moves._COPIED_AHEAD_BYTES", 0)
    queue = queue_on(0)
    await api.push(queue, "first")
    attempts = await stage(api, 0, [{"queue": queue, "payload": number} for number in range(3)])

    class Publishing(Mover):
        async def _switch_over(self, *arguments: Any) -> None:
            assert (await publish(api, 0, attempts))["messages"] == 3
            connection = await asyncpg.connect(dsns[0])
            assert await connection.fetchval("SELECT count(*) FROM queen.moves WHERE kind = 'queue'") == 1
            assert await connection.fetch("SELECT FROM queen.rewritten_segments") == []
            await connection.close()
            await super()._switch_over(*arguments)

    async with connect_fleet(dsns) as fleet:
        await Publishing(fleet).move(Name.queue(queue), 1)
    assert [message["data"] for message in await api.pop(queue, batch=10, wait=True)] == ["first", 0, 1, 2]


async def test_a_writer_that_is_refused_fails_at_once(api: Api, dsns: tuple[str, str]) -> None:
    shard = Shard(dsns[0].replace("postgres@", "nobody@"), dedup_window=60.0, outage_grace=600.0)
    with pytest.raises(SettingsError, match='refuses the connection: role "nobody" does not exist'):
        await asyncio.to_thread(shard.layout)

"""A queue of thousands of partitions."""

from __future__ import annotations

from tests.acceptance.scenario import Scene, scenario

PARTITIONS = 5000
PER_TRANSACTION = 500


@scenario(alone=True, seconds=90)
async def a_new_group_finds_all_of_five_thousand_partitions(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push_to_all(scene, queue, "old")
        builder = scene.queen.queue(queue).group("g").subscription_mode("new").batch(1000).partitions(1000)
        assert await builder.wait(False).pop() == []
        await _push_to_all(scene, queue, "new")
        found: list[str] = []
        while messages := await builder.wait(False).pop():
            assert {message["data"] for message in messages} == {"new"}
            found += [message["partition"] for message in messages]
            await scene.queen.ack(messages, True, {"group": "g"})
        assert len(found) == len(set(found)) == PARTITIONS, (len(found), len(set(found)))


@scenario(alone=True, seconds=90)
async def wildcard_pops_over_five_thousand_partitions_meet_a_new_one_each(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push_to_all(scene, queue, "one")
        found: set[str] = set()
        for _ in range(200):
            [message] = await scene.queen.queue(queue).wait(False).pop()
            found.add(message["partition"])
        assert len(found) == 200, len(found)


async def _push_to_all(scene: Scene, queue: str, data: str) -> None:
    for start in range(0, PARTITIONS, PER_TRANSACTION):
        transaction = scene.queen.transaction()
        for number in range(start, start + PER_TRANSACTION):
            transaction = transaction.queue(queue).partition(f"p{number}").push([{"data": data}])
        await transaction.commit()
